// The lock of the allocator, and of the simulated device: tries for a few microseconds, then sleeps
// for a while and tries again.
//
// What the lock protects takes some tens of nanoseconds, so an unlock is a plain store: a second
// atomic exchange would cost as much as the first. The price is that nobody is woken. Whoever has
// tried in vain, because the holder lost its core or plans a stitch, sleeps for a fixed time.
// Meets the standard's Lockable; neither fair nor recursive. Uncontended, it costs one exchange.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace vramx {

class AdaptiveMutex {
 public:
  void lock() {
    if (!try_lock()) [[unlikely]] {
      lock_slowly();
    }
  }
  bool try_lock() { return !is_held_.exchange(true, std::memory_order_acquire); }
  void unlock() { is_held_.store(false, std::memory_order_release); }

 private:
  // About two microseconds, many times the work of one call.
  static constexpr int kSpins = 64;
  // As long as putting a thread to sleep and waking it takes by itself.
  static constexpr std::chrono::microseconds kSleep{20};

  void lock_slowly() {
    for (;; std::this_thread::sleep_for(kSleep)) {
      for (int spin = 0; spin < kSpins; ++spin) {
        // Reads until the word says free: an exchange would take its line from the holder.
        if (!is_held_.load(std::memory_order_relaxed) && try_lock()) return;
        pause();
      }
    }
  }

  // Waits a little longer than the holder's line takes to travel, and frees the core's other
  // thread.
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  std::atomic<bool> is_held_{false};
};

// Holds the lock for as long as it lives, but between its unlock() and its lock(). Its callers pair
// these: std::unique_lock would ask at each step, in every allocation and free, whether it may.
class Lock {
 public:
  explicit Lock(AdaptiveMutex& mutex) : mutex_(mutex) { lock(); }
  ~Lock() {
    if (is_held_) mutex_.unlock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  bool is_held() const { return is_held_; }
  void lock() {
    mutex_.lock();
    is_held_ = true;
  }
  void unlock() {
    is_held_ = false;
    mutex_.unlock();
  }

 private:
  AdaptiveMutex& mutex_;
  bool is_held_ = false;
};

}  // namespace vramx
