// CUDA graphs and memory pools, which native keeps: it is told everything, and here is only kept
// which requests are to go there. What comes back carries our deleter, by which torch knows the
// tensors of its allocator.
#include "torch/shim.h"

namespace vramx {

// Native first, so that no request is sent there that it would not put into the pool; and for the
// same reason the other way round at the end. On the stream of a capture that begins no other is
// under way any more, whatever torch has told.
void Shim::beginAllocateToPool(DeviceIndex device, MempoolId_t pool, StreamFilter filter) {
  end_abandoned_captures(c10::cuda::getCurrentCUDAStream(device).stream());
  native_.beginAllocateToPool(device, pool, filter);
  filters_.add(device, pool, std::move(filter));
}

// What is not known here began before a late installation.
void Shim::endAllocateToPool(DeviceIndex device, MempoolId_t pool) {
  if (filters_.remove(device, pool) == PoolFilters::Removal::kWasAbandoned) return;
  native_.endAllocateToPool(device, pool);
}

void Shim::end_abandoned_captures(cudaStream_t beginning) {
  if (!filters_.has_any() || core_.is_in_child()) return;
  for (const PoolFilters::Abandoned& each : filters_.take_abandoned(beginning)) {
    // What cannot be ended stays as torch left it, and is no business of who happened to look.
    try {
      end_abandoned(each);
    } catch (...) {
    }
  }
}

// Up to 2.13 torch also keeps the graph's share of the pool for good, and with it the pool's
// memory; later releases give it up with the graph. A pool that a program named itself, and that
// nobody else has a share in, stays: the next capture may name it again.
void Shim::end_abandoned(const PoolFilters::Abandoned& capture) {
  native_.endAllocateToPool(capture.device, capture.pool);
#if VRAMX_TORCH < 214
  const bool is_named = capture.pool.first == 0;
  if (!capture.is_certain) return;
  if (is_named && native_.getPoolUseCount(capture.device, capture.pool) < 2) return;
  releasePool(capture.device, capture.pool);
#endif
}

void Shim::releasePool(DeviceIndex device, MempoolId_t pool) {
  const NativeScope scope(0);
  native_.releasePool(device, pool);
}

int Shim::getPoolUseCount(DeviceIndex device, MempoolId_t pool) {
  return native_.getPoolUseCount(device, pool);
}

// A pool that names us as its allocator is an ordinary one of native's: what the core lent it would
// be counted on both sides, by statistics, snapshots and limits.
#if VRAMX_TORCH >= 211
void Shim::createOrIncrefPool(DeviceIndex device, MempoolId_t pool,
                              std::shared_ptr<CUDAAllocator> allocator) {
  if (allocator.get() == this) allocator = nullptr;
  native_.createOrIncrefPool(device, pool, std::move(allocator));
}

void Shim::setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use_on_oom) {
  native_.setUseOnOOM(device, pool, use_on_oom);
  if (use_on_oom) has_spare_pools_.store(true);
}
#elif VRAMX_TORCH >= 208
void Shim::createOrIncrefPool(DeviceIndex device, MempoolId_t pool, CUDAAllocator* allocator) {
  if (allocator == this) allocator = nullptr;
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
  limits_.prepare(current_device());
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
