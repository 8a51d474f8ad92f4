// Free ranges of an address space: take the first that fits, give back and merge.
//
// Serves the alias addresses, where a call comes with a driver call of thirty microseconds, and
// where there is mostly one range: a vector in address order. Not thread-safe. O(ranges).
#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "core/types.h"

namespace vramx {

class RangeSet {
 public:
  RangeSet(Address begin, Bytes size) : ranges_{{begin, size}} {}

  bool has(Bytes size) const {
    return std::any_of(ranges_.begin(), ranges_.end(),
                       [size](const Piece& each) { return each.size >= size; });
  }
  // The zero address where nothing fits.
  Address take(Bytes size) {
    const auto found = std::find_if(ranges_.begin(), ranges_.end(),
                                    [size](const Piece& each) { return each.size >= size; });
    if (found == ranges_.end()) return {};
    const Address begin = found->begin;
    *found = {begin + size, found->size - size};
    if (!found->size) ranges_.erase(found);
    return begin;
  }

  void give_back(Address begin, Bytes size) {
    auto next = std::partition_point(ranges_.begin(), ranges_.end(),
                                     [begin](const Piece& each) { return each.begin < begin; });
    if (next != ranges_.end() && next->begin == begin + size) {
      *next = {begin, size + next->size};
    } else {
      next = ranges_.insert(next, {begin, size});
    }
    if (next == ranges_.begin()) return;
    const auto previous = std::prev(next);
    if (previous->end() != begin) return;
    previous->size += next->size;
    ranges_.erase(next);
  }

 private:
  std::vector<Piece> ranges_;  // in address order; no two touch
};

}  // namespace vramx
