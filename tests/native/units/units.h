// What the core's unit checks share: a fresh fixture for each, an arena without a device, and a
// way to reach a private member where a check must break it.
//
// Expectations and the tally are the contract suite's. Single-threaded.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "contract.h"
#include "core/arena.h"
#include "core/chunk_table.h"
#include "core/device_allocator.h"
#include "core/types.h"
#include "core/units.h"
#include "driver/sim_driver.h"

namespace vramx::units {

using contract::Nothing;
using namespace vramx::literals;

// The granularity of every arena here, and where it lies.
constexpr Bytes kPage = 2_MiB;
constexpr Address kBase{1ull << 40};

inline bool starts_with(const std::string& text, const char* beginning) {
  return text.starts_with(beginning);
}

// What the allocators here cut blocks of.
constexpr Bytes kPiece = 8_MiB;

inline std::unique_ptr<DeviceAllocator> open_allocator(Driver& driver,
                                                       AllocatorConfig config = {}) {
  config.alias_addresses = 1_GiB;
  auto made = DeviceAllocator::create(driver, config);
  return made.ok() ? std::move(made.value()) : nullptr;
}

// A device of 64 MiB without bytes, and its allocator.
struct AllocatorFixture {
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = 64_MiB, .mode = SimMode::kAccounting});
  std::unique_ptr<DeviceAllocator> allocator = open_allocator(*sim);

  Address take(Bytes size, Stream stream = Stream::kDefault) {
    const Result<Address> made = allocator->allocate(size, stream);
    return made.ok() ? made.value() : Address{};
  }
  bool free(Address address) { return allocator->free(address).ok(); }
  // Two holes that together are twice a piece; no growth is allowed.
  void leave_holes() {
    const Address pieces[] = {take(kPiece), take(kPiece), take(kPiece), take(kPiece)};
    EXPECT(free(pieces[0]) && free(pieces[2]));
    allocator->set_limit(kPiece * 4);
  }
  // A block on both holes, hence in an alias.
  Address take_stitched(Bytes size = kPiece * 2) {
    leave_holes();
    return take(size);
  }
};

// An arena of 64 pages on chunks that no driver made.
struct ArenaFixture {
  Arena arena{kBase, kPage * 64, kPage};
  std::uint64_t next_handle = 1;

  // Maps chunks of these sizes where there is room, frees them, and returns where the first is.
  Address map(const std::vector<Bytes>& sizes) {
    Bytes all{};
    std::vector<MappedChunk> chunks;
    for (const Bytes size : sizes) {
      all += size;
      chunks.push_back({size, ChunkHandle{next_handle++}});
    }
    const SpanId building = arena.begin_building(arena.gap_for(Zone::kLarge, all), all);
    const Address at = arena.span(building).begin;
    arena.finish_mapped(building, chunks);
    arena.give_back(building, TagSet());
    return at;
  }
  SpanId take(Address begin, Bytes size) {
    return arena.take_at(arena.span_at(begin), begin, size);
  }
  void free(Address begin, const TagSet& tags = {}) { arena.give_back(arena.span_at(begin), tags); }
  ChunkId chunk_at(Address address) const { return arena.chunks().at(address); }
  SpanId best_fit(Bytes size, StreamIndex stream = 0) const {
    return arena.best_fit(Zone::kLarge, size, stream);
  }
};

// One whose invariants hold after each check.
struct SoundArena : ArenaFixture {
  ~SoundArena() { EXPECT(arena.check().empty()); }
};

// For what anybody may have.
constexpr auto kAnyExtent = [](SpanId) { return true; };

}  // namespace vramx::units
