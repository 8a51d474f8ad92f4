// Decides from which extents a stitched block is put together. A pure function: no state.
//
// An alias maps whole chunks, so a block in it can only be
//
//   [the end of an extent, from mid-chunk] [whole chunks] ... [the start of an extent, to
//   mid-chunk]
//                first                          middle                       last
//
// and of each extent between first and last, its *head* (before its first chunk boundary) and
// *tail* (after its last) stay behind. So the first piece comes from the extent with the largest
// head, the middle from the extents with the most whole chunks, which means the fewest pieces, and
// the last from the smallest extent that can finish. Each piece
// costs a look at every extent at most, and most cost none.
#pragma once

#include <cstddef>
#include <vector>

#include "core/chunk_table.h"
#include "core/types.h"

namespace vramx {

struct StitchPlan {
  std::vector<Piece> pieces;  // in the order of the block
  // What no extent could give: new chunks have to. Then they come before the last piece if it is a
  // tail, which ends mid-chunk, and otherwise at the end.
  Bytes missing{};
  bool ends_in_tail = false;
};

// The extents are given as ranges, largest first; they are mapped and do not touch each other.
StitchPlan plan_stitch(const std::vector<Piece>& extents, const ChunkTable& chunks, Bytes size);

}  // namespace vramx
