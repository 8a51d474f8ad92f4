// Everything that is known of one device's memory: the books that the parts of its allocator share.
//
// The device allocator owns it and the lock that guards it. The planner reads it; the executor and
// the reclaimer change it, between driver calls that they make without the lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "core/alias_cache.h"
#include "core/arena.h"
#include "core/block_counts.h"
#include "core/config.h"
#include "core/driver.h"
#include "core/event_trace.h"
#include "core/range_set.h"
#include "core/stats.h"
#include "core/stream_order.h"

namespace vramx {

// What is held has changed by a range of the arena.
enum class Holding : std::uint8_t { kMapped, kUnmapped };
using HoldingObserver = std::function<void(Holding, const Piece&)>;

// Addresses that the driver would not empty: the first `mapped` bytes have something behind them.
struct Leftover {
  Piece range;
  Bytes mapped;
  SpanId building = kNoId;  // in the arena; none for addresses of aliases
};

struct DeviceState {
  struct Grounds {   // what the driver granted
    Bytes capacity;  // of the device, all processes counted
    Piece arena;
    Piece aliases;
  };
  DeviceState(Driver& given, const AllocatorConfig& chosen, const Grounds& granted);

  // What may still be held, on this device and under the limit.
  Bytes room() const { return room_below(min(limit, grounds.capacity)); }
  // The same with others on the device, as far as it has told.
  Bytes likely_room() const { return room_below(min(min(limit, grounds.capacity), refused_at)); }
  Bytes room_below(Bytes most) const {
    const Bytes taken = arena.mapped_bytes() + building;
    return most > taken ? most - taken : Bytes{};
  }
  // The device let so much be held, or refused it.
  void note_growth(Bytes taken, bool is_ok) {
    has_growth_failed = !is_ok;
    if (!is_ok || taken >= refused_at) refused_at = is_ok ? Bytes{UINT64_MAX} : taken;
  }
  // Memory that is over by now, as far as was learned, waits for nothing and joins its neighbours.
  void drop_tags_over();
  void note_held() { held.store(arena.mapped_bytes().count, std::memory_order_relaxed); }

  Driver& driver;
  const AllocatorConfig config;
  const Grounds grounds;
  const Bytes granularity;

  Arena arena;
  AliasCache aliases;
  RangeSet alias_addresses;
  StreamOrder order;
  BlockCounts blocks;    // its peaks, and those of stats, are those of an interval
  AllocatorStats stats;  // of all else
  EventTrace trace;

  Bytes limit;
  Bytes building{};                   // growth that is under way, counted against the limit
  std::size_t building_mappings = 0;  // of aliases under way, counted against their ceiling
  // Memory that threads have set aside while they call the driver is neither free nor used.
  std::size_t operations_in_flight = 0;
  std::uint64_t operations_landed = 0;
  bool has_growth_failed = false;       // the last one
  Bytes refused_at{UINT64_MAX};         // what the device did not let be held, the last time
  std::uint64_t access_generation = 0;  // how often a peer was let in
  std::vector<Leftover> leftovers;
  std::vector<ChunkHandle> unreleased;  // that are nobody's but still on the device
  HoldingObserver observer;
  std::atomic<std::uint64_t> held{0};
};

// An operation of this thread that lets the lock go: made and destroyed under it.
class InFlight {
 public:
  explicit InFlight(DeviceState& state) : state_(state) { ++state_.operations_in_flight; }
  ~InFlight() {
    --state_.operations_in_flight;
    ++state_.operations_landed;
  }
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

 private:
  DeviceState& state_;
};

}  // namespace vramx
