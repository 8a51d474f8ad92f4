// torch's base class as it is: what it does not support raises, and the shim has to override it.
#include "stub.h"

namespace torch::cuda::CUDAPluggableAllocator {
namespace {

using vramx::DeviceIndex;
using vramx::DeviceStats;
using vramx::MempoolId_t;
namespace torch_cuda = vramx::torch_cuda;

[[noreturn]] void unsupported(const char* name) {
  TORCH_CHECK(false, "CUDAPluggableAllocator does not yet support ", name);
}

std::shared_ptr<torch_cuda::CUDAAllocator>* current = nullptr;  // never destroyed

}  // namespace

using Base = CUDAPluggableAllocator;

Base::CUDAPluggableAllocator(std::function<void*(size_t, int, cudaStream_t)> alloc_fn,
                             std::function<void(void*, size_t, int, cudaStream_t)> free_fn)
    : alloc_fn_(std::move(alloc_fn)), free_fn_(std::move(free_fn)) {}

c10::DataPtr Base::allocate(size_t) { unsupported("allocate"); }
c10::DeleterFnPtr Base::raw_deleter() const { unsupported("raw_deleter"); }
void* Base::raw_alloc(size_t) { unsupported("raw_alloc"); }
void* Base::raw_alloc_with_stream(size_t, cudaStream_t) { unsupported("raw_alloc_with_stream"); }
void Base::raw_delete(void*) { unsupported("raw_delete"); }
void Base::init(int) { unsupported("init"); }
bool Base::initialized() { unsupported("initialized"); }
double Base::getMemoryFraction(DeviceIndex) { unsupported("getMemoryFraction"); }
void Base::setMemoryFraction(double, DeviceIndex) { unsupported("setMemoryFraction"); }
void Base::cacheInfo(DeviceIndex, size_t*) { unsupported("cacheInfo"); }
void* Base::getBaseAllocation(void*, size_t*) { unsupported("getBaseAllocation"); }
void Base::recordStream(const c10::DataPtr&, c10::cuda::CUDAStream) { unsupported("recordStream"); }
DeviceStats Base::getDeviceStats(DeviceIndex) { unsupported("getDeviceStats"); }
void Base::resetAccumulatedStats(DeviceIndex) { unsupported("resetAccumulatedStats"); }
void Base::resetPeakStats(DeviceIndex) { unsupported("resetPeakStats"); }
void Base::beginAllocateToPool(DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>) {
  unsupported("beginAllocateToPool");
}
void Base::endAllocateToPool(DeviceIndex, MempoolId_t) { unsupported("endAllocateToPool"); }
void Base::releasePool(DeviceIndex, MempoolId_t) { unsupported("releasePool"); }
std::shared_ptr<void> Base::getIpcDevPtr(std::string) { unsupported("getIpcDevPtr"); }
torch_cuda::ShareableHandle Base::shareIpcHandle(void*) { unsupported("shareIpcHandle"); }
void Base::attachOutOfMemoryObserver(torch_cuda::OutOfMemoryObserver) {
  unsupported("attachOutOfMemoryObserver");
}
void Base::attachAllocatorTraceTracker(torch_cuda::AllocatorTraceTracker) {
  unsupported("attachAllocatorTraceTracker");
}
std::shared_ptr<torch_cuda::AllocatorState> Base::getCheckpointState(DeviceIndex, MempoolId_t) {
  unsupported("getCheckpointState");
}
torch_cuda::CheckpointDelta Base::setCheckpointPoolState(
    DeviceIndex, std::shared_ptr<torch_cuda::AllocatorState>) {
  unsupported("setCheckpointPoolState");
}
void Base::enablePeerAccess(DeviceIndex, DeviceIndex) { unsupported("enablePeerAccess"); }
cudaError_t Base::memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) {
  unsupported("memcpyAsync");
}
std::string Base::name() { return "pluggable"; }
void Base::copy_data(void*, const void*, std::size_t) const { unsupported("copy_data"); }

#if VRAMX_TORCH >= 208
void Base::emptyCache(MempoolId_t) { unsupported("emptyCache"); }
#else
void Base::emptyCache() { unsupported("emptyCache"); }
#endif
#if VRAMX_TORCH >= 210
std::vector<torch_cuda::StreamSegmentSize> Base::getExpandableSegmentSizes(DeviceIndex) {
  unsupported("getExpandableSegmentSizes");
}
#endif
#if VRAMX_TORCH >= 211
torch_cuda::SnapshotInfo Base::snapshot(MempoolId_t, bool) { unsupported("snapshot"); }
void Base::recordHistory(bool, torch_cuda::CreateContextFn, size_t, torch_cuda::RecordContext, bool,
                         const std::vector<std::string>&) {
  unsupported("recordHistory");
}
#elif VRAMX_TORCH >= 208
torch_cuda::SnapshotInfo Base::snapshot(MempoolId_t) { unsupported("snapshot"); }
void Base::recordHistory(bool, torch_cuda::CreateContextFn, size_t, torch_cuda::RecordContext,
                         bool) {
  unsupported("recordHistory");
}
#else
torch_cuda::SnapshotInfo Base::snapshot() { unsupported("snapshot"); }
void Base::recordHistory(bool, torch_cuda::CreateContextFn, size_t, torch_cuda::RecordContext) {
  unsupported("recordHistory");
}
#endif
#if VRAMX_TORCH >= 212
void Base::attachOomRejectionObserver(torch_cuda::OomRejectionObserver) {
  unsupported("attachOomRejectionObserver");
}
#endif

void changeCurrentAllocator(const std::shared_ptr<torch_cuda::CUDAAllocator>& allocator) {
  TORCH_CHECK(!torch_cuda::get()->initialized(), "Can't swap an already initialized allocator");
  torch_cuda::allocator.store(allocator.get());
  current = new std::shared_ptr<torch_cuda::CUDAAllocator>(allocator);
}

}  // namespace torch::cuda::CUDAPluggableAllocator
