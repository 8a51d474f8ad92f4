// Extents of several streams: which neighbours become one, what a free ties to itself, and that
// whoever may take several neighbours finds them as a run.
#include <utility>
#include <vector>

#include "units/units.h"

namespace vramx::units::arena_tags_claims {

constexpr Bytes kPart = 64_KiB;

TagSet on(StreamIndex stream, std::uint64_t number) { return TagSet(Tag{stream, number}); }
TagSet on_both(std::uint64_t first, std::uint64_t second) {
  TagSet tags = on(0, first);
  tags.add(Tag{1, second});
  return tags;
}
const TagSet kOver;

struct Fixture : SoundArena {
  Fixture() { arena.note_several_streams(); }

  struct Part {
    Bytes size;
    TagSet tags;
  };
  // Takes parts side by side in a chunk of two pages, whose rest is used, and frees them in
  // `order`; returns where the first begins.
  Address lay(const std::vector<Part>& parts, const std::vector<std::size_t>& order) {
    const Address begin = map({kPage * 2});
    std::vector<Address> at;
    Address end = begin;
    for (const Part& part : parts) {
      at.push_back(end);
      take(end, part.size);
      end = end + part.size;
    }
    take(end, begin + kPage * 2 - end);
    for (const std::size_t each : order) free(at[each], parts[each].tags);
    EXPECT(arena.check().empty());
    return begin;
  }
  std::size_t extents_after(const std::vector<Part>& parts, const std::vector<std::size_t>& order) {
    lay(parts, order);
    return arena.extent_count();
  }
  TagSet tags_at(Address at) const { return arena.tags_of(arena.span_at(at)); }
};

// --- alike and unlike ---------------------------------------------------------------------------

// The first is the larger, so that no free ties it.
CHECK(Nothing, only_neighbours_that_are_alike_become_one) {
  const struct {
    TagSet first;
    TagSet second;
    std::size_t extents;
  } kCases[] = {
      {on(0, 1), on(0, 127), 1},          // one group of marks
      {on(0, 127), on(0, 128), 2},        // the next
      {on(0, 1), on(1, 1), 2},            // two streams
      {kOver, on(0, 1), 2},               // one is over
      {on(0, 1), kOver, 2},               //
      {kOver, kOver, 1},                  //
      {on_both(1, 2), on_both(1, 2), 1},  // sets, the same marks
      {on_both(1, 1), on_both(1, 2), 2},  // others
      {on_both(1, 1), on(0, 1), 2},       // a set and one of its tags
  };
  for (const auto& each : kCases) {
    Fixture fixture;
    EXPECT(fixture.extents_after({{kPart * 2, each.first}, {kPart, each.second}}, {0, 1}) ==
           each.extents);
  }
}

CHECK(Nothing, one_extent_waits_for_what_both_waited_for) {
  Fixture of_one;
  const Address at = of_one.lay({{kPart, on(0, 5)}, {kPart, on(0, 3)}}, {0, 1});
  EXPECT(of_one.tags_at(at)[0] == (Tag{0, 5}));
}

CHECK(Nothing, of_one_stream_all_neighbours_become_one) {
  ArenaFixture fixture;
  const Address at = fixture.map({kPage});
  for (std::uint64_t i = 0; i < 4; ++i) fixture.take(at + kPart * i, kPart);
  for (std::uint64_t i = 0; i < 4; ++i) fixture.free(at + kPart * i, on(0, i * 100));
  EXPECT(fixture.arena.extent_count() == 1 && fixture.arena.check().empty());
}

// --- ties ---------------------------------------------------------------------------------------

CHECK(Nothing, a_free_ties_what_is_over_or_older_up_to_its_own_size) {
  const struct {
    Fixture::Part before;
    std::size_t extents;
  } kCases[] = {
      {{kPart, kOver}, 1},      {{kPart + kBlockUnit, kOver}, 2},
      {{kPart, on(0, 1)}, 1},   {{kPart + kBlockUnit, on(0, 1)}, 2},
      {{kPart, on(0, 300)}, 2},  // newer
      {{kPart, on(1, 1)}, 2},    // of another stream
  };
  for (const auto& each : kCases) {
    Fixture fixture;
    EXPECT(fixture.extents_after({each.before, {kPart, on(0, 200)}}, {0, 1}) == each.extents);
  }
}

CHECK(Fixture, what_was_tied_waits_for_the_free) {
  const Address at = lay({{kPart, kOver}, {kPart, on(0, 200)}}, {0, 1});
  EXPECT(tags_at(at)[0] == (Tag{0, 200}));
}

CHECK(Fixture, a_free_ties_no_more_on_both_sides_together) {
  EXPECT(extents_after({{kPart, kOver}, {kPart, on(0, 200)}, {kPart, kOver}}, {0, 2, 1}) == 2);
}

CHECK(Fixture, what_is_alike_already_ties_nothing) {
  const std::vector<Fixture::Part> parts = {
      {kPart * 2, kOver}, {kPart, on(0, 200)}, {kPart * 4, on(0, 201)}};
  EXPECT(extents_after(parts, {0, 2, 1}) == 2);
}

CHECK(Fixture, memory_that_waits_for_nothing_ties_nothing) {
  EXPECT(extents_after({{kPart, on(0, 1)}, {kPart, kOver}}, {0, 1}) == 2);
}

// On either side.
CHECK(Nothing, what_is_alike_behind_a_tie_becomes_one_with_it) {
  const Fixture::Part alike{kPart * 2, on(0, 17)};
  const Fixture::Part tied{kPart, kOver};
  const Fixture::Part freed{kPart, on(0, 18)};
  Fixture before;
  EXPECT(before.extents_after({alike, tied, freed}, {0, 1, 2}) == 1);
  Fixture behind;
  EXPECT(behind.extents_after({freed, tied, alike}, {2, 1, 0}) == 1);
}

// --- dropping -----------------------------------------------------------------------------------

constexpr auto kAllHaveNews = [](StreamIndex) { return true; };

CHECK(Fixture, what_is_over_joins_its_neighbours) {
  lay({{kPart, on(0, 1)}, {kPart, on(1, 1)}, {kPart, on(0, 40)}}, {0, 1, 2});
  EXPECT(arena.extent_count() == 3);
  arena.drop_tags(kAllHaveNews, [](const Tag&) { return true; });
  EXPECT(arena.extent_count() == 1);
}

CHECK(Fixture, of_several_tags_those_that_are_not_over_stay) {
  const Address at = lay({{kPart * 2, on(0, 1)}, {kPart, on_both(2, 1)}}, {0, 1});
  EXPECT(arena.extent_count() == 2);
  arena.drop_tags(kAllHaveNews, [](const Tag& tag) { return tag.stream == 1; });
  EXPECT(arena.extent_count() == 1 && arena.check().empty());
  EXPECT(tags_at(at)[0] == (Tag{0, 2}));
}

CHECK(Fixture, extents_of_streams_without_news_are_left_alone) {
  const Address at = lay({{kPart, on(0, 1)}, {kPart, on(1, 1)}}, {0, 1});
  int asked = 0;
  arena.drop_tags([](StreamIndex stream) { return stream == 1; },
                  [&](const Tag& tag) { return ++asked != 0 && tag.stream == 1; });
  EXPECT(asked == 1);
  EXPECT(!tags_at(at).empty() && tags_at(at + kPart).empty());
}

// --- runs ---------------------------------------------------------------------------------------

CHECK(Fixture, unlike_neighbours_are_found_as_a_run) {
  const Address at = lay({{kPart, on(0, 1)}, {kPart, on(1, 1)}, {kPart, kOver}}, {0, 1, 2});
  const Piece all = arena.best_run(kPart * 3, kAnyExtent);
  EXPECT(all.begin == at && all.size == kPart * 3);
  EXPECT(!arena.best_run(kPart * 3 + kBlockUnit, kAnyExtent).size);
  EXPECT(arena.is_run(at + kBlockUnit, kPart * 2, kAnyExtent));
  EXPECT(!arena.is_run(at + kBlockUnit, kPart * 3, kAnyExtent));
}

CHECK(Fixture, a_run_ends_at_what_may_not_be_taken) {
  const Address at = lay({{kPart, on(0, 1)}, {kPart, on(1, 1)}, {kPart, kOver}}, {0, 1, 2});
  const auto is_not_of_1 = [&](SpanId id) {
    const TagSet tags = arena.tags_of(id);
    return tags.empty() || tags[0].stream != 1;
  };
  EXPECT(arena.best_run(kPart, is_not_of_1).begin == at);
  EXPECT(!arena.best_run(kPart + kBlockUnit, is_not_of_1).size);
  EXPECT(!arena.is_run(at, kPart * 2, is_not_of_1));
}

CHECK(Fixture, the_smallest_run_that_fits_is_the_best) {
  const Address large = lay({{kPart, on(0, 1)}, {kPart * 2, on(1, 1)}}, {0, 1});
  const Address small = lay({{kPart, on(0, 1)}, {kPart, on(1, 1)}}, {0, 1});
  EXPECT(arena.best_run(kPart * 2, kAnyExtent).begin == small);
  EXPECT(arena.best_run(kPart * 3, kAnyExtent).begin == large);
}

// Neither half of the page has a chunk's bound in it but at its outer end.
CHECK(Fixture, a_stitch_is_made_of_runs) {
  const Address at = map({kPage, kPage});
  const Address begin = at + 512_KiB;
  const std::pair<Address, Bytes> halves[] = {{begin, 1_MiB}, {begin + 1_MiB, 1_MiB}};
  take(at, kPage * 2);
  free(at);
  take(at, 512_KiB);
  for (const auto& [from, size] : halves) take(from, size);
  take(begin + kPage, kPage * 2 - kPage - 512_KiB);
  for (StreamIndex i = 0; i < 2; ++i) free(halves[i].first, on(i, 1));
  EXPECT(arena.extent_count() == 2);
  const auto runs = arena.stitchable(kBlockUnit, 9, kAnyExtent);
  REQUIRE(runs.size() == 1);
  EXPECT(runs[0].begin == begin && runs[0].size == kPage);
}

// The first is the larger, so that no free ties it.
CHECK(Fixture, while_one_stream_asks_its_memory_is_one) {
  const Address begin = lay({{1_MiB, on(0, 1)}, {kPart, on(0, 200)}}, {0, 1});
  EXPECT(arena.extent_count() == 2);
  arena.let_mix();
  EXPECT(arena.extent_count() == 1);
  EXPECT(arena.check().empty());
  EXPECT(tags_at(begin)[0] == (Tag{0, 200}));
}

// Its request comes before the streams are told apart.
CHECK(Nothing, the_first_request_of_a_second_stream_stitches_nothing_of_the_first) {
  ArenaFixture fixture;
  const Address at = fixture.map({kPage});
  fixture.take(at, kPage);
  fixture.free(at, on(0, 1));
  const auto is_over = [&](SpanId id) { return fixture.arena.tags_of(id).empty(); };
  EXPECT(fixture.arena.stitchable(kBlockUnit, 9, is_over).empty());
  EXPECT(fixture.arena.stitchable(kBlockUnit, 9, kAnyExtent).size() == 1);
}

}  // namespace vramx::units::arena_tags_claims
