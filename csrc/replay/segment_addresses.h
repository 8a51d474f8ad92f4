// Where cudaMalloc puts a segment: the model of the addresses behind the native allocator.
//
// Best fit breaks ties by address, so the order in which addresses are handed out decides which of
// two equal holes a block lands in, and over a run how many segments are needed. The driver does
// not hand them out in ascending order. Segments of torch 2.11 on an H200 (driver 580.159) show:
//
//   ... | reservation 3 | reservation 2 | reservation 1 |     each new one below the last,
//       [ segment | leftover ]                                a multiple of 32 MiB
//
// and a segment that fits into a leftover goes into the lowest one. What a process's own start-up
// leaves over is not modelled. That freed segments are leftovers again is assumed: it reproduces
// the smallest capacities measured with the recorded traces. Addresses are numbers here, nothing is
// behind them. Not thread-safe. Both calls are O(leftovers) at most, and happen only where the
// native allocator calls the driver.
#pragma once

#include <map>

#include "core/units.h"

namespace vramx::replay {

class SegmentAddresses {
 public:
  Address take(Bytes size);
  // Exactly what one take() returned.
  void give_back(Address address, Bytes size);

 private:
  std::map<Address, Bytes> leftovers_;      // disjoint; joined when one is given back
  Address lowest_{std::uint64_t{1} << 63};  // of all reservations; an arbitrary start
};

}  // namespace vramx::replay
