// CUDA graphs and memory pools, which native keeps: it is told everything, and here is only kept
// which requests are to go there. What comes back carries our deleter, by which torch knows the
// tensors of its allocator.
#include "torch/shim.h"

namespace vramx {

// Native first, so that no request is sent there that it would not put into the pool; and for the
// same reason the other way round at the end.
void Shim::beginAllocateToPool(DeviceIndex device, MempoolId_t pool, StreamFilter filter) {
  native_.beginAllocateToPool(device, pool, filter);
  filters_.add(device, pool, std::move(filter));
}

void Shim::endAllocateToPool(DeviceIndex device, MempoolId_t pool) {
  filters_.remove(device, pool);
  native_.endAllocateToPool(device, pool);
}

void Shim::releasePool(DeviceIndex device, MempoolId_t pool) {
  const NativeScope scope(0);
  native_.releasePool(device, pool);
}

int Shim::getPoolUseCount(DeviceIndex device, MempoolId_t pool) {
  return native_.getPoolUseCount(device, pool);
}

#if VRAMX_TORCH >= 211
void Shim::createOrIncrefPool(DeviceIndex device, MempoolId_t pool,
                              std::shared_ptr<CUDAAllocator> allocator) {
  native_.createOrIncrefPool(device, pool, std::move(allocator));
}

void Shim::setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use_on_oom) {
  native_.setUseOnOOM(device, pool, use_on_oom);
  if (use_on_oom) has_spare_pools_.store(true);
}
#elif VRAMX_TORCH >= 208
void Shim::createOrIncrefPool(DeviceIndex device, MempoolId_t pool, CUDAAllocator* allocator) {
  native_.createOrIncrefPool(device, pool, allocator);
}

void Shim::setUseOnOOM(DeviceIndex device, MempoolId_t pool) {
  native_.setUseOnOOM(device, pool);
  has_spare_pools_.store(true);
}
#else
void Shim::ensureExistsAndIncrefPool(DeviceIndex device, MempoolId_t pool) {
  native_.ensureExistsAndIncrefPool(device, pool);
}
#endif

#if VRAMX_TORCH >= 210
void Shim::setNoSplit(DeviceIndex device, MempoolId_t pool) { native_.setNoSplit(device, pool); }

std::vector<torch_cuda::StreamSegmentSize> Shim::getExpandableSegmentSizes(DeviceIndex device) {
  return native_.getExpandableSegmentSizes(device);
}
#endif

bool Shim::checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool,
                                    const std::unordered_set<void*>& expected) {
  return native_.checkPoolLiveAllocations(device, pool, expected);
}

std::shared_ptr<torch_cuda::AllocatorState> Shim::getCheckpointState(DeviceIndex device,
                                                                     MempoolId_t pool) {
  return native_.getCheckpointState(device, pool);
}

torch_cuda::CheckpointDelta Shim::setCheckpointPoolState(
    DeviceIndex device, std::shared_ptr<torch_cuda::AllocatorState> state) {
  torch_cuda::CheckpointDelta delta = native_.setCheckpointPoolState(device, std::move(state));
  for (c10::DataPtr& data : delta.dataptrs_allocd) {
    void* const pointer = data.get();
    data.release_context();
    data = wrap(pointer, device);
  }
  settle(device);
  return delta;
}

#if VRAMX_TORCH >= 213
void Shim::markCaptureBegin(DeviceIndex device) { native_.markCaptureBegin(device); }

void Shim::markCaptureEnd(DeviceIndex device) { native_.markCaptureEnd(device); }

c10::DataPtr Shim::allocateWithAddress(size_t size, void* address) {
  c10::DataPtr data;
  {
    const NativeScope scope(size);
    data = native_.allocateWithAddress(size, address);
  }
  const DeviceIndex device = data.device().index();
  void* const pointer = data.get();
  data.release_context();
  settle(device);
  return wrap(pointer, device);
}
#endif

}  // namespace vramx
