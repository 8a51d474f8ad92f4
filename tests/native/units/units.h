// What the core's unit checks share: a fresh fixture for each, an arena without a device, and a
// way to reach a private member where a check must break it.
//
// Expectations and the tally are the contract suite's. Single-threaded.
#pragma once

#include <cstddef>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "contract.h"
#include "core/arena.h"
#include "core/chunk_table.h"
#include "core/types.h"
#include "core/units.h"

namespace vramx::units {

using contract::Check;
using namespace vramx::literals;

// The granularity of every arena here, and where it lies.
constexpr Bytes kPage = 2_MiB;
constexpr Address kBase{1ull << 40};

// One function for each file of this folder: runs its checks, each on a fixture of its own.
void check_free_index();
void check_chunk_table();
void check_arena();
void check_arena_invariants();
void check_arena_tags();
void check_zones();
void check_tag_table();
void check_stitch_plan();
void check_alias_cache();
void check_recurrence();
void check_quick_placement();
void check_planner();
void check_lifetimes();
void check_tables();
void check_streams();
void check_stream_order();
void check_mapper();
void check_device_allocator();
void check_handed_over();
void check_holdings();
void check_peers();

// For a subject that has no state to set up.
struct Nothing {};

template <class Fixture, std::size_t kCount>
void run_checks(const char* subject, const Check<Fixture> (&checks)[kCount]) {
  std::printf("%s\n", subject);
  for (const Check<Fixture>& check : checks) {
    Fixture fresh;
    contract::run_check(check, fresh);
  }
}

inline bool starts_with(const std::string& text, const char* beginning) {
  return text.starts_with(beginning);
}

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

// For what anybody may have.
constexpr auto kAnyExtent = [](SpanId) { return true; };

// Reveals a private member to the check that has to break it, by the one way that the language
// leaves open: an explicit instantiation may name it.
//
//   struct FreeBytes { friend auto member(FreeBytes); };
//   template struct Reveal<FreeBytes, &Arena::free_bytes_>;
//   arena.*member(FreeBytes{}) = ...;
template <class Name, auto kMember>
struct Reveal {
  friend auto member(Name) { return kMember; }
};

}  // namespace vramx::units
