// What torch.cuda.memory_stats reports, counted as torch counts it, plus what only this allocator
// has.
//
// torch keeps each statistic three times, for its small pool (requests up to 1 MiB), its large pool
// and for all. There are no pools here, so the division is by request size alone and holdings have
// no small share. Blocks are counted in core/block_counts. Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/units.h"

namespace vramx {

struct Counter {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;  // the sum of all increases, and of all decreases
  std::int64_t freed = 0;

  void increase(std::int64_t by) {
    current += by;
    allocated += by;
    if (current > peak) peak = current;
  }
  void decrease(std::int64_t by) {
    current -= by;
    freed += by;
  }
  // Where it is counted elsewhere.
  void raise_peak(std::int64_t to) {
    if (to > peak) peak = to;
  }
  void reset_peak() { peak = current; }
  void reset_accumulated() { allocated = freed = 0; }
};

enum class PoolKind : std::uint8_t { kAll, kSmall, kLarge };
constexpr std::size_t kPoolKinds = 3;
using PoolCounters = std::array<Counter, kPoolKinds>;

constexpr Bytes kSmallRequest{1 << 20};  // torch's kSmallSize

struct AllocatorStats {
  PoolCounters allocation;             // live blocks
  PoolCounters allocated_bytes;        // their bytes, rounded up to 512
  PoolCounters requested_bytes;        // as asked for
  Counter segment;                     // chunks held from the driver
  Counter reserved_bytes;              // and their bytes
  Counter inactive_split;              // extents
  Counter inactive_split_bytes;        // and their bytes
  std::int64_t num_alloc_retries = 0;  // requests for which memory had to be relieved
  std::int64_t num_ooms = 0;
  std::int64_t num_sync_all_streams = 0;  // waits of the host, all asked for by trim or defragment
  std::int64_t num_device_alloc = 0;      // chunks created
  std::int64_t num_device_free = 0;       // chunks released

  std::int64_t alias_count = 0;       // second mappings that exist now
  std::int64_t alias_mappings = 0;    // and the chunks they map
  std::int64_t alias_bytes = 0;       // and the addresses they take
  std::int64_t num_alias_hits = 0;    // blocks placed in an alias that was there
  std::int64_t num_stitches = 0;      // aliases built
  std::int64_t num_growths = 0;       // times the arena grew
  std::int64_t num_cross_stream = 0;  // blocks given from one stream to another
  std::int64_t host_bytes = 0;        // of the allocator's own bookkeeping

  // The extents are counted where they lie; here only their peaks are kept.
  void note_extents(std::size_t count, Bytes bytes) {
    inactive_split.raise_peak(static_cast<std::int64_t>(count));
    inactive_split_bytes.raise_peak(static_cast<std::int64_t>(bytes.count));
  }

  void reset_peak();
  void reset_accumulated();
  // Every peak becomes the higher of its own and the other's.
  void raise_peaks(const AllocatorStats& other);
};

}  // namespace vramx
