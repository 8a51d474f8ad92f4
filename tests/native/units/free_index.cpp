// Where spans live, and how the best-fitting extent is found: span_pool and free_index.
#include "core/free_index.h"

#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/span_pool.h"
#include "units/units.h"

namespace vramx::units {

struct IndexCount {
  friend auto member(IndexCount);
};
template struct Reveal<IndexCount, &FreeIndex::count_>;

namespace free_index_claims {
namespace {

// --- span pool -----------------------------------------------------------------------------------

void a_new_span_is_blank_even_where_its_number_was_used(Nothing&) {
  SpanPool pool;
  const SpanId id = pool.create();
  pool[id].size = 7_MiB;
  pool[id].state = SpanState::kUsed;
  pool.destroy(id);
  const SpanId again = pool.create();
  EXPECT(again == id);
  EXPECT(!pool[again].size && pool[again].state == SpanState::kUnmapped);
  EXPECT(pool[again].next == kNoId && pool[again].free.tag_stream == kNoId);
}

void spans_keep_what_they_hold_when_the_pool_grows(Nothing&) {
  SpanPool pool;
  std::vector<SpanId> ids;
  for (std::uint64_t i = 0; i < 5000; ++i) {
    ids.push_back(pool.create());
    pool[ids.back()].begin = kBase + kBlockUnit * i;
  }
  for (std::uint64_t i = 0; i < 5000; ++i) EXPECT(pool[ids[i]].begin == kBase + kBlockUnit * i);
}

void a_large_pool_takes_little_more_than_its_spans(Nothing&) {
  SpanPool pool;
  for (int i = 0; i < 100'000; ++i) pool.create();
  EXPECT(pool.host_bytes() <= 100'000 * sizeof(Span) * 17 / 16);
}

void live_spans_have_different_numbers(Nothing&) {
  SpanPool pool;
  std::set<SpanId> ids;
  for (int i = 0; i < 3000; ++i) ids.insert(pool.create());
  EXPECT(ids.size() == 3000);
  EXPECT(pool.live() == 3000);
}

// --- free index ----------------------------------------------------------------------------------

struct Index {
  SpanPool spans;
  FreeIndex index;

  SpanId add(Address begin, Bytes size) {
    const SpanId id = spans.create();
    spans[id].begin = begin;
    spans[id].size = size;
    spans[id].state = SpanState::kFree;
    index.insert(spans, id);
    return id;
  }
  SpanId add(std::uint64_t page, Bytes size) { return add(kBase + kPage * page, size); }
};

void the_smallest_extent_that_is_large_enough_wins(Index& fixture) {
  fixture.add(0, 8_KiB);
  const SpanId best = fixture.add(1, 4_KiB);
  fixture.add(2, 2_KiB);
  EXPECT(fixture.index.best_fit(fixture.spans, 3_KiB) == best);
}

void of_equal_extents_the_lowest_wins(Index& fixture) {
  fixture.add(5, 1_MiB);
  const SpanId lowest = fixture.add(2, 1_MiB);
  fixture.add(9, 1_MiB);
  EXPECT(fixture.index.best_fit(fixture.spans, 1_MiB) == lowest);
}

void sizes_that_share_a_bin_are_told_apart(Index& fixture) {
  const SpanId smaller = fixture.add(7, 512_B * 32);
  const SpanId larger = fixture.add(1, 512_B * 33);
  EXPECT(fixture.index.best_fit(fixture.spans, 512_B * 32) == smaller);
  EXPECT(fixture.index.best_fit(fixture.spans, 512_B * 33) == larger);
}

void nothing_fits_where_all_are_smaller(Index& fixture) {
  fixture.add(0, 1_MiB);
  EXPECT(fixture.index.best_fit(fixture.spans, 1_MiB + 512_B) == kNoId);
  EXPECT(FreeIndex().best_fit(fixture.spans, 512_B) == kNoId);
}

void of_the_largest_the_lowest_wins(Index& fixture) {
  EXPECT(fixture.index.largest(fixture.spans) == kNoId);
  fixture.add(0, 1_GiB - 512_B);
  fixture.add(9, 1_GiB);
  const SpanId lowest = fixture.add(3, 1_GiB);
  fixture.add(1, 4_KiB);
  EXPECT(fixture.index.largest(fixture.spans) == lowest);
}

void an_erased_extent_is_not_found(Index& fixture) {
  const SpanId only = fixture.add(0, 1_MiB);
  fixture.index.erase(fixture.spans, only);
  EXPECT(fixture.index.best_fit(fixture.spans, 512_B) == kNoId);
  EXPECT(fixture.index.count() == 0);
  EXPECT(fixture.index.check(fixture.spans).empty());
}

void the_largest_bins_come_first_and_no_extent_below_the_bound(Index& fixture) {
  fixture.add(0, 64_KiB);
  const SpanId middle = fixture.add(1, 1_MiB);
  const SpanId large = fixture.add(2, 1_GiB);
  std::vector<SpanId> seen;
  const auto visit = [&](SpanId id) {
    seen.push_back(id);
    return true;
  };
  fixture.index.for_each_from_largest(fixture.spans, 128_KiB, visit);
  EXPECT((seen == std::vector<SpanId>{large, middle}));
}

void a_visit_that_returns_false_ends_the_walk(Index& fixture) {
  for (std::uint64_t page = 0; page < 4; ++page) fixture.add(page, 1_MiB);
  int visits = 0;
  fixture.index.for_each_from_largest(fixture.spans, 512_B, [&](SpanId) { return ++visits < 2; });
  EXPECT(visits == 2);
}

// Against a set ordered by (size, address), which is what the index claims to be.
void every_answer_is_that_of_an_ordered_set(Index& fixture) {
  std::mt19937_64 random(20240131);
  std::set<std::pair<Bytes, Address>> reference;
  std::vector<SpanId> ids;
  for (std::uint64_t step = 0; step < 3000; ++step) {
    if (ids.empty() || random() % 3 != 0) {
      const Bytes size = kBlockUnit * (1 + (random() % 4096 >> (random() % 12)));
      ids.push_back(fixture.add(step, size));
      reference.emplace(size, kBase + kPage * step);
    } else {
      std::swap(ids[random() % ids.size()], ids.back());
      const Span& gone = fixture.spans[ids.back()];
      reference.erase({gone.size, gone.begin});
      fixture.index.erase(fixture.spans, ids.back());
      fixture.spans.destroy(ids.back());
      ids.pop_back();
    }
    const Bytes wanted = kBlockUnit * (1 + random() % 2048);
    const auto expected = reference.lower_bound({wanted, Address{}});
    const SpanId found = fixture.index.best_fit(fixture.spans, wanted);
    REQUIRE((found == kNoId) == (expected == reference.end()));
    REQUIRE(found == kNoId || fixture.spans[found].begin == expected->second);
  }
  EXPECT(fixture.index.count() == reference.size());
  EXPECT(fixture.index.check(fixture.spans).empty());
}

// --- planted defects -----------------------------------------------------------------------------

void check_names_an_entry_in_the_wrong_bin(Index& fixture) {
  const SpanId id = fixture.add(0, 1_MiB);
  fixture.spans[id].size = 2_MiB;
  EXPECT(starts_with(fixture.index.check(fixture.spans), "free index: an entry"));
}

void check_names_entries_out_of_order(Index& fixture) {
  const SpanId smaller = fixture.add(0, 512_B * 32);
  const SpanId larger = fixture.add(1, 512_B * 33);
  std::swap(fixture.spans[smaller].size, fixture.spans[larger].size);
  EXPECT(starts_with(fixture.index.check(fixture.spans), "free index: an entry"));
}

void check_names_an_entry_that_is_not_free(Index& fixture) {
  fixture.spans[fixture.add(0, 1_MiB)].state = SpanState::kUsed;
  EXPECT(starts_with(fixture.index.check(fixture.spans), "free index: an entry"));
}

void check_names_a_count_that_is_off(Index& fixture) {
  fixture.add(0, 1_MiB);
  ++(fixture.index.*member(IndexCount{}));
  EXPECT(starts_with(fixture.index.check(fixture.spans), "free index: count"));
}

constexpr Check<Nothing> kPoolChecks[] = {
    {"a new span is blank even where its number was used",
     a_new_span_is_blank_even_where_its_number_was_used},
    {"spans keep what they hold when the pool grows",
     spans_keep_what_they_hold_when_the_pool_grows},
    {"a large pool takes little more than its spans",
     a_large_pool_takes_little_more_than_its_spans},
    {"live spans have different numbers", live_spans_have_different_numbers},
};

constexpr Check<Index> kIndexChecks[] = {
    {"the smallest extent that is large enough wins",
     the_smallest_extent_that_is_large_enough_wins},
    {"of equal extents the lowest wins", of_equal_extents_the_lowest_wins},
    {"sizes that share a bin are told apart", sizes_that_share_a_bin_are_told_apart},
    {"nothing fits where all are smaller", nothing_fits_where_all_are_smaller},
    {"of the largest the lowest wins", of_the_largest_the_lowest_wins},
    {"an erased extent is not found", an_erased_extent_is_not_found},
    {"the largest bins come first and no extent below the bound",
     the_largest_bins_come_first_and_no_extent_below_the_bound},
    {"a visit that returns false ends the walk", a_visit_that_returns_false_ends_the_walk},
    {"every answer is that of an ordered set", every_answer_is_that_of_an_ordered_set},
    {"check names an entry in the wrong bin", check_names_an_entry_in_the_wrong_bin},
    {"check names entries out of order", check_names_entries_out_of_order},
    {"check names an entry that is not free", check_names_an_entry_that_is_not_free},
    {"check names a count that is off", check_names_a_count_that_is_off},
};

}  // namespace
}  // namespace free_index_claims

void check_free_index() {
  run_checks("span pool", free_index_claims::kPoolChecks);
  run_checks("free index", free_index_claims::kIndexChecks);
}

}  // namespace vramx::units
