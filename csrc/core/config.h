// How one device allocator behaves: read once when it is created, immutable after, except for the
// limit, which set_limit changes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "core/units.h"

namespace vramx {

// When a stream may have memory that another one freed. Under pressure: at once where that one is
// known to be past it, and behind a wait on the device where the memory would be out otherwise.
// Always: the same, but behind a wait before memory grows. Never: no wait is ever made, and what is
// past is found out only when memory would be out.
enum class CrossStream : std::uint8_t { kNever, kUnderPressure, kAlways };

struct AllocatorConfig {
  Bytes limit{UINT64_MAX};  // of what is held from the driver
  CrossStream cross_stream = CrossStream::kUnderPressure;
  // A program that repeats itself gets its blocks where it had them the last time round.
  bool repeats_placements = true;

  // The arena reserves this many times the device's memory in addresses, so that chunks given back
  // leave holes that need not be found again at once.
  std::uint64_t arena_factor = 4;
  Bytes alias_addresses{std::uint64_t{4} << 40};
  // The driver maps at most 520,192 ranges on a device (measured, H200); all mappings of chunks in
  // the arena need far fewer, so aliases may take a quarter of it.
  std::size_t alias_mappings = 128 * 1024;

  // How long a request that finds nothing waits in all, before memory is said to be out, for what
  // other threads have set aside and for streams: time for some forty of the slowest driver calls,
  // and an end where the others never are done.
  std::chrono::milliseconds patience{500};

  std::size_t trace_events = 0;  // the ring of events; 0 keeps none
};

}  // namespace vramx
