// The two zones of an arena: each has its gaps and its extents, and no extent lies in both.
#include <vector>

#include "core/arena.h"
#include "units/units.h"

namespace vramx::units {
namespace zones_claims {
namespace {

constexpr std::uint64_t kSmallPages = 8;
constexpr Address kBoundary = kBase + kPage * kSmallPages;

struct Fixture {
  Arena arena{kBase, kPage * 64, kPage, kPage * kSmallPages};

  Address map(Zone zone, Bytes size) {
    const SpanId building = arena.begin_building(arena.gap_for(zone, size), size);
    const Address at = arena.span(building).begin;
    arena.finish_mapped(building, {{size, ChunkHandle{1}}});
    arena.give_back(building, TagSet());
    return at;
  }
};

void the_last_granule_below_the_border_is_never_mapped(Fixture& fixture) {
  EXPECT(fixture.arena.gap_for(Zone::kSmall, kPage * kSmallPages) == kNoId);
  EXPECT(fixture.arena.gap_for(Zone::kLarge, kPage * 57) == kNoId);
  EXPECT(fixture.map(Zone::kSmall, kPage * (kSmallPages - 1)) == kBase);
  EXPECT(fixture.map(Zone::kLarge, kPage * 56) == kBoundary);
  EXPECT(fixture.arena.gap_for(Zone::kSmall, kPage) == kNoId);
  EXPECT(fixture.arena.gap_for(Zone::kLarge, kPage) == kNoId);
  EXPECT(fixture.arena.extent_count() == 2 && fixture.arena.check().empty());
}

void chunks_that_go_leave_the_border_where_it_was(Fixture& fixture) {
  fixture.map(Zone::kSmall, kPage * (kSmallPages - 1));
  fixture.map(Zone::kLarge, kPage);
  for (const Address at : {kBase, kBoundary}) {
    fixture.arena.finish_unmapped(fixture.arena.begin_removing(fixture.arena.chunks().at(at)));
    EXPECT(fixture.arena.check().empty());
  }
  EXPECT(fixture.arena.gap_for(Zone::kSmall, kPage * (kSmallPages - 1)) == fixture.arena.first());
  EXPECT(fixture.arena.gap_for(Zone::kSmall, kPage * kSmallPages) == kNoId);
}

void each_zone_finds_its_own_extents(Fixture& fixture) {
  const Address small = fixture.map(Zone::kSmall, kPage);
  const Address large = fixture.map(Zone::kLarge, kPage * 2);
  const auto finds = [&](Zone zone, Bytes size) { return fixture.arena.best_fit(zone, size, 0); };
  EXPECT(finds(Zone::kSmall, kPage) == fixture.arena.span_at(small));
  EXPECT(finds(Zone::kSmall, kPage * 2) == kNoId);
  EXPECT(finds(Zone::kLarge, kPage) == fixture.arena.span_at(large));
  EXPECT(fixture.arena.largest_extent(Zone::kSmall, 0) == fixture.arena.span_at(small));
  EXPECT(fixture.arena.largest_extent(Zone::kLarge, 0) == fixture.arena.span_at(large));
}

void the_zones_hold_for_the_memory_of_every_stream(Fixture& fixture) {
  fixture.arena.note_several_streams();
  for (const Zone zone : {Zone::kSmall, Zone::kLarge}) {
    const Address at = fixture.map(zone, kPage);
    fixture.arena.give_back(fixture.arena.take_at(fixture.arena.span_at(at), at, kPage), Tag{3, 1});
    EXPECT(fixture.arena.best_fit(zone, kPage, 3) == fixture.arena.span_at(at));
    EXPECT(fixture.arena.best_fit(zone, kPage, 2) == kNoId);
    EXPECT(fixture.arena.largest_extent(zone, 3) == fixture.arena.span_at(at));
  }
}

void of_equal_extents_the_lower_is_taken_whatever_its_tag(Fixture& fixture) {
  fixture.arena.note_several_streams();
  const Address at = fixture.map(Zone::kLarge, kPage * 5);
  for (const std::uint64_t page : {0, 2, 4}) {
    fixture.arena.take_at(fixture.arena.span_at(at + kPage * page), at + kPage * page, kPage);
  }
  // Free are page 1 and page 3; one of them is to wait for stream 3.
  const SpanId lower = fixture.arena.take_at(fixture.arena.span_at(at + kPage), at + kPage, kPage);
  fixture.arena.give_back(lower, Tag{3, 1});
  EXPECT(fixture.arena.best_fit(Zone::kLarge, kPage, 3) == fixture.arena.span_at(at + kPage));
  EXPECT(fixture.arena.best_fit(Zone::kLarge, kPage, 2) == fixture.arena.span_at(at + kPage * 3));
}

void a_run_of_either_zone_is_found(Fixture& fixture) {
  const Address small = fixture.map(Zone::kSmall, kPage);
  fixture.map(Zone::kLarge, kPage * 2);
  EXPECT(fixture.arena.best_run(kPage, kAnyExtent).begin == small);
  EXPECT(fixture.arena.best_run(kPage * 2, kAnyExtent).begin == kBoundary);
}

void an_arena_with_room_for_one_granule_below_has_no_zones(Nothing&) {
  for (const Bytes small_zone : {Bytes{}, kPage}) {
    const Arena arena(kBase, kPage * 8, kPage, small_zone);
    EXPECT(arena.span_count() == 1);
    EXPECT(arena.gap_for(Zone::kLarge, kPage * 8) == arena.first());
    EXPECT(arena.gap_for(Zone::kSmall, kPage) == kNoId);
  }
}

constexpr Check<Fixture> kChecks[] = {
    {"the last granule below the border is never mapped",
     the_last_granule_below_the_border_is_never_mapped},
    {"chunks that go leave the border where it was", chunks_that_go_leave_the_border_where_it_was},
    {"each zone finds its own extents", each_zone_finds_its_own_extents},
    {"the zones hold for the memory of every stream",
     the_zones_hold_for_the_memory_of_every_stream},
    {"of equal extents the lower is taken whatever its tag",
     of_equal_extents_the_lower_is_taken_whatever_its_tag},
    {"a run of either zone is found", a_run_of_either_zone_is_found},
};
constexpr Check<Nothing> kSmallArenas[] = {
    {"an arena with room for one granule below has no zones",
     an_arena_with_room_for_one_granule_below_has_no_zones},
};

}  // namespace
}  // namespace zones_claims

void check_zones() {
  run_checks("zones", zones_claims::kChecks);
  run_checks("small arenas", zones_claims::kSmallArenas);
}

}  // namespace vramx::units
