// An allocator in the place of torch's own, small but working: host memory, blocks of 512 bytes
// upwards kept in a cache, pools by filter, statistics, a limit, a history. It writes down what it
// is asked, so that a test sees what reached it. Not thread-safe.
#pragma once

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "stub.h"

namespace vramx::stub {

using Pluggable = torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;
using Tracker = torch_cuda::AllocatorTraceTracker;

class Native final : public Pluggable {
 public:
  Native() : Pluggable(nullptr, nullptr) {}

  std::vector<std::string> journal;
  int stats_reads = 0;
  int fractions_set = 0;
  // A pool that gets its segments from this allocator, as MemPool(allocator) asks for.
  CUDAAllocator* segment_source = nullptr;

  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void* raw_alloc(size_t size) override;
  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override;
  void raw_delete(void* pointer) override;
  void init(int device_count) override;
  bool initialized() override { return !devices_.empty(); }
  std::string name() override { return name_; }
  void rename(std::string name) { name_ = std::move(name); }
  void enable(bool value) override { is_enabled_ = value; }
  bool isEnabled() const override { return is_enabled_; }
  double fraction(DeviceIndex device) { return at(device).fraction; }
  double getMemoryFraction(DeviceIndex device) override;
  void setMemoryFraction(double fraction, DeviceIndex device) override;
  void cacheInfo(DeviceIndex device, size_t* largest) override;
  void* getBaseAllocation(void* pointer, size_t* size) override;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override;
  DeviceStats getDeviceStats(DeviceIndex device) override {
    ++stats_reads;
    return at(device).stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override;
  void resetPeakStats(DeviceIndex device) override;
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, StreamFilter filter) override;
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override;
  void releasePool(DeviceIndex device, MempoolId_t pool) override;
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  torch_cuda::ShareableHandle shareIpcHandle(void* pointer) override;
  // The real one reads the first of no devices before it is initialised, and crashes.
  bool isHistoryEnabled() override {
    if (!initialized()) std::abort();
    return keeps_history_;
  }
  void attachOutOfMemoryObserver(torch_cuda::OutOfMemoryObserver observer) override;
  void attachAllocatorTraceTracker(Tracker tracker) override { tracker_ = std::move(tracker); }
  torch_cuda::CheckpointDelta setCheckpointPoolState(
      DeviceIndex device, std::shared_ptr<torch_cuda::AllocatorState> state) override;
  void enablePeerAccess(DeviceIndex device, DeviceIndex accessed) override;
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t count,
                          cudaStream_t stream, bool p2p_enabled) override;
#if VRAMX_TORCH >= 211
  void setUseOnOOM(DeviceIndex, MempoolId_t, bool) override {}
  void createOrIncrefPool(DeviceIndex, MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> allocator) override {
    make_pool(pool, allocator.get());
  }
#elif VRAMX_TORCH >= 208
  void setUseOnOOM(DeviceIndex, MempoolId_t) override {}
  void createOrIncrefPool(DeviceIndex, MempoolId_t pool, CUDAAllocator* allocator) override {
    make_pool(pool, allocator);
  }
#endif
#if VRAMX_TORCH >= 210
  // The real ones crash before it is initialised, as isHistoryEnabled() does.
  void setUserMetadata(const std::string& metadata) override {
    if (!initialized()) std::abort();
    user_metadata_ = metadata;
  }
  std::string getUserMetadata() override {
    if (!initialized()) std::abort();
    return user_metadata_;
  }
#endif
#if VRAMX_TORCH >= 208
  void emptyCache(MempoolId_t pool) override;
#else
  void emptyCache() override;
#endif
#if VRAMX_TORCH >= 211
  torch_cuda::SnapshotInfo snapshot(MempoolId_t pool, bool include_traces) override;
  void recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                     torch_cuda::RecordContext when, bool clears,
                     const std::vector<std::string>& skipped) override;
#elif VRAMX_TORCH >= 208
  torch_cuda::SnapshotInfo snapshot(MempoolId_t pool) override;
  void recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                     torch_cuda::RecordContext when, bool clears) override;
#else
  torch_cuda::SnapshotInfo snapshot() override;
  void recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                     torch_cuda::RecordContext when) override;
#endif

 private:
  struct Block {
    std::size_t size = 0;
    DeviceIndex device = 0;
    bool is_live = false;
    bool is_from_source = false;
  };
  struct Device {
    DeviceStats stats;
    double fraction = 1;
    std::vector<TraceEntry> trace;
  };

  struct Pool {
    int use_count = 0;
    bool is_filling = false;
  };

  Device& at(DeviceIndex device) { return devices_.at(static_cast<std::size_t>(device)); }
  // Every pool's segments come from the last pool's allocator, which does for a test.
  void make_pool(MempoolId_t id, CUDAAllocator* allocator) {
    ++pools_[id].use_count;
    segment_source = allocator;
  }
  void touch_for_fraction(DeviceIndex device);
  void note(std::string text) { journal.push_back(std::move(text)); }
  void* from_cache(std::size_t size, DeviceIndex device);
  void* grow(std::size_t size, DeviceIndex device);
  bool has_room(std::size_t size, DeviceIndex device);
  void count(Device& device, std::size_t size, bool is_allocated);
  void record(TraceEntry::Action action, DeviceIndex device, void* pointer, std::size_t size);
  torch_cuda::SnapshotInfo whole_snapshot();

  std::vector<Device> devices_;
  std::map<void*, Block> blocks_;
  std::map<MempoolId_t, Pool> pools_;
  c10::ApproximateClockToUnixTimeConverter clock_;
  std::string name_ = "native";
  bool is_enabled_ = true;
  bool keeps_history_ = false;
  std::string user_metadata_;
  Tracker tracker_;
  std::vector<torch_cuda::OutOfMemoryObserver> observers_;
};

Native& native();

}  // namespace vramx::stub
