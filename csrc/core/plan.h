// A request on the slow path, and the plan for it: everything that is done about it, decided before
// anything is done.
//
// Plain values. The planner makes plans, the executor carries them out.
#pragma once

#include <vector>

#include "core/stream_order.h"
#include "core/types.h"

namespace vramx {

// What memory a request may have: what was allocated on its stream alone, all that it need not wait
// for, or all that it can be made to wait for. What it uses is over first, of the first two.
enum class Reach : std::uint8_t { kOwn, kAtOnce, kBehindWaits };

struct Request {
  Bytes size;
  StreamIndex stream = kNoId;
  Reach reach = Reach::kAtOnce;
  // What has failed for this request is not tried again: it grows by no more than this.
  Bytes most_growth{UINT64_MAX};
  bool may_stitch = true;
};

// New chunks at the start of a gap of the arena.
struct Growth {
  SpanId gap = kNoId;
  std::vector<Bytes> chunks{};  // their sizes
  Bytes bytes{};                // and their sum

  explicit operator bool() const { return bytes != Bytes{}; }
};

// In the order in which it is done:
//   1  idle aliases are unmapped, to make room for another; then the request is planned anew
//   2  the stream is made to wait
//   3  chunks are made
//   4  an alias is mapped over all of the block, unless it lies in one, or is contiguous
struct Plan {
  std::vector<AliasId> collected{};
  std::vector<StreamWait> waits{};
  Growth growth{};
  Bytes of_growth{};            // that the block takes, from the first new byte on
  std::size_t growth_at = 0;    // the pieces that come before it in the block
  std::vector<Piece> pieces{};  // free ranges, in the order of the block
  bool makes_alias = false;
  AliasId alias = kNoId;  // that it lies in, and where; else it is contiguous
  Address address{};

  explicit operator bool() const { return !pieces.empty() || growth || !collected.empty(); }
};

// Where a block lies.
struct Placement {
  Address address;
  SpanId first_span = kNoId;
  AliasId alias = kNoId;
};

}  // namespace vramx
