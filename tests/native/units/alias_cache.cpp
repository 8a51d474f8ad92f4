// Second mappings and which of them can serve a block: alias_cache.
//
//   arena   |   chunk a   |   chunk b   |   chunk c   |
//   alias   |   chunk c   |   chunk a   |             elsewhere, in any order
#include "core/alias_cache.h"

#include <vector>

#include "units/units.h"

namespace vramx::units::alias_cache_claims {

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

CHECK(Fixture, a_free_alias_serves_a_block_of_its_size) {
  const AliasId id = add({c, a});
  const AliasFit fit = find(kPage * 2);
  REQUIRE(fit.alias == id && fit.pieces.size() == 2);
  EXPECT(fit.address == kAliasBase);
  EXPECT(fit.pieces[0].begin == begin + kPage * 2 && fit.pieces[0].size == kPage);
  EXPECT(fit.pieces[1].begin == begin && fit.pieces[1].size == kPage);
}

CHECK(Fixture, the_smallest_alias_that_fits_serves) {
  add({a, b, c});
  const AliasId smaller = add({a, c}, kAliasBase + kPage * 8);
  EXPECT(find(kPage + kBlockUnit).alias == smaller);
}

CHECK(Fixture, a_run_may_begin_in_the_free_end_of_a_chunk) {
  add({c, a});
  take(begin + kPage * 2, kBlockUnit);
  const AliasFit fit = find(kPage);
  REQUIRE(fit.alias != kNoId && fit.pieces.size() == 2);
  EXPECT(fit.address == kAliasBase + kBlockUnit);
  EXPECT(fit.pieces[1].size == kBlockUnit);
}

CHECK(Fixture, the_free_end_of_the_last_chunk_serves_alone) {
  add({c, a});
  take(begin + kPage * 2, kPage);
  take(begin, kBlockUnit);
  const AliasFit fit = find(kPage - kBlockUnit);
  REQUIRE(fit.pieces.size() == 1);
  EXPECT(fit.address == kAliasBase + kPage + kBlockUnit);
}

// Whatever is used of it: the search passes over what cannot have a run, and over nothing else.
CHECK(Fixture, a_search_finds_every_run_there_is) {
  const Address at = map({kPage * 2, kPage, kPage * 3, kPage, kPage * 2});
  std::vector<ChunkId> chunks;
  for (const std::uint64_t page : {3, 7, 0, 6, 2}) chunks.push_back(chunk_at(at + kPage * page));
  const AliasId id = add(chunks);
  const Bytes all = cache[id].size;
  std::size_t found = 0;
  std::size_t missed = 0;
  Bytes before{};  // of the alias, in front of the chunk
  for (const ChunkId chunk : chunks) {
    const Chunk in_arena = arena.chunks()[chunk];
    for (Bytes used{}; used < in_arena.size; used += 1_MiB) {
      take(in_arena.begin + used, kBlockUnit);
      const Bytes first_run = before + used;
      const Bytes second_run = all - first_run - kBlockUnit;
      for (Bytes mebibyte = 1_MiB; mebibyte <= all; mebibyte += 1_MiB) {
        for (const Bytes size : {mebibyte - kBlockUnit, mebibyte, mebibyte + kBlockUnit}) {
          Address expected;
          if (second_run >= size) expected = kAliasBase + first_run + kBlockUnit;
          if (first_run >= size) expected = kAliasBase;
          EXPECT(find(size).address == expected);
          ++(expected ? found : missed);
        }
      }
      free(in_arena.begin + used);
    }
    before += in_arena.size;
  }
  EXPECT(found > 0 && missed > 0);
}

CHECK(Fixture, a_used_chunk_between_two_free_ones_parts_them) {
  add({a, b, c});
  take(begin + kPage, kPage);
  EXPECT(find(kPage + kBlockUnit).alias == kNoId);
  EXPECT(find(kPage).address == kAliasBase);
}

CHECK(Fixture, a_fit_that_is_turned_down_is_not_found) {
  add({a, c});
  const auto refuse = [](const std::vector<Piece>&) { return false; };
  EXPECT(cache.find(arena, kPage, refuse).alias == kNoId);
}

// --- pins ----------------------------------------------------------------------------------------

CHECK(Fixture, a_pinned_alias_is_not_idle) {
  const AliasId id = add({a, b});
  cache.pin(id, kPage);
  EXPECT(cache.idle().empty());
  cache.unpin(id, kPage, TagSet());
  EXPECT((cache.idle() == std::vector<AliasId>{id}));
}

// What is pinned is used, wherever it lies: there is no need to look.
CHECK(Fixture, an_alias_with_too_little_unpinned_is_not_found) {
  const AliasId id = add({a, b});
  cache.pin(id, kPage);
  EXPECT(find(kPage + kBlockUnit).alias == kNoId);
  EXPECT(find(kPage).alias == id);
  cache.unpin(id, kPage, TagSet());
  EXPECT(find(kPage + kBlockUnit).alias == id);
}

CHECK(Fixture, idle_aliases_come_least_recently_used_first) {
  const AliasId first = add({a});
  const AliasId second = add({b});
  for (const AliasId id : {first, second, first}) {
    cache.pin(id, kPage);
    cache.unpin(id, kPage, TagSet());
  }
  EXPECT((cache.idle() == std::vector<AliasId>{second, first}));
}

CHECK(Fixture, an_alias_remembers_what_its_blocks_waited_for) {
  const AliasId id = add({a});
  cache.pin(id, kPage);
  cache.unpin(id, kPage, TagSet(Tag{3, 9}));
  const TagSet& tags = cache[id].last_tags;
  EXPECT((tags.size() == 1 && tags[0] == Tag{3, 9}));
}

// --- add and remove ------------------------------------------------------------------------------

CHECK(Fixture, an_alias_is_counted_at_each_of_its_chunks) {
  add({a, b});
  add({a});
  EXPECT(arena.chunks()[a].alias_count == 2);
  EXPECT(arena.chunks()[b].alias_count == 1);
  EXPECT(cache.count() == 2 && cache.mappings() == 3);
  EXPECT(cache.bytes() == kPage * 3);
  EXPECT(cache.check(arena).empty());
}

CHECK(Fixture, a_removed_alias_leaves_nothing_behind) {
  cache.remove(add({a, b}), arena);
  EXPECT(cache.count() == 0 && cache.mappings() == 0);
  EXPECT(!cache.bytes());
  EXPECT(arena.chunks()[a].alias_count == 0);
  EXPECT(find(kPage).alias == kNoId);
  EXPECT(cache.check(arena).empty());
}

CHECK(Fixture, removal_finds_its_alias_among_those_of_one_size) {
  add({a});
  const AliasId middle = add({b});
  add({c});
  cache.remove(middle, arena);
  EXPECT(arena.chunks()[a].alias_count == 1);
  EXPECT(arena.chunks()[b].alias_count == 0);
  EXPECT(cache.check(arena).empty());
}

// --- planted defects -----------------------------------------------------------------------------

CHECK(Fixture, alias_1_is_named_where_a_chunk_is_mapped_twice) {
  add({a, a});
  EXPECT(cache.check(arena) == "alias 1: alias 0 maps a chunk twice");
}

CHECK(Fixture, alias_1_is_named_where_a_chunk_is_gone) {
  add({a});
  arena.chunks().remove(a);
  EXPECT(cache.check(arena) == "alias 1: alias 0 maps a chunk that is gone");
}

CHECK(Fixture, alias_2_is_named_where_a_chunks_count_is_off) {
  add({a});
  ++arena.chunks()[a].alias_count;
  EXPECT(starts_with(cache.check(arena), "alias 2"));
}

}  // namespace vramx::units::alias_cache_claims
