// torch's CUDA allocator with the core in front and torch's own allocator behind it.
//
//   request ── ordinary ──────────────────────────────► core
//        └──── of a CUDA graph or a memory pool ───┐
//              caching switched off ───────────────┼──► torch's own allocator, "native"
//              device that the core cannot serve ──┘
//
// A pointer is the core's if the core knows it, and native's otherwise. What is asked about memory
// as a whole - statistics, snapshot, limit, empty_cache - is answered for both together.
//
// It decides who serves a request and joins the answers; its parts hold the state. There is one in
// a process, never destroyed: tensors outlive everything else. Thread-safe. Lock order: a part's
// own lock, then native's; the core, trackers, observers and the stack recorder are called without
// any. In a child that was forked once CUDA was initialised a free does nothing and an allocation
// is native's to refuse; neither takes a lock. An ordinary allocation costs a few loads more than
// the core and torch's own look-ups of the stream and, where there are several, the device.
#pragma once

#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "torch/core.h"
#include "torch/flags.h"
#include "torch/history.h"
#include "torch/limits.h"
#include "torch/native_scope.h"
#include "torch/pool_filters.h"
#include "torch/statistics.h"
#include "torch/torch_api.h"
#include "torch/torch_streams.h"

namespace vramx {

class Shim final : public torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
 public:
  Shim(Allocators& core, CUDAAllocator& native);

  // Makes `self` the one in this process: what frees memory is connected both ways. Once.
  static void connect(Shim& self);
  // Null before connect().
  static Shim* installed() { return installed_; }

  void set_limit(int device, std::uint64_t bytes) { limits_.set(device, bytes); }
  // A profiler of torch starts on some thread: from now on every call looks for its thread's.
  // Before the first one, one allocation in kProfilerPeriod does, for one that nobody announces.
  void note_profiler() { has_profiled_.store(true, std::memory_order_relaxed); }
  // Gives back what the core has unused, if native would ask the device in vain for what it was
  // asked for. Called by native from inside an allocation. Says whether memory came free.
  bool reclaim_for_native();

  // --- allocations (shim.cpp) -------------------------------------------------------------------
  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void* raw_alloc(size_t size) override;
  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override;
  void raw_delete(void* pointer) override;
#if VRAMX_TORCH >= 209
  using CUDAAllocator::recordStream;  // the form with a c10::Stream, which calls the one below
#endif
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override;
  void init(int device_count) override;
  bool initialized() override { return device_count_.load() > 0; }
  void enable(bool value) override;
  bool isEnabled() const override { return native_.isEnabled(); }
  std::string name() override { return "vramx"; }

  // --- memory as a whole (shim_capacity.cpp) ----------------------------------------------------
#if VRAMX_TORCH >= 208
  void emptyCache(MempoolId_t pool = {0, 0}) override;
#else
  void emptyCache() override;
#endif
  void cacheInfo(DeviceIndex device, size_t* largest) override;
  double getMemoryFraction(DeviceIndex device) override;
  void setMemoryFraction(double fraction, DeviceIndex device) override;
  void attachOutOfMemoryObserver(torch_cuda::OutOfMemoryObserver observer) override;
#if VRAMX_TORCH >= 212
  void attachOomRejectionObserver(torch_cuda::OomRejectionObserver observer) override;
#endif

  // --- reports (shim_reports.cpp) ---------------------------------------------------------------
  DeviceStats getDeviceStats(DeviceIndex device) override;
  void resetAccumulatedStats(DeviceIndex device) override;
  void resetPeakStats(DeviceIndex device) override;
#if VRAMX_TORCH >= 211
  torch_cuda::SnapshotInfo snapshot(MempoolId_t pool, bool include_traces = true) override;
  void recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                     RecordContext when, bool clears,
                     const std::vector<std::string>& skipped) override;
#elif VRAMX_TORCH >= 208
  torch_cuda::SnapshotInfo snapshot(MempoolId_t pool) override;
  void recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                     RecordContext when, bool clears) override;
#else
  torch_cuda::SnapshotInfo snapshot() override;
  void recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                     RecordContext when) override;
#endif
  bool isHistoryEnabled() override { return history_.is_enabled(); }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& labels) override;
  void attachAllocatorTraceTracker(Tracker tracker) override;
#if VRAMX_TORCH >= 208
  void pushCompileContext(std::string& label) override;
  void popCompileContext() override;
#endif
#if VRAMX_TORCH >= 210
  void setUserMetadata(const std::string& metadata) override;
  std::string getUserMetadata() override;
#endif
#if VRAMX_TORCH >= 212
  Context getContextForPointer(const void* pointer) override;
#endif
#if VRAMX_TORCH >= 214
  bool supportsUserMetadata() override { return native_.supportsUserMetadata(); }
  void annotateMemory(const void* pointer, const std::string& metadata) override;
