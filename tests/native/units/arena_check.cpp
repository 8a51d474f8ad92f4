// The arena's invariants, span 1-5 of core/types.h: each is broken on purpose and must be named.
//
// Where no public call can break one, the check reaches for the member behind it.
#include "units/units.h"

namespace vramx::units::arena_check_claims {

REVEAL(FreeBytes, &Arena::free_bytes_);
REVEAL(Spans, &Arena::spans_);
REVEAL(PageSpans, &Arena::page_spans_);

using Fixture = ArenaFixture;

Span& span_at(Fixture& fixture, Address address) {
  return (fixture.arena.*member(Spans{}))[fixture.arena.span_at(address)];
}

CHECK(Fixture, span_1_is_named_where_a_span_begins_elsewhere) {
  const Address at = map({kPage});
  take(at, 1_MiB);
  span_at(*this, at + 1_MiB).begin = at + 1_MiB + kBlockUnit;
  EXPECT(starts_with(arena.check(), "span 1"));
}

CHECK(Fixture, span_1_is_named_where_the_last_span_ends_early) {
  (arena.*member(Spans{}))[arena.first()].size = kPage;
  EXPECT(starts_with(arena.check(), "span 1: the last span"));
}

CHECK(Fixture, span_1_is_named_where_a_span_is_in_no_list) {
  (arena.*member(Spans{})).create();
  EXPECT(starts_with(arena.check(), "span 1: a span is in no list"));
}

CHECK(Fixture, span_2_is_named_where_a_page_names_the_wrong_span) {
  const Address at = map({kPage, kPage});
  take(at, kPage);
  (arena.*member(PageSpans{}))[0] = arena.span_at(at + kPage);
  EXPECT(starts_with(arena.check(), "span 2: not found"));
}

CHECK(Fixture, span_2_is_named_where_a_spans_chunk_is_gone) {
  const Address at = map({kPage});
  take(at, kPage);
  arena.chunks().remove(chunk_at(at));
  EXPECT(starts_with(arena.check(), "span 2: on no chunk"));
}

CHECK(Fixture, span_2_is_named_where_an_unmapped_span_lies_on_a_chunk) {
  arena.chunks().add(kBase, kPage, ChunkHandle{1});
  EXPECT(starts_with(arena.check(), "span 2: unmapped, but on a chunk"));
}

CHECK(Fixture, span_2_is_named_where_a_page_leads_to_a_span_that_is_gone) {
  const Address at = map({kPage});
  arena.finish_unmapped(arena.begin_removing(chunk_at(at)));
  EXPECT(arena.check().empty());
  (arena.*member(PageSpans{}))[0] = arena.first();
  EXPECT(starts_with(arena.check(), "span 2: unmapped, but a page"));
}

CHECK(Fixture, span_3_is_named_where_unmapped_neighbours_are_apart) {
  const SpanId building = arena.begin_building(arena.first(), kPage);
  (arena.*member(Spans{}))[building].state = SpanState::kUnmapped;
  EXPECT(starts_with(arena.check(), "span 3: unmapped"));
}

void pretend_free(Span& used) {
  used.state = SpanState::kFree;
  std::construct_at(&used.free);
}

CHECK(Fixture, span_3_is_named_where_free_neighbours_are_apart) {
  const Address at = map({kPage});
  take(at, 1_MiB);
  pretend_free(span_at(*this, at));
  EXPECT(starts_with(arena.check(), "span 3: free"));
}

// Some that stay apart by right do not excuse others.
CHECK(Fixture, span_3_is_named_beside_extents_of_different_streams) {
  const Address apart = map({kPage});
  take(apart, 1_MiB);
  take(apart + 1_MiB, 1_MiB);
  free(apart, TagSet(Tag{0, 1}));
  free(apart + 1_MiB, TagSet(Tag{1, 1}));
  const Address at = map({kPage});
  take(at, kPage);
  take(map({kPage}), kPage);
  pretend_free(span_at(*this, at));
  pretend_free(span_at(*this, at + kPage));
  EXPECT(starts_with(arena.check(), "span 3: free"));
}

CHECK(Fixture, span_4_is_named_where_a_chunk_has_no_span) {
  map({kPage});
  arena.chunks().add(kBase + kPage * 2, kPage, ChunkHandle{9});
  EXPECT(starts_with(arena.check(), "span 4"));
}

CHECK(Fixture, span_5_is_named_where_free_bytes_are_off) {
  map({kPage});
  arena.*member(FreeBytes{}) -= kBlockUnit;
  EXPECT(starts_with(arena.check(), "span 5: free bytes"));
}

CHECK(Fixture, span_5_is_named_where_an_extent_is_in_no_index) {
  const Address at = map({kPage});
  take(at, kPage);
  pretend_free(span_at(*this, at));
  EXPECT(starts_with(arena.check(), "span 5: extents"));
}

}  // namespace vramx::units::arena_check_claims
