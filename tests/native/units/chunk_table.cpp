// Which chunk lies where, and how large the chunks of a growth are: chunk_table and chunk_policy.
#include <algorithm>
#include <vector>

#include "core/chunk_policy.h"
#include "units/units.h"

namespace vramx::units::chunk_table_claims {

REVEAL(ChunkBytes, &ChunkTable::bytes_);

constexpr ChunkHandle kHandle{7};

Address page(std::uint64_t n) { return kBase + kPage * n; }

// Chunks of 2 pages, 1 page and 3 pages, one behind the other.
struct Table {
  ChunkTable table{kBase, kPage};
  ChunkId first = table.add(page(0), kPage * 2, kHandle);
  ChunkId second = table.add(page(2), kPage, kHandle);
  ChunkId third = table.add(page(3), kPage * 3, kHandle);
};

CHECK(Table, a_chunk_is_found_from_each_of_its_bytes) {
  EXPECT(table.at(page(0)) == first);
  EXPECT(table.at(page(2) - kBlockUnit) == first);
  EXPECT(table.at(page(2)) == second);
  EXPECT(table.find(page(5)) == third);
}

CHECK(Table, nothing_is_found_where_nothing_is_mapped) {
  EXPECT(table.find(page(6)) == kNoId);
  EXPECT(table.find(kBase - kBlockUnit) == kNoId);
  table.remove(second);
  EXPECT(table.find(page(2)) == kNoId);
}

// Of chunks that are gone nothing counts: a new one is made as at first.
CHECK(Table, how_often_chunks_were_aliased_is_of_those_that_are_there) {
  table.note_aliased(first);
  table.note_aliased(first);
  table.note_aliased(third);
  EXPECT(table[first].alias_count == 2 && table.times_aliased() == 3);
  --table[first].alias_count;
  EXPECT(table.times_aliased() == 3);
  table.remove(first);
  EXPECT(table.times_aliased() == 1);
  EXPECT(table[table.add(page(0), kPage * 2, kHandle)].times_aliased == 0);
}

// Six mebibytes are three pages: the page is the largest power of two in them.
CHECK(Nothing, a_granularity_that_is_no_power_of_two_will_do) {
  ChunkTable table{kBase, 6_MiB};
  const ChunkId first = table.add(kBase, 6_MiB, kHandle);
  const ChunkId second = table.add(kBase + 6_MiB, 12_MiB, kHandle);
  EXPECT(table.find(kBase + 6_MiB - kBlockUnit) == first);
  EXPECT(table.find(kBase + 6_MiB) == second);
  EXPECT(table.find(kBase + 18_MiB - kBlockUnit) == second);
  EXPECT(table.find(kBase + 18_MiB) == kNoId);
  EXPECT(table.check().empty());
}

CHECK(Nothing, a_range_inside_a_page_touches_no_boundary_of_it) {
  const ChunkTable table{kBase, kPage};
  EXPECT(table.is_inside_page(page(1) + kBlockUnit, page(2) - kBlockUnit));
  EXPECT(!table.is_inside_page(page(1), page(2) - kBlockUnit));
  EXPECT(!table.is_inside_page(page(1) + kBlockUnit, page(2)));
  EXPECT(!table.is_inside_page(kBase, kBase + kBlockUnit));
}

CHECK(Table, a_removed_chunk_leaves_its_number_to_the_next) {
  table.remove(second);
  EXPECT(table.count() == 2);
  EXPECT(table.add(page(2), kPage, kHandle) == second);
}

CHECK(Table, bytes_are_the_sum_of_the_chunks) {
  EXPECT(table.bytes() == kPage * 6);
  table.remove(first);
  EXPECT(table.bytes() == kPage * 4);
}

CHECK(Table, addresses_round_to_chunk_boundaries_and_not_to_pages) {
  EXPECT(table.round_up(page(1)) == page(2));
  EXPECT(table.round_down(page(1)) == page(0));
  EXPECT(table.round_up(page(2)) == page(2));
  EXPECT(table.round_down(page(2)) == page(2));
  // The end of what is mapped is a boundary, too.
  EXPECT(table.round_up(page(6)) == page(6));
  EXPECT(table.round_down(page(6)) == page(6));
}

CHECK(Table, only_chunks_inside_a_range_are_whole) {
  EXPECT(table.whole_bytes(page(1), page(6)) == kPage * 4);
  EXPECT(table.whole_bytes(page(1), page(4)) == kPage);
  EXPECT(!table.whole_bytes(page(0), page(1)));
  EXPECT(!table.whole_bytes(page(2), page(2)));
}

CHECK(Table, chunks_that_begin_in_a_range_are_visited_in_address_order) {
  std::vector<ChunkId> seen;
  table.for_each_beginning_in(page(1), page(4), [&](ChunkId id) { seen.push_back(id); });
  EXPECT((seen == std::vector<ChunkId>{second, third}));
}

// --- planted defects -----------------------------------------------------------------------------

CHECK(Table, check_names_a_chunk_that_the_page_table_does_not_know) {
  table[first].size = kPage * 3;
  EXPECT(starts_with(table.check(), "chunk 0: page table"));
}

CHECK(Table, check_names_bytes_that_are_off) {
  table[first].size = kPage;
  EXPECT(starts_with(table.check(), "chunks: bytes"));
}

CHECK(Table, check_names_a_page_of_a_chunk_that_is_gone) {
  table[second].handle = ChunkHandle::kNone;
  table.*member(ChunkBytes{}) -= kPage;
  EXPECT(starts_with(table.check(), "chunks: a page names"));
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

CHECK(Nothing, a_growth_is_divided_evenly_into_multiples_of_the_granularity) {
  for_each_growth([](const ChunkDemand& growth) {
    const std::vector<Bytes> sizes = chunk_sizes(growth, kPage);
    EXPECT(sum(sizes) == growth.bytes);
    for (const Bytes size : sizes) EXPECT(size && !(size % kPage));
    const auto [smallest, largest] = std::minmax_element(sizes.begin(), sizes.end());
    EXPECT(*largest - *smallest <= kPage);
  });
}

CHECK(Nothing, no_growth_is_no_chunk_and_the_smallest_is_one) {
  EXPECT(chunk_sizes({.bytes = 0_B, .request = 1_MiB, .held = 1_GiB}, kPage).empty());
  const ChunkDemand growth{.bytes = kPage, .request = 1_MiB, .held = 20_GiB};
  EXPECT((chunk_sizes(growth, kPage) == std::vector<Bytes>{kPage}));
}

CHECK(Nothing, chunks_are_larger_where_more_is_held_and_for_a_larger_request) {
  const auto count = [](Bytes request, Bytes held) {
    return chunk_sizes({.bytes = 240_MiB, .request = request, .held = held}, kPage).size();
  };
  EXPECT(count(8_MiB, 80_GiB) < count(8_MiB, 0_B));
  EXPECT(count(2_GiB, 0_B) < count(8_MiB, 0_B));
}

CHECK(Nothing, chunks_are_larger_the_more_often_they_were_stitched) {
  ChunkDemand growth{.bytes = 960_MiB, .request = 8_MiB, .held = 1_GiB};
  const std::size_t count = chunk_sizes(growth, kPage).size();
  growth.mapped_again = 1;
  EXPECT(chunk_sizes(growth, kPage).size() == count);
  growth.mapped_again = 2;
  EXPECT(chunk_sizes(growth, kPage).size() == count / 2);
  growth.mapped_again = 1000;
  EXPECT(chunk_sizes(growth, kPage).size() == count / 8);
}

CHECK(Nothing, chunks_are_finest_where_no_room_is_left) {
  const ChunkDemand tight{
      .bytes = 64_MiB, .request = 2_GiB, .held = 80_GiB, .room = 64_MiB, .mapped_again = 9};
  EXPECT(chunk_sizes(tight, kPage).size() == 64_MiB / kPage);
}

}  // namespace vramx::units::chunk_table_claims
