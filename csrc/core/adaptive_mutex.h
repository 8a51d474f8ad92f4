// The allocator's lock: tries for a few microseconds before it lets the thread sleep.
//
// What the lock protects takes some hundred nanoseconds, and putting a thread to sleep and waking
// it takes twenty times that, which two threads in turn would pay at every call. Meets the
// standard's Lockable. Uncontended, it costs what std::mutex does.
#pragma once

#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vramx {

class AdaptiveMutex {
 public:
  void lock() {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (mutex_.try_lock()) return;
      pause();
    }
    mutex_.lock();
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  // About two microseconds, ten times the work of one call.
  static constexpr int kSpins = 64;

  // Waits a little longer than the holder's line takes to travel, and frees the core's other
  // thread.
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  std::mutex mutex_;
};

using Lock = std::unique_lock<AdaptiveMutex>;

}  // namespace vramx
