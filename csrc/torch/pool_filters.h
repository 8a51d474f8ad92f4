// Which requests belong to a CUDA graph or a memory pool now, and so to torch's own allocator.
//
// It knows nothing of the pools themselves, which torch's allocator keeps. A pool's filter stays
// until its end is told. A capture that fails is never told to have ended (torch up to 2.12 where
// cudaStreamEndCapture fails, all where cudaStreamBeginCapture does or nobody calls capture_end;
// pytorch#180395, #190308), and its filter refers to a graph that may be gone. So the stream of a
// capture is remembered and asked: once it captures no more, the capture is over.
//
// Thread-safe. A filter runs under the lock, as it does in torch's allocator: it asks CUDA about a
// stream or compares thread ids. A request that reaches match() while some filter is active on its
// device costs a lock and a call for each; on other devices one read.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "torch/flags.h"
#include "torch/torch_api.h"

namespace vramx {

class PoolFilters {
 public:
  // A capture that was over without an end. `is_certain`: no end can follow any more.
  struct Abandoned {
    DeviceIndex device;
    MempoolId_t pool;
    bool is_certain;
  };
  enum class Removal : std::uint8_t { kDone, kWasAbandoned, kUnknown };

  explicit PoolFilters(Flags& flags) : flags_(flags) {}

  // To be called on the thread that is about to capture, on its current stream, before the capture
  // begins, as torch does. Returns once no call is under way that would spoil the capture, and
  // would not be seen by it. May raise what the filter raises; nothing is added then.
  void add(DeviceIndex device, MempoolId_t pool, StreamFilter filter);
  Removal remove(DeviceIndex device, MempoolId_t pool);
  // Forgets the captures that are over without an end, and returns them. Costs a call of CUDA for
  // each capture. `beginning` is a stream on which the caller is about to begin one.
  std::vector<Abandoned> take_abandoned(cudaStream_t beginning = nullptr);
  // Whether to look for those: now and then, since nothing tells when a capture fails.
  bool is_look_due() { return looks_.fetch_add(1, std::memory_order_relaxed) % kLookPeriod == 0; }

  bool match(DeviceIndex device, cudaStream_t stream) const;
  // Around a call of the driver on a stream: false, and no end is to follow, where a capture is
  // under way or about to begin. That of a stream that the calling thread works on is its own to
  // begin, so that the driver can say. Without a lock where no filter is active.
  bool begin_call(DeviceIndex device, cudaStream_t stream);
  // The same of a call for the device as a whole; false where a pool is filled without a capture,
  // too.
  bool begin_device_call(DeviceIndex device);
  void end_call(DeviceIndex device) { --calls_[static_cast<std::size_t>(device)]; }
  // Without a lock; right once those that were abandoned have been taken.
  bool has_any(DeviceIndex device) const { return count(device).load() > 0; }
  bool has_any() const { return flags_.has(Flag::kPools); }

 private:
  // An eager program gets back to the fast way after so many requests; captures of other threads
  // meanwhile are asked at one request in as many.
  static constexpr std::uint32_t kLookPeriod = 16;
  // A call is over, or the driver has looked at it, after microseconds, or once its thread has its
  // core again. One that goes on, as a wait for the device does, spoils no capture that begins then
  // (measured, H200).
  static constexpr std::chrono::milliseconds kLongestCall{100};
  // A capture that was told of begins after microseconds. One that did not after so long failed to,
  // and nobody may ever tell: the driver alone is asked then, as where torch tells nothing.
  static constexpr std::chrono::seconds kLongestStart{1};
  static constexpr std::chrono::microseconds kLook{20};

  // Where a capture takes place; no stream for a pool that is filled without one.
  struct Capture {
    cudaStream_t stream = nullptr;
    std::thread::id thread;
    bool is_kept = false;   // torch never destroys the stream
    bool was_seen = false;  // it has begun
    std::chrono::steady_clock::time_point told = std::chrono::steady_clock::now();

    bool may_begin() const {
      return was_seen || std::chrono::steady_clock::now() - told < kLongestStart;
    }
  };
  struct Entry {
    DeviceIndex device;
    MempoolId_t pool;
    StreamFilter filter;
    Capture capture;

    bool is(DeviceIndex other, MempoolId_t id) const { return device == other && pool == id; }
  };

  static Capture capture_of(DeviceIndex device, const StreamFilter& filter);
  // May set was_seen.
  static bool is_over(Entry& entry, cudaStream_t beginning);

  const std::atomic<int>& count(DeviceIndex device) const {
    return counts_[static_cast<std::size_t>(device)];
  }
  void change_count(DeviceIndex device, int by);  // under the lock
  template <class Spoils>
  bool begin_call_unless(DeviceIndex device, Spoils spoils);
  void await_calls(DeviceIndex device) const;

  Flags& flags_;                                        // kPools is set while entries_ is not empty
  std::array<std::atomic<int>, kMaxDevices> counts_{};  // of entries_ by device
  std::array<std::atomic<int>, kMaxDevices> calls_{};   // under way
  std::atomic<std::uint32_t> looks_{0};
  mutable std::mutex mutex_;
  mutable std::vector<Entry> entries_;
  std::vector<Abandoned> abandoned_;  // whose end may still be told
};

}  // namespace vramx
