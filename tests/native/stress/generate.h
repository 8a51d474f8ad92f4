// Draws scenarios: the setup from the seed alone, each step from the seed and from what is live.
//
// A seed has a character: how large its blocks are, whether sizes repeat (as a training step's do),
// how blocks are freed, and whether streams come and go, capture, driver calls fail, or other
// threads come in the middle of one. Within it, phases of growth and of shrinking alternate, so
// that memory is full and fragmented again and again. Not thread-safe; a step costs well below a
// microsecond.
#pragma once

#include <cstdint>
#include <vector>

#include "stress/random.h"
#include "stress/world.h"

namespace vramx::stress {

Setup draw_setup(std::uint64_t seed);

class Generator {
 public:
  Generator(std::uint64_t seed, const Setup& setup);
  Step next(const World& world);

 private:
  enum class Order : std::uint8_t { kRandom, kNewestFirst, kOldestFirst };

  void begin_phase();
  Step draw(const World& world);
  Step rare_step(const World& world);
  Step allocation(const World& world);
  std::uint64_t size(const World& world);
  std::uint64_t odd_size(const World& world);
  std::uint32_t any_block(const World& world);
  std::uint32_t block_to_free(const World& world);
  // One of some neighbours among the streams, so that each mixture of origins comes.
  std::uint32_t any_stream() {
    return static_cast<std::uint32_t>((first_stream_ + random_.below(streams_)) % kStreams);
  }

  Random random_;
  const Bytes capacity_;
  const std::uint64_t streams_;
  const std::uint64_t first_stream_;
  const std::uint64_t largest_;  // of the usual sizes
  const bool has_faults_;
  const bool has_captures_;
  const bool replaces_streams_;
  const bool has_other_threads_;        // that come in the middle of a call
  std::vector<std::uint64_t> palette_;  // empty: sizes do not repeat
  std::uint32_t next_block_ = 1;

  std::uint64_t left_in_phase_ = 0;
  std::uint64_t allocate_percent_ = 50;
  Order order_ = Order::kRandom;
};

}  // namespace vramx::stress
