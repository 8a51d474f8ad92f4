// The two zones of an arena: each has its gaps and its extents, and no extent lies in both.
#include "units/units.h"

namespace vramx::units::zones_claims {

constexpr std::uint64_t kSmallPages = 8;
constexpr Address kBoundary = kBase + kPage * kSmallPages;

struct Fixture {
  Arena arena{kBase, kPage * 64, kPage, kPage * kSmallPages};

  ~Fixture() { EXPECT(arena.check().empty()); }
  Address map(Zone zone, Bytes size) {
    const SpanId building = arena.begin_building(arena.gap_for(zone, size), size);
    const Address at = arena.span(building).begin;
    arena.finish_mapped(building, {{size, ChunkHandle{1}}});
    arena.give_back(building, TagSet());
    return at;
  }
};

CHECK(Fixture, the_last_granule_below_the_border_is_never_mapped) {
  EXPECT(arena.gap_for(Zone::kSmall, kPage * kSmallPages) == kNoId);
  EXPECT(arena.gap_for(Zone::kLarge, kPage * 57) == kNoId);
  EXPECT(map(Zone::kSmall, kPage * (kSmallPages - 1)) == kBase);
  EXPECT(map(Zone::kLarge, kPage * 56) == kBoundary);
  EXPECT(arena.gap_for(Zone::kSmall, kPage) == kNoId);
  EXPECT(arena.gap_for(Zone::kLarge, kPage) == kNoId);
  EXPECT(arena.extent_count() == 2);
}

CHECK(Fixture, chunks_that_go_leave_the_border_where_it_was) {
  map(Zone::kSmall, kPage * (kSmallPages - 1));
  map(Zone::kLarge, kPage);
  for (const Address at : {kBase, kBoundary}) {
    arena.finish_unmapped(arena.begin_removing(arena.chunks().at(at)));
    EXPECT(arena.check().empty());
  }
  EXPECT(arena.gap_for(Zone::kSmall, kPage * (kSmallPages - 1)) == arena.first());
  EXPECT(arena.gap_for(Zone::kSmall, kPage * kSmallPages) == kNoId);
}

CHECK(Fixture, each_zone_finds_its_own_extents) {
  const Address small = map(Zone::kSmall, kPage);
  const Address large = map(Zone::kLarge, kPage * 2);
  const auto finds = [&](Zone zone, Bytes size) { return arena.best_fit(zone, size, 0); };
  EXPECT(finds(Zone::kSmall, kPage) == arena.span_at(small));
  EXPECT(finds(Zone::kSmall, kPage * 2) == kNoId);
  EXPECT(finds(Zone::kLarge, kPage) == arena.span_at(large));
  EXPECT(arena.largest_extent(Zone::kSmall, 0) == arena.span_at(small));
  EXPECT(arena.largest_extent(Zone::kLarge, 0) == arena.span_at(large));
}

CHECK(Fixture, the_zones_hold_for_the_memory_of_every_stream) {
  arena.note_several_streams();
  for (const Zone zone : {Zone::kSmall, Zone::kLarge}) {
    const Address at = map(zone, kPage);
    arena.give_back(arena.take_at(arena.span_at(at), at, kPage), Tag{3, 1});
    EXPECT(arena.best_fit(zone, kPage, 3) == arena.span_at(at));
    EXPECT(arena.best_fit(zone, kPage, 2) == kNoId);
    EXPECT(arena.largest_extent(zone, 3) == arena.span_at(at));
  }
}

CHECK(Fixture, of_equal_extents_the_lower_is_taken_whatever_its_tag) {
  arena.note_several_streams();
  const Address at = map(Zone::kLarge, kPage * 5);
  for (const std::uint64_t page : {0, 2, 4}) {
    arena.take_at(arena.span_at(at + kPage * page), at + kPage * page, kPage);
  }
  // Free are page 1 and page 3; one of them is to wait for stream 3.
  const SpanId lower = arena.take_at(arena.span_at(at + kPage), at + kPage, kPage);
  arena.give_back(lower, Tag{3, 1});
  EXPECT(arena.best_fit(Zone::kLarge, kPage, 3) == arena.span_at(at + kPage));
  EXPECT(arena.best_fit(Zone::kLarge, kPage, 2) == arena.span_at(at + kPage * 3));
}

CHECK(Fixture, a_run_of_either_zone_is_found) {
  const Address small = map(Zone::kSmall, kPage);
  map(Zone::kLarge, kPage * 2);
  EXPECT(arena.best_run(kPage, kAnyExtent).begin == small);
  EXPECT(arena.best_run(kPage * 2, kAnyExtent).begin == kBoundary);
}

CHECK(Nothing, an_arena_with_room_for_one_granule_below_has_no_zones) {
  for (const Bytes small_zone : {Bytes{}, kPage}) {
    const Arena arena(kBase, kPage * 8, kPage, small_zone);
    EXPECT(arena.span_count() == 1);
    EXPECT(arena.gap_for(Zone::kLarge, kPage * 8) == arena.first());
    EXPECT(arena.gap_for(Zone::kSmall, kPage) == kNoId);
  }
}

}  // namespace vramx::units::zones_claims
