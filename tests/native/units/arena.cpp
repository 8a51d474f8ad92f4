// The address space of one device: cutting, merging, tags, growing and shrinking.
#include <vector>

#include "units/units.h"

namespace vramx::units::arena_claims {

using Fixture = SoundArena;

const TagSet kOfStream0(Tag{0, 1});
const TagSet kOfStream1(Tag{1, 1});

TagSet of_both() {
  TagSet tags = kOfStream0;
  tags.add(kOfStream1);
  return tags;
}

// --- find ----------------------------------------------------------------------------------------

CHECK(Fixture, a_new_arena_is_one_unmapped_span) {
  EXPECT(arena.span_count() == 1);
  EXPECT(arena.span(arena.first()).size == kPage * 64);
  EXPECT(best_fit(kBlockUnit) == kNoId);
}

CHECK(Fixture, a_stream_finds_its_own_extents_and_those_without_a_tag) {
  const Address at = map({kPage, kPage});
  take(at, kPage * 2);
  free(at, kOfStream0);
  EXPECT(best_fit(kPage, 0) == arena.span_at(at));
  EXPECT(best_fit(kPage, 1) == kNoId);
}

CHECK(Fixture, an_extent_with_tags_of_two_streams_is_neither_streams_own) {
  const Address at = map({kPage});
  take(at, kPage);
  free(at, of_both());
  EXPECT(best_fit(kPage, 0) == kNoId);
  EXPECT(best_fit(kPage, 1) == kNoId);
  EXPECT(arena.best_run(kPage, kAnyExtent).begin == at);
}

// Each stream's extents lie in an index of their own: what comes out is one order.
CHECK(Fixture, extents_of_equal_size_come_lowest_first_whatever_their_streams) {
  const Address at = map(std::vector<Bytes>(12, kPage));
  for (std::uint64_t page = 0; page < 12; ++page) take(at + kPage * page, kPage);
  for (const std::uint64_t page : {9, 1, 5, 11, 3, 7}) {
    const TagSet tags = page == 5 ? TagSet() : TagSet(Tag{static_cast<StreamIndex>(page % 3), 1});
    free(at + kPage * page, tags);
  }
  const auto all = arena.stitchable(kBlockUnit, 9, kAnyExtent);
  REQUIRE(all.size() == 6);
  for (std::uint64_t i = 0; i < 6; ++i) {
    EXPECT(all[i].begin == at + kPage * (2 * i + 1));
  }
}

CHECK(Fixture, the_largest_extents_come_first_and_no_more_than_asked_for) {
  const Address at = map(std::vector<Bytes>(9, kPage));
  take(at + kPage, kPage);      // leaves 1 page free before it
  take(at + kPage * 5, kPage);  // 3 pages between the two, and 3 behind
  const auto all = arena.stitchable(kBlockUnit, 9, kAnyExtent);
  REQUIRE(all.size() == 3);
  EXPECT(all[0].begin == at + kPage * 2);
  EXPECT(all[1].begin == at + kPage * 6);
  EXPECT(all[2].begin == at);
  EXPECT(arena.stitchable(kBlockUnit, 2, kAnyExtent).size() == 2);
  EXPECT(arena.stitchable(kPage * 2, 9, kAnyExtent).size() == 2);
}

// The first extent leaves a used page of its chunk on either side; the second ends with the chunk.
CHECK(Fixture, what_lies_inside_a_chunk_is_not_stitchable) {
  const Address at = map({kPage * 4, kPage});
  for (std::uint64_t page = 0; page < 5; ++page) take(at + kPage * page, kPage);
  free(at + kPage);
  EXPECT(arena.stitchable(kBlockUnit, 9, kAnyExtent).empty());
  free(at + kPage * 3);
  const auto all = arena.stitchable(kBlockUnit, 9, kAnyExtent);
  REQUIRE(all.size() == 1);
  EXPECT(all[0].begin == at + kPage * 3);
}

CHECK(Fixture, only_an_extent_that_holds_all_of_a_range_lies_over_it) {
  const Address at = map({kPage, kPage});
  EXPECT(arena.extent_over(at, kPage * 2) == arena.span_at(at));
  take(at + kPage, kBlockUnit);
  EXPECT(arena.extent_over(at, kPage * 2) == kNoId);
  EXPECT(arena.extent_over(at, kPage) == arena.span_at(at));
}

CHECK(Fixture, nothing_lies_over_addresses_without_memory) {
  const Address at = map({kPage});
  EXPECT(arena.extent_over(at + kPage, kBlockUnit) == kNoId);
  EXPECT(arena.extent_over(at + kPage * 63, kBlockUnit) == kNoId);
}

CHECK(Fixture, an_extent_behind_many_small_spans_of_its_page_is_not_searched_for) {
  const Address at = map({kPage});
  const Address middle = at + 1_MiB;
  for (std::uint64_t i = 0; i < 8; ++i) take(at + kBlockUnit * i, kBlockUnit);
  EXPECT(arena.extent_over(middle, 1_MiB) == arena.span_at(middle));
  for (std::uint64_t i = 8; i < 100; ++i) take(at + kBlockUnit * i, kBlockUnit);
  EXPECT(arena.extent_over(middle, 1_MiB) == kNoId);
}

// --- take ----------------------------------------------------------------------------------------

CHECK(Fixture, a_block_is_cut_where_whole_chunks_are_spared) {
  const Address at = map({kPage, kPage * 2});
  take(at, kBlockUnit);
  // Free is a rest of the first chunk and the whole second one: only the rest may be broken.
  const SpanId used = arena.take(arena.span_at(at + kBlockUnit), kBlockUnit);
  EXPECT(arena.span(used).begin == at + kBlockUnit);
  EXPECT(arena.is_whole_free(chunk_at(at + kPage)));
}

// What a chunk bound touches can be the first or the last piece of a stitch; what none touches
// cannot be stitched at all.
CHECK(Fixture, a_block_is_cut_where_the_rest_touches_a_chunk_bound) {
  const Address at = map({kPage * 2, kPage * 2});
  take(at, 1_MiB);
  take(at + 4_MiB, 3_MiB);
  take(at + 7_MiB, 1_MiB);
  const SpanId small = arena.take(arena.span_at(at + 1_MiB), kBlockUnit);
  EXPECT(arena.span(small).begin == at + 1_MiB);
  take(at + 1_MiB + kBlockUnit, 3_MiB - kBlockUnit);
  free(at + 4_MiB, {});
  const SpanId large = arena.take(arena.span_at(at + 4_MiB), 2_MiB);
  EXPECT(arena.span(large).end() == at + 7_MiB);
}

CHECK(Fixture, an_extent_may_be_cut_in_the_middle) {
  const Address at = map({kPage});
  const SpanId used = take(at + 1_MiB, 4_KiB);
  EXPECT(arena.span(used).begin == at + 1_MiB);
  EXPECT(arena.span(used).size == 4_KiB);
  EXPECT(arena.free_bytes() == kPage - 4_KiB);
  EXPECT(arena.extent_count() == 2);
}

CHECK(Fixture, what_is_left_of_an_extent_keeps_its_tags) {
  const Address at = map({kPage});
  take(at, kPage);
  free(at, of_both());
  take(at + 512_KiB, 512_KiB);
  EXPECT(arena.tags_of(arena.span_at(at)).size() == 2);
  EXPECT(arena.tags_of(arena.span_at(at + 1_MiB)).size() == 2);
}

// --- give back and merge -------------------------------------------------------------------------

CHECK(Fixture, a_freed_block_merges_with_both_neighbours) {
  const Address at = map({kPage});
  take(at + 512_KiB, 512_KiB);
  EXPECT(arena.extent_count() == 2);
  free(at + 512_KiB);
  EXPECT(arena.extent_count() == 1);
  EXPECT(arena.free_bytes() == kPage);
}

CHECK(Fixture, a_merged_extent_carries_the_later_tag_of_a_stream) {
  const Address at = map({kPage});
  take(at, 1_MiB);
  take(at + 1_MiB, 1_MiB);
  free(at, TagSet(Tag{0, 5}));
  free(at + 1_MiB, TagSet(Tag{0, 3}));
  const TagSet tags = arena.tags_of(arena.span_at(at));
  EXPECT(arena.extent_count() == 1);
  EXPECT((tags.size() == 1 && tags[0] == Tag{0, 5}));
}

// --- map and unmap -------------------------------------------------------------------------------

CHECK(Fixture, new_chunks_merge_with_the_extent_before_them) {
  const Address first = map({kPage});
  EXPECT(map({kPage}) == first + kPage);
  EXPECT(arena.extent_count() == 1);
  EXPECT(arena.mapped_bytes() == kPage * 2);
}

CHECK(Fixture, mapped_memory_is_its_builders_until_given_back) {
  const SpanId building = arena.begin_building(arena.gap_for(Zone::kLarge, kPage), kPage);
  arena.finish_mapped(building, {{kPage, ChunkHandle{1}}});
  EXPECT(arena.span(building).state == SpanState::kUsed);
  EXPECT(best_fit(kBlockUnit) == kNoId);
}

CHECK(Fixture, the_end_of_a_used_span_is_given_back_alone) {
  const Address at = map({kPage});
  const SpanId kept = arena.give_back_end(take(at, kPage), 1_MiB);
  EXPECT(kept == arena.span_at(at));
  EXPECT(arena.span(kept).state == SpanState::kUsed);
  EXPECT(arena.extent_over(at + 1_MiB, 1_MiB) != kNoId);
  EXPECT(arena.free_bytes() == 1_MiB);
}

CHECK(Fixture, a_span_that_is_being_built_is_neither_free_nor_a_gap) {
  const SpanId building = arena.begin_building(arena.gap_for(Zone::kLarge, kPage), kPage);
  EXPECT(best_fit(kBlockUnit) == kNoId);
  EXPECT(arena.gap_for(Zone::kLarge, kPage * 64) == kNoId);
  EXPECT(arena.check().empty());
  arena.finish_unmapped(building);
  EXPECT(arena.gap_for(Zone::kLarge, kPage * 64) != kNoId);
  EXPECT(arena.span_count() == 1);
}

CHECK(Fixture, a_removed_chunk_leaves_a_gap_that_is_filled_first) {
  const Address at = map({kPage, kPage, kPage});
  const SpanId leaving = arena.begin_removing(chunk_at(at + kPage));
  EXPECT(arena.check().empty());
  arena.finish_unmapped(leaving);
  EXPECT(arena.mapped_bytes() == kPage * 2);
  EXPECT(arena.check().empty());
  EXPECT(map({kPage}) == at + kPage);
}

CHECK(Fixture, free_bytes_at_a_chunks_ends_stop_at_the_chunk) {
  const Address at = map({kPage, kPage});
  const ChunkId first = chunk_at(at);
  EXPECT(arena.is_whole_free(first));
  EXPECT(arena.free_prefix(first) == kPage && arena.free_suffix(first) == kPage);
  take(at + 512_KiB, 512_KiB);
  EXPECT(!arena.is_whole_free(first));
  EXPECT(arena.free_prefix(first) == 512_KiB);
  EXPECT(arena.free_suffix(first) == 1_MiB);
  EXPECT(arena.free_suffix(chunk_at(at + kPage)) == kPage);
}

}  // namespace vramx::units::arena_claims
