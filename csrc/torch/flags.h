// One word that says whether a call needs more than the core: the hot path reads it and nothing
// else. Lock-free; a bit is changed by the part that it belongs to, under that part's own lock.
#pragma once

#include <atomic>
#include <cstdint>

namespace vramx {

enum class Flag : std::uint32_t {
  kDisabled = 1,   // caching is switched off: torch's own allocator serves everything
  kPools = 2,      // some requests belong to a CUDA graph or a memory pool
  kRecording = 4,  // a history is kept, or a tracker listens
  kLate = 8,       // blocks from before a late installation may be freed without passing here
};

class Flags {
 public:
  bool any() const { return bits_.load(std::memory_order_relaxed) != 0; }
  bool has(Flag flag) const {
    return bits_.load(std::memory_order_acquire) & static_cast<std::uint32_t>(flag);
  }
  void set(Flag flag, bool value) {
    const auto bit = static_cast<std::uint32_t>(flag);
    value ? bits_.fetch_or(bit) : bits_.fetch_and(~bit);
  }

 private:
  std::atomic<std::uint32_t> bits_{0};
};

}  // namespace vramx
