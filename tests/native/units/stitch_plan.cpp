// From which extents a stitched block is put together: plan_stitch.
//
//   page      0        1        2        3        4        5
//   chunks  |   0    |   1    |   2    |   3    |   4    |   5    |
#include "core/stitch_plan.h"

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "units/units.h"

namespace vramx::units::stitch_plan_claims {

struct Planner {
  ChunkTable chunks{kBase, kPage};

  Planner() {
    for (std::uint64_t i = 0; i < 64; ++i) chunks.add(page(i), kPage, ChunkHandle{i + 1});
  }
  // Where the n-th page begins, `into` bytes in.
  static Address page(std::uint64_t n, Bytes into = {}) { return kBase + kPage * n + into; }
  StitchPlan stitch(const std::vector<Piece>& extents, Bytes size) const {
    return plan_stitch(extents, chunks, size);
  }
};

Bytes total(const StitchPlan& plan) {
  Bytes sum{};
  for (const Piece& piece : plan.pieces) sum += piece.size;
  return sum;
}

CHECK(Planner, whole_chunks_come_from_the_largest_extents) {
  const StitchPlan plan =
      stitch({{page(0), kPage * 4}, {page(8), kPage * 2}, {page(16), kPage}}, kPage * 6);
  REQUIRE(plan.pieces.size() == 2 && !plan.missing);
  EXPECT(plan.pieces[0].begin == page(0) && plan.pieces[0].size == kPage * 4);
  EXPECT(plan.pieces[1].begin == page(8) && plan.pieces[1].size == kPage * 2);
}

CHECK(Planner, the_smallest_extent_that_can_finish_ends_the_block) {
  const StitchPlan plan =
      stitch({{page(0), kPage * 4}, {page(8), kPage * 3}, {page(16), kPage}}, kPage * 5);
  REQUIRE(plan.pieces.size() == 2);
  EXPECT(plan.pieces[1].begin == page(16));
}

CHECK(Planner, the_block_begins_with_the_largest_head) {
  const StitchPlan plan = stitch({{page(0), kPage * 4},
                                  {page(8, 512_KiB), kPage * 2 - 512_KiB},
                                  {page(16, 1_MiB), kPage * 2 - 1_MiB}},
                                 kPage * 5);
  REQUIRE(!plan.pieces.empty());
  EXPECT(plan.pieces[0].begin == page(8, 512_KiB));
}

CHECK(Planner, the_block_may_end_in_the_middle_of_a_chunk) {
  const StitchPlan plan = stitch({{page(0), kPage * 2}, {page(8), kPage}}, kPage * 2 + kBlockUnit);
  REQUIRE(plan.pieces.size() == 2);
  EXPECT(plan.pieces[1].size == kBlockUnit);
}

CHECK(Planner, an_extent_inside_one_chunk_serves_no_middle) {
  const StitchPlan plan = stitch({{page(0), kPage}, {page(4, 64_KiB), 512_KiB}}, kPage * 2);
  EXPECT(total(plan) == kPage);
  EXPECT(plan.missing == kPage);
}

CHECK(Planner, what_no_extent_can_give_is_missing) {
  const StitchPlan plan = stitch({{page(0), kPage}}, kPage * 3);
  EXPECT(plan.missing == kPage * 2);
  EXPECT(!plan.ends_in_tail);
  EXPECT(stitch({}, kPage).missing == kPage);
}

CHECK(Planner, a_tail_is_kept_for_the_end_where_that_saves_growth) {
  const StitchPlan plan = stitch({{page(0), kPage * 2 + 1_MiB}, {page(8), kPage * 2}}, kPage * 6);
  EXPECT(plan.ends_in_tail);
  EXPECT(plan.missing == kPage * 2 - 1_MiB);
  REQUIRE(!plan.pieces.empty());
  EXPECT(plan.pieces.back().begin == page(0));
}

// --- any extents ---------------------------------------------------------------------------------

// Random extents that do not touch, largest first.
std::vector<Piece> random_extents(std::mt19937_64& random) {
  std::vector<Piece> extents;
  for (Address at = kBase; at + kPage * 6 < kBase + kPage * 64;) {
    at = at + kBlockUnit * (1 + random() % 3000);
    const Bytes size = kBlockUnit * (128 + random() % 9000);
    extents.push_back({at, size});
    at = at + size;
  }
  std::sort(extents.begin(), extents.end(), [](const Piece& a, const Piece& b) {
    return a.size != b.size ? a.size > b.size : a.begin < b.begin;
  });
  return extents;
}

bool lies_in_one(const Piece& piece, const std::vector<Piece>& extents) {
  return std::any_of(extents.begin(), extents.end(), [&](const Piece& extent) {
    return piece.begin >= extent.begin && piece.end() <= extent.end();
  });
}

// The chunks under all pieces, in order; a chunk that two pieces share appears twice.
std::vector<ChunkId> chunks_under(const StitchPlan& plan, const ChunkTable& chunks) {
  std::vector<ChunkId> ids;
  for (const Piece& piece : plan.pieces) {
    for (Address at = piece.begin; at < piece.end(); at = chunks[ids.back()].end()) {
      ids.push_back(chunks.at(at));
    }
  }
  return ids;
}

// Whether the pieces make one range of an alias: each ends, and the next begins, on a boundary.
bool is_contiguous(const StitchPlan& plan, const ChunkTable& chunks) {
  for (std::size_t i = 1; i < plan.pieces.size(); ++i) {
    const Address end = plan.pieces[i - 1].end();
    const Address begin = plan.pieces[i].begin;
    if (chunks.round_up(end) != end || chunks.round_up(begin) != begin) return false;
  }
  return true;
}

// Chunk 3 has a free start, the tail of an extent, and a free end, the largest head.
CHECK(Planner, no_chunk_is_both_first_and_last) {
  const Bytes size = 1_MiB + kPage + 256_KiB;
  const StitchPlan plan = stitch({{page(2), kPage + 512_KiB}, {page(3, 1_MiB), 1_MiB}}, size);
  REQUIRE(!plan.pieces.empty() && plan.pieces[0].begin == page(3, 1_MiB));
  const std::vector<ChunkId> ids = chunks_under(plan, chunks);
  EXPECT(std::set<ChunkId>(ids.begin(), ids.end()).size() == ids.size());
  EXPECT(total(plan) + plan.missing == size);
}

CHECK(Planner, any_plan_can_be_mapped) {
  std::mt19937_64 random(99);
  for (int round = 0; round < 2000; ++round) {
    const std::vector<Piece> extents = random_extents(random);
    const Bytes size = kBlockUnit * (4096 + random() % 200000);
    const StitchPlan plan = stitch(extents, size);
    REQUIRE(total(plan) + plan.missing == size);
    for (const Piece& piece : plan.pieces) REQUIRE(piece.size && lies_in_one(piece, extents));
    const std::vector<ChunkId> ids = chunks_under(plan, chunks);
    REQUIRE(std::set<ChunkId>(ids.begin(), ids.end()).size() == ids.size());
    REQUIRE(is_contiguous(plan, chunks));
  }
}

}  // namespace vramx::units::stitch_plan_claims
