// Free ranges of an address space: take the first that fits, give back and merge.
//
// Serves the alias addresses, where a call comes with a driver call of thirty microseconds, so an
// ordered map is quick enough: O(ranges) to take, O(log ranges) to give back. Not thread-safe.
#pragma once

#include <iterator>
#include <map>

#include "core/units.h"

namespace vramx {

class RangeSet {
 public:
  RangeSet(Address begin, Bytes size) { ranges_[begin] = size; }

  // The zero address where nothing fits.
  Address take(Bytes size) {
    for (auto range = ranges_.begin(); range != ranges_.end(); ++range) {
      if (range->second < size) continue;
      const auto [begin, all] = *range;
      ranges_.erase(range);
      if (all > size) ranges_[begin + size] = all - size;
      return begin;
    }
    return {};
  }

  void give_back(Address begin, Bytes size) {
    const auto next = ranges_.lower_bound(begin);
    if (next != ranges_.end() && next->first == begin + size) {
      size += next->second;
      ranges_.erase(next);
    }
    const auto after = ranges_.lower_bound(begin);
    if (after != ranges_.begin()) {
      const auto previous = std::prev(after);
      if (previous->first + previous->second == begin) {
        previous->second += size;
        return;
      }
    }
    ranges_[begin] = size;
  }

 private:
  std::map<Address, Bytes> ranges_;
};

}  // namespace vramx