#endif

  // --- CUDA graphs and memory pools (shim_pools.cpp) --------------------------------------------
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, StreamFilter filter) override;
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override;
  void releasePool(DeviceIndex device, MempoolId_t pool) override;
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override;
#if VRAMX_TORCH >= 211
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> allocator) override;
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use_on_oom) override;
#elif VRAMX_TORCH >= 208
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, CUDAAllocator* allocator) override;
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool) override;
#else
  void ensureExistsAndIncrefPool(DeviceIndex device, MempoolId_t pool) override;
#endif
#if VRAMX_TORCH >= 210
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override;
  std::vector<torch_cuda::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override;
#endif
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override;
  std::shared_ptr<torch_cuda::AllocatorState> getCheckpointState(DeviceIndex device,
                                                                 MempoolId_t pool) override;
  torch_cuda::CheckpointDelta setCheckpointPoolState(
      DeviceIndex device, std::shared_ptr<torch_cuda::AllocatorState> state) override;
#if VRAMX_TORCH >= 213
  void markCaptureBegin(DeviceIndex device) override;
  void markCaptureEnd(DeviceIndex device) override;
  c10::DataPtr allocateWithAddress(size_t size, void* address) override;
#endif

  // --- other devices and processes (shim_sharing.cpp) -------------------------------------------
  void* getBaseAllocation(void* pointer, size_t* size) override;
  torch_cuda::ShareableHandle shareIpcHandle(void* pointer) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  void enablePeerAccess(DeviceIndex device, DeviceIndex accessed) override;
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t count,
                          cudaStream_t stream, bool p2p_enabled) override;

 private:
  struct Request {
    std::size_t size;
    DeviceIndex device;
    cudaStream_t stream;
  };

  // What every DataPtr of ours carries, native's memory included: torch tells its allocator's
  // tensors from others by this function.
  static void release(void* pointer);
  static c10::DataPtr wrap(void* pointer, DeviceIndex device) {
    return {pointer, pointer, &release, cuda_device(device)};
  }

  // To look for a profiler takes a twentieth of an allocation.
  static constexpr std::uint32_t kProfilerPeriod = 16;

  bool is_of_core(const void* pointer) const;
  bool is_profiler_looked_for();
  DeviceIndex current_device() const;
  bool goes_native(const Request& request);
  void* serve(const Request& request);
  void* serve_observed(const Request& request);
  void* serve_refused(const Request& request, CoreCode code, const Context& context);
  void* serve_from_native(const Request& request);
  void note_allocated(const Request& request, void* pointer, const Context& context);
  void free_observed(void* pointer);
  void free_native(void* pointer);
  void note_freed(const CoreBlock& block, const Context& context);
  void report_usage(void* pointer, std::int64_t change, DeviceIndex device);
  void remember_native_deleter();

  // Ends, in torch's stead, the captures that are over without an end; `beginning` as for
  // PoolFilters::take_abandoned. Not from inside native.
  void end_abandoned_captures(cudaStream_t beginning = nullptr);
  void end_abandoned(const PoolFilters::Abandoned& capture);
  // After a call that may have changed what native holds on a device.
  void settle(DeviceIndex device);
  void check_device(DeviceIndex device) const;
  int device_count() const { return device_count_.load(); }

  [[noreturn]] void fail(const Request& request, const Context& context);
  std::string out_of_memory_text(DeviceIndex device) const;
  void relieve(DeviceIndex device);
  bool lacks_memory(DeviceIndex device, std::size_t request) const;

  torch_cuda::SnapshotInfo join_snapshot(torch_cuda::SnapshotInfo info, bool include_traces);
  void note_mapping(const CoreEvent& event);

  inline static Shim* installed_ = nullptr;

  Allocators& core_;
  CUDAAllocator& native_;
  const bool is_uncached_;  // torch was told to ask CUDA for every tensor
  std::atomic<int> device_count_{0};
  std::atomic<c10::DeleterFnPtr> native_deleter_{nullptr};
  std::atomic<bool> has_spare_pools_{false};   // some pool was made to be used in need
  std::atomic<bool> has_profiled_{false};      // never cleared: profilers come again
  std::atomic<std::uint32_t> allocations_{0};  // before that

  Flags flags_;
  PoolFilters filters_{flags_};
  const TorchStreams streams_{filters_};
  JointStatistics statistics_{core_, native_, flags_};
  JointLimits limits_{core_, native_, statistics_};
  History history_{flags_};
  c10::ApproximateClockToUnixTimeConverter clock_;

  std::mutex observers_mutex_;
  std::vector<torch_cuda::OutOfMemoryObserver> observers_;
};

}  // namespace vramx
