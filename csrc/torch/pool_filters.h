// Which requests belong to a CUDA graph or a memory pool now, and so to torch's own allocator.
//
// It knows nothing of the pools themselves, which torch's allocator keeps. Thread-safe. A filter
// runs under the lock, as it does in torch's allocator: it asks CUDA about a stream or compares
// thread ids, and what it captured lives only until its removal. A request that reaches match()
// while some filter is active costs a lock and a call for each.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "torch/flags.h"
#include "torch/torch_api.h"

namespace vramx {

class PoolFilters {
 public:
  explicit PoolFilters(Flags& flags) : flags_(flags) {}

  void add(DeviceIndex device, MempoolId_t pool, StreamFilter filter);
  void remove(DeviceIndex device, MempoolId_t pool);

  bool match(DeviceIndex device, cudaStream_t stream) const;
  // Without a lock.
  bool has_any(DeviceIndex device) const { return count(device).load() > 0; }
  bool has_any() const { return flags_.has(Flag::kPools); }

 private:
  struct Entry {
    DeviceIndex device;
    MempoolId_t pool;
    StreamFilter filter;
  };

  const std::atomic<int>& count(DeviceIndex device) const {
    return counts_[static_cast<std::size_t>(device)];
  }
  void change_count(DeviceIndex device, int by);  // under the lock

  Flags& flags_;                                        // kPools is set while entries_ is not empty
  std::array<std::atomic<int>, kMaxDevices> counts_{};  // of entries_ by device
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace vramx
