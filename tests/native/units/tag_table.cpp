// The table of tags: what extents wait for, and which of them are alike.
#include "core/tag_table.h"

#include "units/units.h"

namespace vramx::units::tag_table_claims {

struct Fixture {
  TagTable table;

  FreeSpan made_with(const TagSet& tags) {
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

CHECK(Fixture, an_extent_gets_back_what_it_was_given) {
  for (const TagSet& tags : {TagSet(), TagSet(Tag{3, 7}), of_two_streams(1, 2)}) {
    const FreeSpan extent = made_with(tags);
    const TagSet got = table.get(extent);
    REQUIRE(got.size() == tags.size());
    for (std::size_t i = 0; i < tags.size(); ++i) EXPECT(got[i] == tags[i]);
  }
}

CHECK(Fixture, with_one_stream_what_is_over_is_like_what_is_not) {
  const FreeSpan over = made_with(TagSet());
  const FreeSpan waiting = made_with(TagSet(Tag{0, 40}));
  EXPECT(table.are_alike(over, waiting));
  table.note_several();
  EXPECT(!table.are_alike(over, waiting));
}

// Also before the streams are told apart.
CHECK(Fixture, two_streams_are_never_alike) {
  const FreeSpan first = made_with(TagSet(Tag{0, 1}));
  const FreeSpan second = made_with(TagSet(Tag{1, 1}));
  EXPECT(!table.are_alike(first, second));
  table.note_several();
  EXPECT(!table.are_alike(first, second));
}

CHECK(Fixture, a_part_has_a_set_of_its_own) {
  FreeSpan whole = made_with(of_two_streams(1, 2));
  FreeSpan part;
  table.copy(part, Tag{}, whole.tag_set);
  table.clear(whole);
  EXPECT(table.get(whole).empty());
  EXPECT(table.get(part).size() == 2);
}

CHECK(Fixture, sets_that_are_gone_are_used_again) {
  for (int i = 0; i < 8; ++i) {
    FreeSpan extent = made_with(of_two_streams(1, 2));
    table.clear(extent);
  }
  FreeSpan kept = made_with(of_two_streams(1, 2));
  const FreeSpan gone = made_with(of_two_streams(1, 2));
  EXPECT(kept.tag_set != gone.tag_set && kept.tag_set < 2 && gone.tag_set < 2);
  table.unite(kept, gone);
  EXPECT(made_with(of_two_streams(9, 9)).tag_set == gone.tag_set);
  EXPECT(table.get(kept)[0] == (Tag{0, 1}) && table.get(kept)[1] == (Tag{1, 2}));
}

}  // namespace vramx::units::tag_table_claims
