// Second mappings and which of them can serve a block: alias_cache.
//
//   arena   |   chunk a   |   chunk b   |   chunk c   |
//   alias   |   chunk c   |   chunk a   |             elsewhere, in any order
#include "core/alias_cache.h"

#include <vector>

#include "units/units.h"

namespace vramx::units {
namespace alias_cache_claims {
namespace {

constexpr Address kAliasBase{1ull << 44};

// Three chunks of one page each, all free, and an empty cache.
struct Fixture : ArenaFixture {
  AliasCache cache;
  Address begin = map({kPage, kPage, kPage});
  ChunkId a = chunk_at(begin);
  ChunkId b = chunk_at(begin + kPage);
  ChunkId c = chunk_at(begin + kPage * 2);

  AliasId add(std::vector<ChunkId> chunks, Address base = kAliasBase) {
    return cache.add(base, std::move(chunks), arena);
  }
  AliasFit find(Bytes size) const {
    return cache.find(arena, size, [](const std::vector<Piece>&) { return true; });
  }
};

// --- find ----------------------------------------------------------------------------------------

void a_free_alias_serves_a_block_of_its_size(Fixture& fixture) {
  const AliasId id = fixture.add({fixture.c, fixture.a});
  const AliasFit fit = fixture.find(kPage * 2);
  REQUIRE(fit.alias == id && fit.pieces.size() == 2);
  EXPECT(fit.address == kAliasBase);
  EXPECT(fit.pieces[0].begin == fixture.begin + kPage * 2 && fit.pieces[0].size == kPage);
  EXPECT(fit.pieces[1].begin == fixture.begin && fit.pieces[1].size == kPage);
}

void the_smallest_alias_that_fits_serves(Fixture& fixture) {
  fixture.add({fixture.a, fixture.b, fixture.c});
  const AliasId smaller = fixture.add({fixture.a, fixture.c}, kAliasBase + kPage * 8);
  EXPECT(fixture.find(kPage + kBlockUnit).alias == smaller);
}

void a_used_byte_ends_a_run(Fixture& fixture) {
  fixture.add({fixture.c, fixture.a});
  fixture.take(fixture.begin + kPage - kBlockUnit, kBlockUnit);
  EXPECT(fixture.find(kPage * 2).alias == kNoId);
  EXPECT(fixture.find(kPage * 2 - kBlockUnit).alias != kNoId);
}

void a_run_may_begin_in_the_free_end_of_a_chunk(Fixture& fixture) {
  fixture.add({fixture.c, fixture.a});
  fixture.take(fixture.begin + kPage * 2, kBlockUnit);
  const AliasFit fit = fixture.find(kPage);
  REQUIRE(fit.alias != kNoId && fit.pieces.size() == 2);
  EXPECT(fit.address == kAliasBase + kBlockUnit);
  EXPECT(fit.pieces[1].size == kBlockUnit);
}

void the_free_end_of_the_last_chunk_serves_alone(Fixture& fixture) {
  fixture.add({fixture.c, fixture.a});
  fixture.take(fixture.begin + kPage * 2, kPage);
  fixture.take(fixture.begin, kBlockUnit);
  const AliasFit fit = fixture.find(kPage - kBlockUnit);
  REQUIRE(fit.pieces.size() == 1);
  EXPECT(fit.address == kAliasBase + kPage + kBlockUnit);
}

// Whatever is used of it: the search passes over what cannot have a run, and over nothing else.
void a_search_finds_every_run_there_is(Fixture& fixture) {
  const Address at = fixture.map({kPage * 2, kPage, kPage * 3, kPage, kPage * 2});
  std::vector<ChunkId> chunks;
  for (const std::uint64_t page : {3, 7, 0, 6, 2})
    chunks.push_back(fixture.chunk_at(at + kPage * page));
  const AliasId id = fixture.add(chunks);
  const Bytes all = fixture.cache[id].size;
  std::size_t found = 0;
  std::size_t missed = 0;
  Bytes before{};  // of the alias, in front of the chunk
  for (const ChunkId chunk : chunks) {
    const Chunk in_arena = fixture.arena.chunks()[chunk];
    for (Bytes used{}; used < in_arena.size; used += 1_MiB) {
      fixture.take(in_arena.begin + used, kBlockUnit);
      const Bytes first_run = before + used;
      const Bytes second_run = all - first_run - kBlockUnit;
      for (Bytes size = 1_MiB; size <= all; size += 1_MiB) {
        Address expected;
        if (second_run >= size) expected = kAliasBase + first_run + kBlockUnit;
        if (first_run >= size) expected = kAliasBase;
        EXPECT(fixture.find(size).address == expected);
        ++(expected ? found : missed);
      }
      fixture.free(in_arena.begin + used);
    }
    before += in_arena.size;
  }
  EXPECT(found > 0 && missed > 0);
}

void a_used_chunk_between_two_free_ones_parts_them(Fixture& fixture) {
  fixture.add({fixture.a, fixture.b, fixture.c});
  fixture.take(fixture.begin + kPage, kPage);
  EXPECT(fixture.find(kPage + kBlockUnit).alias == kNoId);
  EXPECT(fixture.find(kPage).address == kAliasBase);
}

void a_fit_that_is_turned_down_is_not_found(Fixture& fixture) {
  fixture.add({fixture.a, fixture.c});
  const auto refuse = [](const std::vector<Piece>&) { return false; };
  EXPECT(fixture.cache.find(fixture.arena, kPage, refuse).alias == kNoId);
}

void an_alias_smaller_than_the_block_is_not_found(Fixture& fixture) {
  fixture.add({fixture.a});
  EXPECT(fixture.find(kPage + kBlockUnit).alias == kNoId);
}

// --- pins ----------------------------------------------------------------------------------------

void a_pinned_alias_is_not_idle(Fixture& fixture) {
  const AliasId id = fixture.add({fixture.a, fixture.b});
  fixture.cache.pin(id, kPage);
  EXPECT(fixture.cache.idle().empty());
  fixture.cache.unpin(id, kPage, TagSet());
  EXPECT((fixture.cache.idle() == std::vector<AliasId>{id}));
}

// What is pinned is used, wherever it lies: there is no need to look.
void an_alias_with_too_little_unpinned_is_not_found(Fixture& fixture) {
  const AliasId id = fixture.add({fixture.a, fixture.b});
  fixture.cache.pin(id, kPage);
  EXPECT(fixture.find(kPage + kBlockUnit).alias == kNoId);
  EXPECT(fixture.find(kPage).alias == id);
  fixture.cache.unpin(id, kPage, TagSet());
  EXPECT(fixture.find(kPage + kBlockUnit).alias == id);
}

void idle_aliases_come_least_recently_used_first(Fixture& fixture) {
  const AliasId first = fixture.add({fixture.a});
  const AliasId second = fixture.add({fixture.b});
  for (const AliasId id : {first, second, first}) {
    fixture.cache.pin(id, kPage);
    fixture.cache.unpin(id, kPage, TagSet());
  }
  EXPECT((fixture.cache.idle() == std::vector<AliasId>{second, first}));
}

void an_alias_remembers_what_its_blocks_waited_for(Fixture& fixture) {
  const AliasId id = fixture.add({fixture.a});
  fixture.cache.pin(id, kPage);
  fixture.cache.unpin(id, kPage, TagSet(Tag{3, 9}));
  const TagSet& tags = fixture.cache[id].last_tags;
  EXPECT((tags.size() == 1 && tags[0] == Tag{3, 9}));
}

// --- add and remove ------------------------------------------------------------------------------

void an_alias_is_counted_at_each_of_its_chunks(Fixture& fixture) {
  fixture.add({fixture.a, fixture.b});
  fixture.add({fixture.a});
  EXPECT(fixture.arena.chunks()[fixture.a].alias_count == 2);
  EXPECT(fixture.arena.chunks()[fixture.b].alias_count == 1);
  EXPECT(fixture.cache.count() == 2 && fixture.cache.mappings() == 3);
  EXPECT(fixture.cache.bytes() == kPage * 3);
  EXPECT(fixture.cache.check(fixture.arena).empty());
}

void a_removed_alias_leaves_nothing_behind(Fixture& fixture) {
  fixture.cache.remove(fixture.add({fixture.a, fixture.b}), fixture.arena);
  EXPECT(fixture.cache.count() == 0 && fixture.cache.mappings() == 0);
  EXPECT(!fixture.cache.bytes());
  EXPECT(fixture.arena.chunks()[fixture.a].alias_count == 0);
  EXPECT(fixture.find(kPage).alias == kNoId);
  EXPECT(fixture.cache.check(fixture.arena).empty());
}

void removal_finds_its_alias_among_those_of_one_size(Fixture& fixture) {
  fixture.add({fixture.a});
  const AliasId middle = fixture.add({fixture.b});
  fixture.add({fixture.c});
  fixture.cache.remove(middle, fixture.arena);
  EXPECT(fixture.arena.chunks()[fixture.a].alias_count == 1);
  EXPECT(fixture.arena.chunks()[fixture.b].alias_count == 0);
  EXPECT(fixture.cache.check(fixture.arena).empty());
}

// --- planted defects -----------------------------------------------------------------------------

void alias_1_is_named_where_a_chunk_is_mapped_twice(Fixture& fixture) {
  fixture.add({fixture.a, fixture.a});
  EXPECT(fixture.cache.check(fixture.arena) == "alias 1: alias 0 maps a chunk twice");
}

void alias_1_is_named_where_a_chunk_is_gone(Fixture& fixture) {
  fixture.add({fixture.a});
  fixture.arena.chunks().remove(fixture.a);
  EXPECT(fixture.cache.check(fixture.arena) == "alias 1: alias 0 maps a chunk that is gone");
}

void alias_2_is_named_where_a_chunks_count_is_off(Fixture& fixture) {
  fixture.add({fixture.a});
  ++fixture.arena.chunks()[fixture.a].alias_count;
  EXPECT(starts_with(fixture.cache.check(fixture.arena), "alias 2"));
}

constexpr Check<Fixture> kChecks[] = {
    {"a free alias serves a block of its size", a_free_alias_serves_a_block_of_its_size},
    {"the smallest alias that fits serves", the_smallest_alias_that_fits_serves},
    {"a used byte ends a run", a_used_byte_ends_a_run},
    {"a run may begin in the free end of a chunk", a_run_may_begin_in_the_free_end_of_a_chunk},
    {"the free end of the last chunk serves alone", the_free_end_of_the_last_chunk_serves_alone},
    {"a search finds every run there is", a_search_finds_every_run_there_is},
    {"a used chunk between two free ones parts them",
     a_used_chunk_between_two_free_ones_parts_them},
    {"a fit that is turned down is not found", a_fit_that_is_turned_down_is_not_found},
    {"an alias smaller than the block is not found", an_alias_smaller_than_the_block_is_not_found},
    {"a pinned alias is not idle", a_pinned_alias_is_not_idle},
    {"an alias with too little unpinned is not found",
     an_alias_with_too_little_unpinned_is_not_found},
    {"idle aliases come least recently used first", idle_aliases_come_least_recently_used_first},
    {"an alias remembers what its blocks waited for",
     an_alias_remembers_what_its_blocks_waited_for},
    {"an alias is counted at each of its chunks", an_alias_is_counted_at_each_of_its_chunks},
    {"a removed alias leaves nothing behind", a_removed_alias_leaves_nothing_behind},
    {"removal finds its alias among those of one size",
     removal_finds_its_alias_among_those_of_one_size},
    {"alias 1 is named where a chunk is mapped twice",
     alias_1_is_named_where_a_chunk_is_mapped_twice},
    {"alias 1 is named where a chunk is gone", alias_1_is_named_where_a_chunk_is_gone},
    {"alias 2 is named where a chunk's count is off", alias_2_is_named_where_a_chunks_count_is_off},
};

}  // namespace
}  // namespace alias_cache_claims

void check_alias_cache() { run_checks("alias cache", alias_cache_claims::kChecks); }

}  // namespace vramx::units
