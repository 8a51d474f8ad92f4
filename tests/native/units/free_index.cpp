// Where spans live, and how the best-fitting extent is found: span_pool and free_index.
#include "core/free_index.h"

#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/span_pool.h"
#include "units/units.h"

namespace vramx::units::free_index_claims {

REVEAL(IndexCount, &FreeIndex::count_);

// --- span pool -----------------------------------------------------------------------------------

CHECK(Nothing, a_new_span_is_blank_even_where_its_number_was_used) {
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

CHECK(Nothing, spans_keep_what_they_hold_when_the_pool_grows) {
  SpanPool pool;
  std::vector<SpanId> ids;
  for (std::uint64_t i = 0; i < 5000; ++i) {
    ids.push_back(pool.create());
    pool[ids.back()].begin = kBase + kBlockUnit * i;
  }
  for (std::uint64_t i = 0; i < 5000; ++i) EXPECT(pool[ids[i]].begin == kBase + kBlockUnit * i);
}

CHECK(Nothing, a_large_pool_takes_little_more_than_its_spans) {
  SpanPool pool;
  for (int i = 0; i < 100'000; ++i) pool.create();
  EXPECT(pool.host_bytes() <= 100'000 * sizeof(Span) * 17 / 16);
}

CHECK(Nothing, live_spans_have_different_numbers) {
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

CHECK(Index, of_the_largest_the_lowest_wins) {
  EXPECT(index.largest(spans) == kNoId);
  add(0, 1_GiB - 512_B);
  add(9, 1_GiB);
  const SpanId lowest = add(3, 1_GiB);
  add(1, 4_KiB);
  EXPECT(index.largest(spans) == lowest);
}

CHECK(Index, an_erased_extent_is_not_found) {
  const SpanId only = add(0, 1_MiB);
  index.erase(spans, only);
  EXPECT(index.best_fit(spans, 512_B) == kNoId);
  EXPECT(index.count() == 0);
  EXPECT(index.check(spans).empty());
}

CHECK(Index, the_largest_bins_come_first_and_no_extent_below_the_bound) {
  add(0, 64_KiB);
  const SpanId middle = add(1, 1_MiB);
  const SpanId large = add(2, 1_GiB);
  std::vector<SpanId> seen;
  const auto visit = [&](SpanId id) {
    seen.push_back(id);
    return true;
  };
  index.for_each_from_largest(spans, 128_KiB, visit);
  EXPECT((seen == std::vector<SpanId>{large, middle}));
}

CHECK(Index, a_visit_that_returns_false_ends_the_walk) {
  for (std::uint64_t page = 0; page < 4; ++page) add(page, 1_MiB);
  int visits = 0;
  index.for_each_from_largest(spans, 512_B, [&](SpanId) { return ++visits < 2; });
  EXPECT(visits == 2);
}

// Against a set ordered by (size, address), which is what the index claims to be: the smallest
// extent that fits, the lowest of equal ones, none where all are smaller; bins are shared.
CHECK(Index, every_answer_is_that_of_an_ordered_set) {
  std::mt19937_64 random(20240131);
  std::set<std::pair<Bytes, Address>> reference;
  std::vector<SpanId> ids;
  for (std::uint64_t step = 0; step < 3000; ++step) {
    if (ids.empty() || random() % 3 != 0) {
      const Bytes size = kBlockUnit * (1 + (random() % 4096 >> (random() % 12)));
      ids.push_back(add(step, size));
      reference.emplace(size, kBase + kPage * step);
    } else {
      std::swap(ids[random() % ids.size()], ids.back());
      const Span& gone = spans[ids.back()];
      reference.erase({gone.size, gone.begin});
      index.erase(spans, ids.back());
      spans.destroy(ids.back());
      ids.pop_back();
    }
    const Bytes wanted = kBlockUnit * (1 + random() % 2048);
    const auto expected = reference.lower_bound({wanted, Address{}});
    const SpanId found = index.best_fit(spans, wanted);
    REQUIRE((found == kNoId) == (expected == reference.end()));
    REQUIRE(found == kNoId || spans[found].begin == expected->second);
  }
  EXPECT(index.count() == reference.size());
  EXPECT(index.check(spans).empty());
}

// --- planted defects -----------------------------------------------------------------------------

CHECK(Index, check_names_an_entry_in_the_wrong_bin) {
  const SpanId id = add(0, 1_MiB);
  spans[id].size = 2_MiB;
  EXPECT(starts_with(index.check(spans), "free index: an entry"));
}

CHECK(Index, check_names_entries_out_of_order) {
  const SpanId smaller = add(0, 512_B * 32);
  const SpanId larger = add(1, 512_B * 33);
  std::swap(spans[smaller].size, spans[larger].size);
  EXPECT(starts_with(index.check(spans), "free index: an entry"));
}

CHECK(Index, check_names_an_entry_that_is_not_free) {
  spans[add(0, 1_MiB)].state = SpanState::kUsed;
  EXPECT(starts_with(index.check(spans), "free index: an entry"));
}

CHECK(Index, check_names_a_count_that_is_off) {
  add(0, 1_MiB);
  ++(index.*member(IndexCount{}));
  EXPECT(starts_with(index.check(spans), "free index: count"));
}

}  // namespace vramx::units::free_index_claims
