// The address space of one device: cutting, merging, tags, growing and shrinking.
#include "core/arena.h"

#include <utility>
#include <vector>

#include "units/units.h"

namespace vramx::units {

namespace arena_claims {
namespace {

using Fixture = ArenaFixture;

const TagSet kOfStream0(Tag{0, 1});
const TagSet kOfStream1(Tag{1, 1});

TagSet of_both() {
  TagSet tags = kOfStream0;
  tags.add(kOfStream1);
  return tags;
}

// --- find ----------------------------------------------------------------------------------------

void a_new_arena_is_one_unmapped_span(Fixture& fixture) {
  EXPECT(fixture.arena.span_count() == 1);
  EXPECT(fixture.arena.span(fixture.arena.first()).size == kPage * 64);
  EXPECT(fixture.best_fit(kBlockUnit) == kNoId);
  EXPECT(fixture.arena.check().empty());
}

void a_stream_finds_its_own_extents_and_those_without_a_tag(Fixture& fixture) {
  const Address at = fixture.map({kPage, kPage});
  fixture.take(at, kPage * 2);
  fixture.free(at, kOfStream0);
  EXPECT(fixture.best_fit(kPage, 0) == fixture.arena.span_at(at));
  EXPECT(fixture.best_fit(kPage, 1) == kNoId);
}

void an_extent_with_tags_of_two_streams_is_neither_streams_own(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  fixture.take(at, kPage);
  fixture.free(at, of_both());
  EXPECT(fixture.best_fit(kPage, 0) == kNoId);
  EXPECT(fixture.best_fit(kPage, 1) == kNoId);
  EXPECT(fixture.arena.best_run(kPage, kAnyExtent).begin == at);
}

// Each stream's extents lie in an index of their own: what comes out is one order.
void extents_of_equal_size_come_lowest_first_whatever_their_streams(Fixture& fixture) {
  const Address at = fixture.map(std::vector<Bytes>(12, kPage));
  for (std::uint64_t page = 0; page < 12; ++page) fixture.take(at + kPage * page, kPage);
  for (const std::uint64_t page : {9, 1, 5, 11, 3, 7}) {
    const TagSet tags = page == 5 ? TagSet() : TagSet(Tag{static_cast<StreamIndex>(page % 3), 1});
    fixture.free(at + kPage * page, tags);
  }
  const auto all = fixture.arena.stitchable(kBlockUnit, 9, kAnyExtent);
  REQUIRE(all.size() == 6);
  for (std::uint64_t i = 0; i < 6; ++i) {
    EXPECT(all[i].begin == at + kPage * (2 * i + 1));
  }
}

void the_largest_extents_come_first_and_no_more_than_asked_for(Fixture& fixture) {
  const Address at = fixture.map(std::vector<Bytes>(9, kPage));
  fixture.take(at + kPage, kPage);      // leaves 1 page free before it
  fixture.take(at + kPage * 5, kPage);  // 3 pages between the two, and 3 behind
  const auto all = fixture.arena.stitchable(kBlockUnit, 9, kAnyExtent);
  REQUIRE(all.size() == 3);
  EXPECT(all[0].begin == at + kPage * 2);
  EXPECT(all[1].begin == at + kPage * 6);
  EXPECT(all[2].begin == at);
  EXPECT(fixture.arena.stitchable(kBlockUnit, 2, kAnyExtent).size() == 2);
  EXPECT(fixture.arena.stitchable(kPage * 2, 9, kAnyExtent).size() == 2);
}

// The first extent leaves a used page of its chunk on either side; the second ends with the chunk.
void what_lies_inside_a_chunk_is_not_stitchable(Fixture& fixture) {
  const Address at = fixture.map({kPage * 4, kPage});
  for (std::uint64_t page = 0; page < 5; ++page) fixture.take(at + kPage * page, kPage);
  fixture.free(at + kPage);
  EXPECT(fixture.arena.stitchable(kBlockUnit, 9, kAnyExtent).empty());
  fixture.free(at + kPage * 3);
  const auto all = fixture.arena.stitchable(kBlockUnit, 9, kAnyExtent);
  REQUIRE(all.size() == 1);
  EXPECT(all[0].begin == at + kPage * 3);
}

void only_an_extent_that_holds_all_of_a_range_lies_over_it(Fixture& fixture) {
  const Address at = fixture.map({kPage, kPage});
  EXPECT(fixture.arena.extent_over(at, kPage * 2) == fixture.arena.span_at(at));
  fixture.take(at + kPage, kBlockUnit);
  EXPECT(fixture.arena.extent_over(at, kPage * 2) == kNoId);
  EXPECT(fixture.arena.extent_over(at, kPage) == fixture.arena.span_at(at));
}

void nothing_lies_over_addresses_without_memory(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  EXPECT(fixture.arena.extent_over(at + kPage, kBlockUnit) == kNoId);
  EXPECT(fixture.arena.extent_over(at + kPage * 63, kBlockUnit) == kNoId);
}

void an_extent_behind_many_small_spans_of_its_page_is_not_searched_for(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  const Address middle = at + 1_MiB;
  for (std::uint64_t i = 0; i < 8; ++i) fixture.take(at + kBlockUnit * i, kBlockUnit);
  EXPECT(fixture.arena.extent_over(middle, 1_MiB) == fixture.arena.span_at(middle));
  for (std::uint64_t i = 8; i < 100; ++i) fixture.take(at + kBlockUnit * i, kBlockUnit);
  EXPECT(fixture.arena.extent_over(middle, 1_MiB) == kNoId);
}

// --- take ----------------------------------------------------------------------------------------

void a_block_is_cut_where_whole_chunks_are_spared(Fixture& fixture) {
  const Address at = fixture.map({kPage, kPage * 2});
  fixture.take(at, kBlockUnit);
  // Free is a rest of the first chunk and the whole second one: only the rest may be broken.
  const SpanId used = fixture.arena.take(fixture.arena.span_at(at + kBlockUnit), kBlockUnit);
  EXPECT(fixture.arena.span(used).begin == at + kBlockUnit);
  EXPECT(fixture.arena.is_whole_free(fixture.chunk_at(at + kPage)));
}

// What a chunk bound touches can be the first or the last piece of a stitch; what none touches
// cannot be stitched at all.
void a_block_is_cut_where_the_rest_touches_a_chunk_bound(Fixture& fixture) {
  const Address at = fixture.map({kPage * 2, kPage * 2});
  fixture.take(at, 1_MiB);
  fixture.take(at + 4_MiB, 3_MiB);
  fixture.take(at + 7_MiB, 1_MiB);
  const SpanId small = fixture.arena.take(fixture.arena.span_at(at + 1_MiB), kBlockUnit);
  EXPECT(fixture.arena.span(small).begin == at + 1_MiB);
  fixture.take(at + 1_MiB + kBlockUnit, 3_MiB - kBlockUnit);
  fixture.free(at + 4_MiB, {});
  const SpanId large = fixture.arena.take(fixture.arena.span_at(at + 4_MiB), 2_MiB);
  EXPECT(fixture.arena.span(large).end() == at + 7_MiB);
}

void an_extent_may_be_cut_in_the_middle(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  const SpanId used = fixture.take(at + 1_MiB, 4_KiB);
  EXPECT(fixture.arena.span(used).begin == at + 1_MiB);
  EXPECT(fixture.arena.span(used).size == 4_KiB);
  EXPECT(fixture.arena.free_bytes() == kPage - 4_KiB);
  EXPECT(fixture.arena.extent_count() == 2);
  EXPECT(fixture.arena.check().empty());
}

void what_is_left_of_an_extent_keeps_its_tags(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  fixture.take(at, kPage);
  fixture.free(at, of_both());
  fixture.take(at + 512_KiB, 512_KiB);
  EXPECT(fixture.arena.tags_of(fixture.arena.span_at(at)).size() == 2);
  EXPECT(fixture.arena.tags_of(fixture.arena.span_at(at + 1_MiB)).size() == 2);
}

// --- give back and merge -------------------------------------------------------------------------

void a_freed_block_merges_with_both_neighbours(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  fixture.take(at + 512_KiB, 512_KiB);
  EXPECT(fixture.arena.extent_count() == 2);
  fixture.free(at + 512_KiB);
  EXPECT(fixture.arena.extent_count() == 1);
  EXPECT(fixture.arena.free_bytes() == kPage);
  EXPECT(fixture.arena.check().empty());
}

void a_merged_extent_carries_the_later_tag_of_a_stream(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  fixture.take(at, 1_MiB);
  fixture.take(at + 1_MiB, 1_MiB);
  fixture.free(at, TagSet(Tag{0, 5}));
  fixture.free(at + 1_MiB, TagSet(Tag{0, 3}));
  const TagSet tags = fixture.arena.tags_of(fixture.arena.span_at(at));
  EXPECT(fixture.arena.extent_count() == 1);
  EXPECT((tags.size() == 1 && tags[0] == Tag{0, 5}));
}

// --- map and unmap -------------------------------------------------------------------------------

void new_chunks_merge_with_the_extent_before_them(Fixture& fixture) {
  const Address first = fixture.map({kPage});
  EXPECT(fixture.map({kPage}) == first + kPage);
  EXPECT(fixture.arena.extent_count() == 1);
  EXPECT(fixture.arena.mapped_bytes() == kPage * 2);
}

void mapped_memory_is_its_builders_until_given_back(Fixture& fixture) {
  const SpanId building =
      fixture.arena.begin_building(fixture.arena.gap_for(Zone::kLarge, kPage), kPage);
  fixture.arena.finish_mapped(building, {{kPage, ChunkHandle{1}}});
  EXPECT(fixture.arena.span(building).state == SpanState::kUsed);
  EXPECT(fixture.best_fit(kBlockUnit) == kNoId);
  EXPECT(fixture.arena.check().empty());
}

void the_end_of_a_used_span_is_given_back_alone(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  const SpanId kept = fixture.arena.give_back_end(fixture.take(at, kPage), 1_MiB);
  EXPECT(kept == fixture.arena.span_at(at));
  EXPECT(fixture.arena.span(kept).state == SpanState::kUsed);
  EXPECT(fixture.arena.extent_over(at + 1_MiB, 1_MiB) != kNoId);
  EXPECT(fixture.arena.free_bytes() == 1_MiB);
  EXPECT(fixture.arena.check().empty());
}

void a_span_that_is_being_built_is_neither_free_nor_a_gap(Fixture& fixture) {
  const SpanId building =
      fixture.arena.begin_building(fixture.arena.gap_for(Zone::kLarge, kPage), kPage);
  EXPECT(fixture.best_fit(kBlockUnit) == kNoId);
  EXPECT(fixture.arena.gap_for(Zone::kLarge, kPage * 64) == kNoId);
  EXPECT(fixture.arena.check().empty());
  fixture.arena.finish_unmapped(building);
  EXPECT(fixture.arena.gap_for(Zone::kLarge, kPage * 64) != kNoId);
  EXPECT(fixture.arena.span_count() == 1);
}

void a_removed_chunk_leaves_a_gap_that_is_filled_first(Fixture& fixture) {
  const Address at = fixture.map({kPage, kPage, kPage});
  const SpanId leaving = fixture.arena.begin_removing(fixture.chunk_at(at + kPage));
  EXPECT(fixture.arena.check().empty());
  fixture.arena.finish_unmapped(leaving);
  EXPECT(fixture.arena.mapped_bytes() == kPage * 2);
  EXPECT(fixture.arena.check().empty());
  EXPECT(fixture.map({kPage}) == at + kPage);
}

void free_bytes_at_a_chunks_ends_stop_at_the_chunk(Fixture& fixture) {
  const Address at = fixture.map({kPage, kPage});
  const ChunkId first = fixture.chunk_at(at);
  EXPECT(fixture.arena.is_whole_free(first));
  EXPECT(fixture.arena.free_prefix(first) == kPage && fixture.arena.free_suffix(first) == kPage);
  fixture.take(at + 512_KiB, 512_KiB);
  EXPECT(!fixture.arena.is_whole_free(first));
  EXPECT(fixture.arena.free_prefix(first) == 512_KiB);
  EXPECT(fixture.arena.free_suffix(first) == 1_MiB);
  EXPECT(fixture.arena.free_suffix(fixture.chunk_at(at + kPage)) == kPage);
}

constexpr Check<Fixture> kChecks[] = {
    {"a new arena is one unmapped span", a_new_arena_is_one_unmapped_span},
    {"a stream finds its own extents and those without a tag",
     a_stream_finds_its_own_extents_and_those_without_a_tag},
    {"an extent with tags of two streams is neither stream's own",
     an_extent_with_tags_of_two_streams_is_neither_streams_own},
    {"extents of equal size come lowest first whatever their streams",
     extents_of_equal_size_come_lowest_first_whatever_their_streams},
    {"the largest extents come first and no more than asked for",
     the_largest_extents_come_first_and_no_more_than_asked_for},
    {"what lies inside a chunk is not stitchable", what_lies_inside_a_chunk_is_not_stitchable},
    {"only an extent that holds all of a range lies over it",
     only_an_extent_that_holds_all_of_a_range_lies_over_it},
    {"nothing lies over addresses without memory", nothing_lies_over_addresses_without_memory},
    {"an extent behind many small spans of its page is not searched for",
     an_extent_behind_many_small_spans_of_its_page_is_not_searched_for},
    {"a block is cut where whole chunks are spared", a_block_is_cut_where_whole_chunks_are_spared},
    {"a block is cut where the rest touches a chunk bound",
     a_block_is_cut_where_the_rest_touches_a_chunk_bound},
    {"an extent may be cut in the middle", an_extent_may_be_cut_in_the_middle},
    {"what is left of an extent keeps its tags", what_is_left_of_an_extent_keeps_its_tags},
    {"a freed block merges with both neighbours", a_freed_block_merges_with_both_neighbours},
    {"a merged extent carries the later tag of a stream",
     a_merged_extent_carries_the_later_tag_of_a_stream},
    {"new chunks merge with the extent before them", new_chunks_merge_with_the_extent_before_them},
    {"mapped memory is its builder's until given back",
     mapped_memory_is_its_builders_until_given_back},
    {"the end of a used span is given back alone", the_end_of_a_used_span_is_given_back_alone},
    {"a span that is being built is neither free nor a gap",
     a_span_that_is_being_built_is_neither_free_nor_a_gap},
    {"a removed chunk leaves a gap that is filled first",
     a_removed_chunk_leaves_a_gap_that_is_filled_first},
    {"free bytes at a chunk's ends stop at the chunk",
     free_bytes_at_a_chunks_ends_stop_at_the_chunk},
};

}  // namespace
}  // namespace arena_claims

void check_arena() { run_checks("arena", arena_claims::kChecks); }

}  // namespace vramx::units
