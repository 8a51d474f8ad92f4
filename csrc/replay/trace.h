// A recorded program's allocations, checked once and kept in the form that a replay reads.
//
// Built from the five arrays of a trace file. Immutable after; safe to read from several threads.
// 32 bytes an event; building is O(events).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/units.h"

namespace vramx::replay {

struct TraceArrays {
  std::span<const std::uint8_t> op;  // 0 allocate, 1 free requested, 2 free completed
  std::span<const std::uint32_t> id;
  std::span<const std::uint64_t> size;
  std::span<const std::uint8_t> stream;
  std::span<const std::uint32_t> time_us;
};

struct Event {
  enum class Kind : std::uint8_t { kAllocate, kFree };
  Kind kind = Kind::kAllocate;
  std::uint8_t stream = 0;
  std::uint32_t id = 0;
  std::uint32_t time_us = 0;  // never before the event before
  std::uint32_t index = 0;    // in the arrays
  Bytes size;
};

class Trace {
 public:
  // An empty trace and a text that names event and value where the arrays are not a trace: unequal
  // lengths, no event, an unknown op, a size above 2^48, an id allocated twice, a free of an
  // unknown id or a second one.
  static Trace build(const TraceArrays& arrays, std::string* error);

  // Allocations and completed frees. Memory is reusable from the latter on, so a free that was only
  // requested is no event of a replay.
  const std::vector<Event>& events() const { return events_; }
  std::uint64_t id_count() const { return id_count_; }
  Bytes peak_live() const { return peak_live_; }          // of requested bytes
  std::size_t peak_event() const { return peak_event_; }  // in events()
  std::uint32_t span_us() const { return events_.empty() ? 0 : events_.back().time_us; }

 private:
  struct Allocation {
    enum class Life : std::uint8_t { kUnknown, kLive, kFreed };
    Bytes size;
    Life life = Life::kUnknown;
  };
  std::string add(const TraceArrays& arrays, std::size_t i, Allocation& allocation);
  void note_allocation(Bytes size);

  std::vector<Event> events_;
  std::uint64_t id_count_ = 0;
  Bytes live_{};
  Bytes peak_live_{};
  std::size_t peak_event_ = 0;
};

}  // namespace vramx::replay
