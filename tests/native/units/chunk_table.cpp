// Which chunk lies where, and how large the chunks of a growth are: chunk_table and chunk_policy.
#include "core/chunk_table.h"

#include <algorithm>
#include <vector>

#include "core/chunk_policy.h"
#include "units/units.h"

namespace vramx::units {

struct ChunkBytes {
  friend auto member(ChunkBytes);
};
template struct Reveal<ChunkBytes, &ChunkTable::bytes_>;

namespace chunk_table_claims {
namespace {

constexpr ChunkHandle kHandle{7};

Address page(std::uint64_t n) { return kBase + kPage * n; }

// Chunks of 2 pages, 1 page and 3 pages, one behind the other.
struct Table {
  ChunkTable table{kBase, kPage};
  ChunkId first = table.add(page(0), kPage * 2, kHandle);
  ChunkId second = table.add(page(2), kPage, kHandle);
  ChunkId third = table.add(page(3), kPage * 3, kHandle);
};

void a_chunk_is_found_from_each_of_its_bytes(Table& fixture) {
  EXPECT(fixture.table.at(page(0)) == fixture.first);
  EXPECT(fixture.table.at(page(2) - kBlockUnit) == fixture.first);
  EXPECT(fixture.table.at(page(2)) == fixture.second);
  EXPECT(fixture.table.find(page(5)) == fixture.third);
}

void nothing_is_found_where_nothing_is_mapped(Table& fixture) {
  EXPECT(fixture.table.find(page(6)) == kNoId);
  EXPECT(fixture.table.find(kBase - kBlockUnit) == kNoId);
  fixture.table.remove(fixture.second);
  EXPECT(fixture.table.find(page(2)) == kNoId);
}

// Six mebibytes are three pages: the page is the largest power of two in them.
void a_granularity_that_is_no_power_of_two_will_do(Nothing&) {
  ChunkTable table{kBase, 6_MiB};
  const ChunkId first = table.add(kBase, 6_MiB, kHandle);
  const ChunkId second = table.add(kBase + 6_MiB, 12_MiB, kHandle);
  EXPECT(table.find(kBase + 6_MiB - kBlockUnit) == first);
  EXPECT(table.find(kBase + 6_MiB) == second);
  EXPECT(table.find(kBase + 18_MiB - kBlockUnit) == second);
  EXPECT(table.find(kBase + 18_MiB) == kNoId);
  EXPECT(table.check().empty());
}

void a_range_inside_a_page_touches_no_boundary_of_it(Nothing&) {
  const ChunkTable table{kBase, kPage};
  EXPECT(table.is_inside_page(page(1) + kBlockUnit, page(2) - kBlockUnit));
  EXPECT(!table.is_inside_page(page(1), page(2) - kBlockUnit));
  EXPECT(!table.is_inside_page(page(1) + kBlockUnit, page(2)));
  EXPECT(!table.is_inside_page(kBase, kBase + kBlockUnit));
}

void a_removed_chunk_leaves_its_number_to_the_next(Table& fixture) {
  fixture.table.remove(fixture.second);
  EXPECT(fixture.table.count() == 2);
  EXPECT(fixture.table.add(page(2), kPage, kHandle) == fixture.second);
}

void bytes_are_the_sum_of_the_chunks(Table& fixture) {
  EXPECT(fixture.table.bytes() == kPage * 6);
  fixture.table.remove(fixture.first);
  EXPECT(fixture.table.bytes() == kPage * 4);
}

void addresses_round_to_chunk_boundaries_and_not_to_pages(Table& fixture) {
  EXPECT(fixture.table.round_up(page(1)) == page(2));
  EXPECT(fixture.table.round_down(page(1)) == page(0));
  EXPECT(fixture.table.round_up(page(2)) == page(2));
  EXPECT(fixture.table.round_down(page(2)) == page(2));
}

void the_end_of_what_is_mapped_is_a_boundary(Table& fixture) {
  EXPECT(fixture.table.round_up(page(6)) == page(6));
  EXPECT(fixture.table.round_down(page(6)) == page(6));
}

void only_chunks_inside_a_range_are_whole(Table& fixture) {
  EXPECT(fixture.table.whole_bytes(page(1), page(6)) == kPage * 4);
  EXPECT(fixture.table.whole_bytes(page(1), page(4)) == kPage);
  EXPECT(!fixture.table.whole_bytes(page(0), page(1)));
  EXPECT(!fixture.table.whole_bytes(page(2), page(2)));
}

void chunks_that_begin_in_a_range_are_visited_in_address_order(Table& fixture) {
  std::vector<ChunkId> seen;
  fixture.table.for_each_beginning_in(page(1), page(4), [&](ChunkId id) { seen.push_back(id); });
  EXPECT((seen == std::vector<ChunkId>{fixture.second, fixture.third}));
}

// --- planted defects -----------------------------------------------------------------------------

void check_names_a_chunk_that_the_page_table_does_not_know(Table& fixture) {
  fixture.table[fixture.first].size = kPage * 3;
  EXPECT(starts_with(fixture.table.check(), "chunk 0: page table"));
}

void check_names_bytes_that_are_off(Table& fixture) {
  fixture.table[fixture.first].size = kPage;
  EXPECT(starts_with(fixture.table.check(), "chunks: bytes"));
}

void check_names_a_page_of_a_chunk_that_is_gone(Table& fixture) {
  fixture.table[fixture.second].handle = ChunkHandle::kNone;
  fixture.table.*member(ChunkBytes{}) -= kPage;
  EXPECT(starts_with(fixture.table.check(), "chunks: a page names"));
}

// --- chunk policy --------------------------------------------------------------------------------

Bytes sum(const std::vector<Bytes>& sizes) {
  Bytes all{};
  for (const Bytes size : sizes) all += size;
  return all;
}

// What a program would ask for: requests that are lacking in part or in whole, at any size held.
template <class Visit>
void for_each_growth(Visit visit) {
  for (const Bytes held : {0_B, 1_GiB, 20_GiB, 80_GiB}) {
    for (std::uint64_t pages = 1; pages <= 300; ++pages) {
      visit(ChunkDemand{.bytes = kPage * pages, .request = kPage * pages, .held = held});
      visit(ChunkDemand{.bytes = kPage * pages, .request = kPage * pages * 9, .held = held});
    }
  }
}

void chunks_add_up_to_the_growth(Nothing&) {
  for_each_growth(
      [](const ChunkDemand& growth) { EXPECT(sum(chunk_sizes(growth, kPage)) == growth.bytes); });
}

void chunks_are_multiples_of_the_granularity(Nothing&) {
  for_each_growth([](const ChunkDemand& growth) {
    for (const Bytes size : chunk_sizes(growth, kPage)) EXPECT(size && !(size % kPage));
  });
}

void a_growth_is_divided_evenly(Nothing&) {
  for_each_growth([](const ChunkDemand& growth) {
    const std::vector<Bytes> sizes = chunk_sizes(growth, kPage);
    const auto [smallest, largest] = std::minmax_element(sizes.begin(), sizes.end());
    EXPECT(*largest - *smallest <= kPage);
  });
}

void no_growth_is_no_chunk(Nothing&) {
  EXPECT(chunk_sizes({.bytes = 0_B, .request = 1_MiB, .held = 1_GiB}, kPage).empty());
}

void the_smallest_growth_is_one_chunk(Nothing&) {
  const ChunkDemand growth{.bytes = kPage, .request = 1_MiB, .held = 20_GiB};
  EXPECT((chunk_sizes(growth, kPage) == std::vector<Bytes>{kPage}));
}

void chunks_are_larger_where_more_is_held(Nothing&) {
  const ChunkDemand early{.bytes = 240_MiB, .request = 8_MiB, .held = 0_B};
  const ChunkDemand late{.bytes = 240_MiB, .request = 8_MiB, .held = 80_GiB};
  EXPECT(chunk_sizes(late, kPage).size() < chunk_sizes(early, kPage).size());
}

void chunks_are_larger_for_a_larger_request(Nothing&) {
  const ChunkDemand small{.bytes = 240_MiB, .request = 8_MiB, .held = 0_B};
  const ChunkDemand large{.bytes = 240_MiB, .request = 2_GiB, .held = 0_B};
  EXPECT(chunk_sizes(large, kPage).size() < chunk_sizes(small, kPage).size());
}

void chunks_are_larger_the_more_often_they_were_stitched(Nothing&) {
  ChunkDemand growth{.bytes = 960_MiB, .request = 8_MiB, .held = 1_GiB};
  const std::size_t count = chunk_sizes(growth, kPage).size();
  growth.mapped_again = 3;  // twice that of a settled program makes them twice as large
  EXPECT(chunk_sizes(growth, kPage).size() == count);
  growth.mapped_again = 4;
  EXPECT(chunk_sizes(growth, kPage).size() == count / 2);
  growth.mapped_again = 1000;
  EXPECT(chunk_sizes(growth, kPage).size() == count / 4);
}

void chunks_are_finest_where_no_room_is_left(Nothing&) {
  const ChunkDemand tight{
      .bytes = 64_MiB, .request = 2_GiB, .held = 80_GiB, .room = 64_MiB, .mapped_again = 9};
  EXPECT(chunk_sizes(tight, kPage).size() == 64_MiB / kPage);
}

constexpr Check<Table> kTableChecks[] = {
    {"a chunk is found from each of its bytes", a_chunk_is_found_from_each_of_its_bytes},
    {"nothing is found where nothing is mapped", nothing_is_found_where_nothing_is_mapped},
    {"a removed chunk leaves its number to the next",
     a_removed_chunk_leaves_its_number_to_the_next},
    {"bytes are the sum of the chunks", bytes_are_the_sum_of_the_chunks},
    {"addresses round to chunk boundaries and not to pages",
     addresses_round_to_chunk_boundaries_and_not_to_pages},
    {"the end of what is mapped is a boundary", the_end_of_what_is_mapped_is_a_boundary},
    {"only chunks inside a range are whole", only_chunks_inside_a_range_are_whole},
    {"chunks that begin in a range are visited in address order",
     chunks_that_begin_in_a_range_are_visited_in_address_order},
    {"check names a chunk that the page table does not know",
     check_names_a_chunk_that_the_page_table_does_not_know},
    {"check names bytes that are off", check_names_bytes_that_are_off},
    {"check names a page of a chunk that is gone", check_names_a_page_of_a_chunk_that_is_gone},
};

constexpr Check<Nothing> kPageChecks[] = {
    {"a granularity that is no power of two will do",
     a_granularity_that_is_no_power_of_two_will_do},
    {"a range inside a page touches no boundary of it",
     a_range_inside_a_page_touches_no_boundary_of_it},
};

constexpr Check<Nothing> kPolicyChecks[] = {
    {"chunks add up to the growth", chunks_add_up_to_the_growth},
    {"chunks are multiples of the granularity", chunks_are_multiples_of_the_granularity},
    {"a growth is divided evenly", a_growth_is_divided_evenly},
    {"no growth is no chunk", no_growth_is_no_chunk},
    {"the smallest growth is one chunk", the_smallest_growth_is_one_chunk},
    {"chunks are larger where more is held", chunks_are_larger_where_more_is_held},
    {"chunks are larger for a larger request", chunks_are_larger_for_a_larger_request},
    {"chunks are larger the more often they were stitched",
     chunks_are_larger_the_more_often_they_were_stitched},
    {"chunks are finest where no room is left", chunks_are_finest_where_no_room_is_left},
};

}  // namespace
}  // namespace chunk_table_claims

void check_chunk_table() {
  run_checks("chunk table", chunk_table_claims::kTableChecks);
  run_checks("pages", chunk_table_claims::kPageChecks);
  run_checks("chunk policy", chunk_table_claims::kPolicyChecks);
}

}  // namespace vramx::units
