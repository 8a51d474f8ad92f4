// How large the chunks of a growth are. A pure function of what is asked and what is held.
//
// The driver charges for each mapping and not for its bytes, so chunks should be large; but a chunk
// is only stitched when all of it is free, so they should be small beside the memory that they
// serve. A 512th of what is held keeps both in proportion: a few thousand mappings at any size.
// Growth is divided evenly: a large chunk with a small rest behind it would cost one mapping more
// and gain nothing.
#pragma once

#include <vector>

#include "core/units.h"

namespace vramx {

// Sizes that add up to `growth`, which is a multiple of `granularity`; each is one too.
struct Growth {
  Bytes bytes;    // a multiple of the granularity
  Bytes request;  // that it is for
  Bytes held;     // before it
};
std::vector<Bytes> chunk_sizes(const Growth& growth, Bytes granularity);

}  // namespace vramx
