// Whether this process is still the one that an object was made in.
//
// A forked child has the parent's memory but neither its threads nor its CUDA context: a lock may
// be held by a thread that does not exist, and a driver call fails or hangs. So an object that owns
// driver state notes the generation it was born in and is inert in any other, unless it knows that
// it owned none yet and renews its guard. Lock-free.
#pragma once

#include <atomic>
#include <cstdint>

namespace vramx {

class ForkGuard {
 public:
  ForkGuard();
  bool is_in_child() const {
    return generation_.load(std::memory_order_relaxed) != born_.load(std::memory_order_relaxed);
  }
  // From now on this process is the one that the object was made in.
  void renew() { born_.store(generation_.load(std::memory_order_relaxed)); }

 private:
  static void enter_child() { generation_.fetch_add(1, std::memory_order_relaxed); }

  static std::atomic<std::uint32_t> generation_;  // of the process: its forks since the first guard
  std::atomic<std::uint32_t> born_;
};

}  // namespace vramx
