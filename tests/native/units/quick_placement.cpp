// The fast path where a request goes to the place of its counterpart.
#include "core/quick_placement.h"

#include "units/units.h"

namespace vramx::units::quick_placement_claims {

constexpr StreamIndex kStream = 0;
// Longer than a layer may be, so that one recurrence is enough.
constexpr std::uint64_t kPeriod = 300;
constexpr Bytes kHalf = 256_KiB;

struct Fixture {
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = kPage * 64, .mode = SimMode::kAccounting});
  DeviceState state{*sim, {}, {kPage * 64, {kBase, kPage * 64}, {kBase + kPage * 128, kPage * 64}}};
  QuickPlacement quick{state};
  Address page;
  int questions = 0;

  Fixture() {
    EXPECT(state.order.index_of(Stream::kDefault) == kStream);
    state.arena.note_several_streams();
    const SpanId building =
        state.arena.begin_building(state.arena.gap_for(Zone::kLarge, kPage), kPage);
    page = state.arena.span(building).begin;
    state.arena.finish_mapped(building, {{kPage, ChunkHandle{1}}});
    state.arena.give_back(building, TagSet());
  }
  Placement place_block(Bytes size) {
    return quick.take(size, kStream, [&] { ++questions; });
  }
  SpanId take(Address at, Bytes size) {
    return state.arena.take_at(state.arena.span_at(at), at, size);
  }
  // Two extents that touch and wait for different work, each half a run; the rest of the page is
  // used.
  Address free_two_extents(Address at) {
    const Address end = page + kPage;
    take(at, kHalf);
    take(at + kHalf, kHalf);
    take(at + kHalf * 2, end - (at + kHalf * 2));
    state.arena.give_back(state.arena.span_at(at + kHalf), TagSet(Tag{kStream, 1}));
    state.arena.give_back(state.arena.span_at(at), TagSet());
    return at;
  }
  // A program that repeats itself, up to where the next request is as the one that went to `place`.
  void repeat_until(Bytes size, Address place) {
    const auto request = [&](std::uint64_t n) {
      const bool is_it = n % kPeriod == 0;
      quick.note({is_it ? place : page}, is_it ? size : size + kBlockUnit * (n % kPeriod), kStream);
    };
    for (std::uint64_t n = 0; n < kPeriod * 4; ++n) request(n);
  }
};

CHECK(Fixture, a_run_of_two_extents_serves_the_counterpart) {
  const Address at = free_two_extents(page);
  repeat_until(kHalf * 2, at);
  const Placement placement = place_block(kHalf * 2);
  EXPECT(placement.address == at);
  EXPECT(state.arena.used(placement.first_span).next != kNoId);
  EXPECT(state.arena.check().empty());
}

// A search by address gives up behind many spans of a page, where it may find the run's first
// extent and not the second.
CHECK(Nothing, a_run_behind_many_small_blocks_is_taken_whole_or_left) {
  bool was_taken = false;
  bool was_left = false;
  for (std::uint64_t blocks = 0; blocks < 64; ++blocks) {
    Fixture fresh;
    for (std::uint64_t n = 0; n < blocks; ++n) fresh.take(fresh.page + kBlockUnit * n, kBlockUnit);
    const Address at = fresh.free_two_extents(fresh.page + kBlockUnit * blocks);
    fresh.repeat_until(kHalf * 2, at);
    const Placement placement = fresh.place_block(kHalf * 2);
    (placement.address == at ? was_taken : was_left) = true;
    EXPECT(fresh.state.arena.check().empty());
  }
  EXPECT(was_taken && was_left);
}

CHECK(Fixture, streams_are_asked_where_the_counterparts_place_waits_and_in_vain_not_at_once_again) {
  const StreamIndex other = state.order.index_of(sim->create_stream().value());
  const Bytes rest = kPage - kHalf;
  take(page, kHalf);
  take(page + kHalf, rest);
  state.arena.give_back(state.arena.span_at(page), TagSet(Tag{other, 1}));
  const auto ask_again = [&] {
    repeat_until(kHalf, page);
    return place_block(kHalf);
  };
  state.arena.let_mix();
  ask_again();
  EXPECT(questions == 0);  // while no other stream asks for memory it has its own
  state.arena.tell_apart();
  EXPECT(!ask_again().address && questions == 1);
  for (int request = 1; request < 64; ++request) ask_again();
  EXPECT(questions == 1);
  ask_again();
  EXPECT(questions == 2);
}

// A second mapping of the page.
AliasId alias_of_page(Fixture& fixture) {
  return fixture.state.aliases.add(fixture.state.grounds.aliases.begin,
                                   {fixture.state.arena.chunks().at(fixture.page)},
                                   fixture.state.arena);
}

CHECK(Fixture, the_alias_of_the_counterpart_serves_it) {
  const AliasId alias = alias_of_page(*this);
  const Address place = state.aliases[alias].base + kHalf;
  free_two_extents(page + kHalf);
  repeat_until(kHalf * 2, place);
  const Placement placement = place_block(kHalf * 2);
  EXPECT(placement.address == place && placement.alias == alias);
  EXPECT(state.aliases[alias].pins == 1);
  EXPECT(state.stats.num_alias_hits == 1);
  const SpanId second = state.arena.used(placement.first_span).next;
  EXPECT(second != kNoId && state.arena.used(second).next == kNoId);
  EXPECT(state.arena.check().empty());
}

CHECK(Fixture, an_alias_whose_memory_is_used_is_left) {
  const AliasId alias = alias_of_page(*this);
  free_two_extents(page);
  repeat_until(kHalf * 2, state.aliases[alias].base + kHalf);
  EXPECT(place_block(kHalf * 2).alias == kNoId);
  EXPECT(state.aliases[alias].pins == 0);
}

CHECK(Fixture, an_alias_that_is_being_unmapped_is_left) {
  const AliasId alias = alias_of_page(*this);
  free_two_extents(page);
  repeat_until(kHalf * 2, state.aliases[alias].base);
  state.aliases.set_leaving(alias, true);
  EXPECT(place_block(kHalf * 2).alias == kNoId);
  state.aliases.set_leaving(alias, false);
  state.aliases.remove(alias, state.arena);
  repeat_until(kHalf * 2, state.grounds.aliases.begin);
  EXPECT(place_block(kHalf * 2).alias == kNoId);
}

CHECK(Fixture, an_alias_that_ends_before_the_request_is_left) {
  const AliasId alias = alias_of_page(*this);
  free_two_extents(page);
  const Address near_end = state.aliases[alias].base + (kPage - kHalf);
  repeat_until(kHalf * 2, near_end);
  EXPECT(place_block(kHalf * 2).alias == kNoId);
}

}  // namespace vramx::units::quick_placement_claims
