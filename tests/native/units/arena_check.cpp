// The arena's invariants, span 1-5 of core/types.h: each is broken on purpose and must be named.
//
// Where no public call can break one, the check reaches for the member behind it.
#include "core/arena.h"
#include "units/units.h"

namespace vramx::units {

struct FreeBytes {
  friend auto member(FreeBytes);
};
struct Spans {
  friend auto member(Spans);
};
struct PageSpans {
  friend auto member(PageSpans);
};
template struct Reveal<FreeBytes, &Arena::free_bytes_>;
template struct Reveal<Spans, &Arena::spans_>;
template struct Reveal<PageSpans, &Arena::page_spans_>;

namespace arena_check_claims {
namespace {

using Fixture = ArenaFixture;

Span& span_at(Fixture& fixture, Address address) {
  return (fixture.arena.*member(Spans{}))[fixture.arena.span_at(address)];
}

void span_1_is_named_where_a_span_begins_elsewhere(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  fixture.take(at, 1_MiB);
  span_at(fixture, at + 1_MiB).begin = at + 1_MiB + kBlockUnit;
  EXPECT(starts_with(fixture.arena.check(), "span 1"));
}

void span_1_is_named_where_the_last_span_ends_early(Fixture& fixture) {
  (fixture.arena.*member(Spans{}))[fixture.arena.first()].size = kPage;
  EXPECT(starts_with(fixture.arena.check(), "span 1: the last span"));
}

void span_1_is_named_where_a_span_is_in_no_list(Fixture& fixture) {
  (fixture.arena.*member(Spans{})).create();
  EXPECT(starts_with(fixture.arena.check(), "span 1: a span is in no list"));
}

void span_2_is_named_where_a_page_names_the_wrong_span(Fixture& fixture) {
  const Address at = fixture.map({kPage, kPage});
  fixture.take(at, kPage);
  (fixture.arena.*member(PageSpans{}))[0] = fixture.arena.span_at(at + kPage);
  EXPECT(starts_with(fixture.arena.check(), "span 2: not found"));
}

void span_2_is_named_where_a_spans_chunk_is_gone(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  fixture.take(at, kPage);
  fixture.arena.chunks().remove(fixture.chunk_at(at));
  EXPECT(starts_with(fixture.arena.check(), "span 2: on no chunk"));
}

void span_2_is_named_where_an_unmapped_span_lies_on_a_chunk(Fixture& fixture) {
  fixture.arena.chunks().add(kBase, kPage, ChunkHandle{1});
  EXPECT(starts_with(fixture.arena.check(), "span 2: unmapped, but on a chunk"));
}

void span_2_is_named_where_a_page_leads_to_a_span_that_is_gone(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  fixture.arena.finish_unmapped(fixture.arena.begin_removing(fixture.chunk_at(at)));
  EXPECT(fixture.arena.check().empty());
  (fixture.arena.*member(PageSpans{}))[0] = fixture.arena.first();
  EXPECT(starts_with(fixture.arena.check(), "span 2: unmapped, but a page"));
}

void span_3_is_named_where_unmapped_neighbours_are_apart(Fixture& fixture) {
  const SpanId building = fixture.arena.begin_building(fixture.arena.first(), kPage);
  (fixture.arena.*member(Spans{}))[building].state = SpanState::kUnmapped;
  EXPECT(starts_with(fixture.arena.check(), "span 3: unmapped"));
}

void pretend_free(Span& used) {
  used.state = SpanState::kFree;
  std::construct_at(&used.free);
}

void span_3_is_named_where_free_neighbours_are_apart(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  fixture.take(at, 1_MiB);
  pretend_free(span_at(fixture, at));
  EXPECT(starts_with(fixture.arena.check(), "span 3: free"));
}

// Some that stay apart by right do not excuse others.
void span_3_is_named_beside_extents_of_different_streams(Fixture& fixture) {
  const Address apart = fixture.map({kPage});
  fixture.take(apart, 1_MiB);
  fixture.take(apart + 1_MiB, 1_MiB);
  fixture.free(apart, TagSet(Tag{0, 1}));
  fixture.free(apart + 1_MiB, TagSet(Tag{1, 1}));
  const Address at = fixture.map({kPage});
  fixture.take(at, kPage);
  fixture.take(fixture.map({kPage}), kPage);
  pretend_free(span_at(fixture, at));
  pretend_free(span_at(fixture, at + kPage));
  EXPECT(starts_with(fixture.arena.check(), "span 3: free"));
}

void span_4_is_named_where_a_chunk_has_no_span(Fixture& fixture) {
  fixture.map({kPage});
  fixture.arena.chunks().add(kBase + kPage * 2, kPage, ChunkHandle{9});
  EXPECT(starts_with(fixture.arena.check(), "span 4"));
}

void span_5_is_named_where_free_bytes_are_off(Fixture& fixture) {
  fixture.map({kPage});
  fixture.arena.*member(FreeBytes{}) -= kBlockUnit;
  EXPECT(starts_with(fixture.arena.check(), "span 5: free bytes"));
}

void span_5_is_named_where_an_extent_is_in_no_index(Fixture& fixture) {
  const Address at = fixture.map({kPage});
  fixture.take(at, kPage);
  pretend_free(span_at(fixture, at));
  EXPECT(starts_with(fixture.arena.check(), "span 5: extents"));
}

constexpr Check<Fixture> kChecks[] = {
    {"span 1 is named where a span begins elsewhere",
     span_1_is_named_where_a_span_begins_elsewhere},
    {"span 1 is named where the last span ends early",
     span_1_is_named_where_the_last_span_ends_early},
    {"span 1 is named where a span is in no list", span_1_is_named_where_a_span_is_in_no_list},
    {"span 2 is named where a page names the wrong span",
     span_2_is_named_where_a_page_names_the_wrong_span},
    {"span 2 is named where a span's chunk is gone", span_2_is_named_where_a_spans_chunk_is_gone},
    {"span 2 is named where an unmapped span lies on a chunk",
     span_2_is_named_where_an_unmapped_span_lies_on_a_chunk},
    {"span 2 is named where a page leads to a span that is gone",
     span_2_is_named_where_a_page_leads_to_a_span_that_is_gone},
    {"span 3 is named where unmapped neighbours are apart",
     span_3_is_named_where_unmapped_neighbours_are_apart},
    {"span 3 is named where free neighbours are apart",
     span_3_is_named_where_free_neighbours_are_apart},
    {"span 3 is named beside extents of different streams",
     span_3_is_named_beside_extents_of_different_streams},
    {"span 4 is named where a chunk has no span", span_4_is_named_where_a_chunk_has_no_span},
    {"span 5 is named where free bytes are off", span_5_is_named_where_free_bytes_are_off},
    {"span 5 is named where an extent is in no index",
     span_5_is_named_where_an_extent_is_in_no_index},
};

}  // namespace
}  // namespace arena_check_claims

void check_arena_invariants() { run_checks("arena invariants", arena_check_claims::kChecks); }

}  // namespace vramx::units
