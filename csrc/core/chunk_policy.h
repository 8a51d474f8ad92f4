// How large the chunks of a growth are. A pure function of what is asked and what is held.
//
// The driver charges for each mapping and not for its bytes, so chunks should be large; but a chunk
// is only stitched when all of it is free, so they should be small beside the memory and the
// requests that they serve. A share of what is held keeps the first in proportion, a share of the
// request the second. A program whose sizes never come again maps its chunks over and over: the
// more often on average, the larger new ones are. And the nearer the limit, the finer: there a few
// mebibytes decide whether a program runs, and time is the lesser worry. Growth is divided evenly:
// a large chunk with a small rest behind it would cost one mapping more and gain nothing.
#pragma once

#include <vector>

#include "core/units.h"

namespace vramx {

// What the chunks are for. Their sizes add up to `bytes`; each is a multiple of the granularity.
struct ChunkDemand {
  Bytes bytes;                     // of growth, a multiple of the granularity
  Bytes request;                   // that it is for
  Bytes held;                      // before it
  Bytes room{UINT64_MAX};          // what may still be held, this growth included
  std::uint64_t mapped_again = 0;  // how often a chunk was stitched so far, on average
};
std::vector<Bytes> chunk_sizes(const ChunkDemand& demand, Bytes granularity);

}  // namespace vramx
