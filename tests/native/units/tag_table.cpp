// The table of tags: what extents wait for, and which of them are alike.
#include "core/tag_table.h"

#include "units/units.h"

namespace vramx::units {
namespace tag_table_claims {
namespace {

struct Fixture {
  TagTable table;

  FreeSpan extent(const TagSet& tags) {
    FreeSpan made;
    table.set(made, tags);
    return made;
  }
};

TagSet of_two_streams(std::uint64_t first, std::uint64_t second) {
  TagSet tags(Tag{0, first});
  tags.add(Tag{1, second});
  return tags;
}

void an_extent_gets_back_what_it_was_given(Fixture& fixture) {
  for (const TagSet& tags : {TagSet(), TagSet(Tag{3, 7}), of_two_streams(1, 2)}) {
    const FreeSpan extent = fixture.extent(tags);
    const TagSet got = fixture.table.get(extent);
    REQUIRE(got.size() == tags.size());
    for (std::size_t i = 0; i < tags.size(); ++i) EXPECT(got[i] == tags[i]);
  }
}

void with_one_stream_what_is_over_is_like_what_is_not(Fixture& fixture) {
  const FreeSpan over = fixture.extent(TagSet());
  const FreeSpan waiting = fixture.extent(TagSet(Tag{0, 40}));
  EXPECT(fixture.table.are_alike(over, waiting));
  fixture.table.note_several();
  EXPECT(!fixture.table.are_alike(over, waiting));
}

// Also before the streams are told apart.
void two_streams_are_never_alike(Fixture& fixture) {
  const FreeSpan first = fixture.extent(TagSet(Tag{0, 1}));
  const FreeSpan second = fixture.extent(TagSet(Tag{1, 1}));
  EXPECT(!fixture.table.are_alike(first, second));
  fixture.table.note_several();
  EXPECT(!fixture.table.are_alike(first, second));
}

void a_part_has_a_set_of_its_own(Fixture& fixture) {
  FreeSpan whole = fixture.extent(of_two_streams(1, 2));
  FreeSpan part;
  fixture.table.copy(part, Tag{}, whole.tag_set);
  fixture.table.clear(whole);
  EXPECT(fixture.table.get(whole).empty());
  EXPECT(fixture.table.get(part).size() == 2);
}

void sets_that_are_gone_are_used_again(Fixture& fixture) {
  for (int i = 0; i < 8; ++i) {
    FreeSpan extent = fixture.extent(of_two_streams(1, 2));
    fixture.table.clear(extent);
  }
  FreeSpan kept = fixture.extent(of_two_streams(1, 2));
  const FreeSpan gone = fixture.extent(of_two_streams(1, 2));
  EXPECT(kept.tag_set != gone.tag_set && kept.tag_set < 2 && gone.tag_set < 2);
  fixture.table.unite(kept, gone);
  EXPECT(fixture.extent(of_two_streams(9, 9)).tag_set == gone.tag_set);
  EXPECT(fixture.table.get(kept)[0] == (Tag{0, 1}) && fixture.table.get(kept)[1] == (Tag{1, 2}));
}

constexpr Check<Fixture> kChecks[] = {
    {"an extent gets back what it was given", an_extent_gets_back_what_it_was_given},
    {"with one stream what is over is like what is not",
     with_one_stream_what_is_over_is_like_what_is_not},
    {"two streams are never alike", two_streams_are_never_alike},
    {"a part has a set of its own", a_part_has_a_set_of_its_own},
    {"sets that are gone are used again", sets_that_are_gone_are_used_again},
};

}  // namespace
}  // namespace tag_table_claims

void check_tag_table() { run_checks("tag table", tag_table_claims::kChecks); }

}  // namespace vramx::units
