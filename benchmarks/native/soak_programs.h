// The programs that a soak runs: what each asks for, in which order, and what it keeps.
//
//   kSteps    a training step with the same sizes each time, last in first out, with temporaries
//   kLengths  the same with a sequence length that changes from step to step
//   kCache    blocks of all sizes that live long and leave in any order, as a key-value cache's
//   kBursts   thousands of small blocks and a few large ones, half of them freed by other threads
//
// A program keeps its live bytes within its share. When memory runs out it gives up what its round
// made, as a script does that skips a batch. Not thread-safe: one program a thread.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/units.h"

namespace vramx::soak {

// splitmix64, by Vigna: any seed will do, and a draw costs a nanosecond.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  // In [low, high]. The bias of the remainder is of no matter here.
  std::uint64_t between(std::uint64_t low, std::uint64_t high) {
    return low + next() % (high - low + 1);
  }
  bool one_in(std::uint64_t n) { return next() % n == 0; }
  // In [low, high]; each power of two is about as likely as the next.
  Bytes log_uniform(Bytes low, Bytes high) {
    const auto bits = static_cast<std::uint64_t>(std::bit_width(high.count / low.count));
    const std::uint64_t at_least = low.count << between(0, bits - 1);
    return min(Bytes{between(at_least, 2 * at_least - 1)}, high);
  }

 private:
  std::uint64_t state_;
};

struct Block {
  Address address;
  Bytes size;
  std::uint64_t mark = 0;  // written at both of its ends
};

// What a program does to memory.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  virtual bool allocate(Bytes size, std::vector<Block>& into) = 0;  // false: out of memory
  virtual void free(const Block& block) = 0;
  virtual void share(const Block& block) = 0;      // another stream uses it too
  virtual void hand_over(const Block& block) = 0;  // to whichever thread frees it
};

class Program {
 public:
  Program(Memory& memory, Bytes share, std::uint64_t seed)
      : memory_(memory), share_(share), random_(seed) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  virtual ~Program() = default;

  // Some hundreds to thousands of calls; false where memory ran out.
  virtual bool round() = 0;
  void free_all() { free_to(kept_, 0); }

 protected:
  void free_last(std::vector<Block>& blocks) {
    memory_.free(blocks.back());
    blocks.pop_back();
  }
  void free_to(std::vector<Block>& blocks, std::size_t count) {
    while (blocks.size() > count) free_last(blocks);
  }
  void free_any(std::vector<Block>& blocks) {
    std::swap(blocks[random_.between(0, blocks.size() - 1)], blocks.back());
    free_last(blocks);
  }

  Memory& memory_;
  const Bytes share_;
  Random random_;
  std::vector<Block> kept_;  // in the order of its making
};

// kSteps and kLengths.
class Training final : public Program {
 public:
  Training(Memory& memory, Bytes share, std::uint64_t seed, bool has_lengths)
      : Program(memory, share, seed), has_lengths_(has_lengths) {
    // Weights take about a quarter of the share, activations about half.
    constexpr std::uint64_t kSmallest = 1024;
    for (std::uint64_t& layer : layers_) {
      layer = random_.between(share.count / kSmallest, share.count / kLayers);
    }
  }

  bool round() override {
    if (kept_.size() < kLayers && !make_weights()) return false;
    const std::uint64_t length = has_lengths_ ? random_.between(1, kLongest) : kLongest;
    bool is_done = true;
    for (std::size_t i = 0; i < kLayers && is_done; ++i) is_done = forward(i, length);
    while (is_done && kept_.size() > kLayers) is_done = backward(length);
    free_to(kept_, kLayers);
    return is_done;
  }

 private:
  static constexpr std::size_t kLayers = 48;
  static constexpr std::uint64_t kLongest = 64;

  Bytes activation(std::size_t layer, std::uint64_t length) const {
    return {layers_[layer] * length / kLongest};
  }
  bool make_weights() {
    while (kept_.size() < kLayers) {
      if (!memory_.allocate({layers_[kept_.size()] / 2}, kept_)) return false;
    }
    return true;
  }
  // The activation stays; a workspace comes and goes.
  bool forward(std::size_t layer, std::uint64_t length) {
    const Bytes size = activation(layer, length);
    if (!memory_.allocate(size, kept_)) return false;
    if (!memory_.allocate({size.count / 3 + 1}, kept_)) return false;
    free_last(kept_);
    return true;
  }
  // A gradient, which another stream sends, takes the place of the last activation.
  bool backward(std::uint64_t length) {
    const std::size_t layer = kept_.size() - kLayers - 1;
    if (!memory_.allocate(activation(layer, length), kept_)) return false;
    if (random_.one_in(4)) memory_.share(kept_.back());
    std::swap(kept_.back(), kept_[kept_.size() - 2]);
    free_last(kept_);
    free_last(kept_);
    return true;
  }

  const bool has_lengths_;
  std::array<std::uint64_t, kLayers> layers_{};  // bytes of an activation at full length
};

class Cache final : public Program {
 public:
  using Program::Program;

  bool round() override {
    for (int i = 0; i < kTurns; ++i) {
      const Bytes size = random_.log_uniform({4096}, {share_.count / 64});
      while (live_ + size > share_) drop_any();
      if (!memory_.allocate(size, kept_)) {
        for (std::size_t left = kept_.size() / 2; kept_.size() > left;) drop_any();
        return false;
      }
      live_ += size;
      if (random_.one_in(16)) memory_.share(kept_.back());
    }
    return true;
  }

 private:
  static constexpr int kTurns = 256;

  void drop_any() {
    std::swap(kept_[random_.between(0, kept_.size() - 1)], kept_.back());
    live_ -= kept_.back().size;
    free_last(kept_);
  }

  Bytes live_{};
};

class Bursts final : public Program {
 public:
  using Program::Program;

  bool round() override {
    const std::uint64_t count = random_.between(500, 3000);
    bool is_done = true;
    for (std::uint64_t i = 0; i < count && is_done; ++i) {
      is_done = memory_.allocate(random_.log_uniform({512}, {1 << 16}), kept_);
    }
    for (int i = 0; i < 4 && is_done; ++i) {
      is_done = memory_.allocate(random_.log_uniform({1 << 20}, {share_.count / 8}), kept_);
    }
    while (!kept_.empty()) {
      if (is_done && random_.one_in(2)) {
        memory_.hand_over(kept_.back());
        kept_.pop_back();
      } else {
        free_any(kept_);
      }
    }
    return is_done;
  }
};

inline std::unique_ptr<Program> make_program(std::uint32_t number, Memory& memory, Bytes share) {
  const std::uint64_t seed = number + 1;
  switch (number % 4) {
    case 0:
      return std::make_unique<Training>(memory, share, seed, false);
    case 1:
      return std::make_unique<Training>(memory, share, seed, true);
    case 2:
      return std::make_unique<Cache>(memory, share, seed);
    default:
      return std::make_unique<Bursts>(memory, share, seed);
  }
}

}  // namespace vramx::soak
