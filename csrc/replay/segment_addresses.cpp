#include "replay/segment_addresses.h"

#include <algorithm>
#include <iterator>

namespace vramx::replay {
namespace {

constexpr Bytes kReservationUnit{32u << 20};

}  // namespace

Address SegmentAddresses::take(Bytes size) {
  auto place = std::find_if(leftovers_.begin(), leftovers_.end(),
                            [size](const auto& range) { return range.second >= size; });
  if (place == leftovers_.end()) {
    const Bytes reservation = round_up(size, kReservationUnit);
    lowest_ = lowest_ - reservation;
    place = leftovers_.emplace(lowest_, reservation).first;
  }
  const auto [address, available] = *place;
  leftovers_.erase(place);
  if (available > size) leftovers_.emplace(address + size, available - size);
  return address;
}

void SegmentAddresses::give_back(Address address, Bytes size) {
  auto right = leftovers_.lower_bound(address);
  if (right != leftovers_.end() && right->first == address + size) {
    size += right->second;
    right = leftovers_.erase(right);
  }
  if (right != leftovers_.begin()) {
    const auto left = std::prev(right);
    if (left->first + left->second == address) {
      left->second += size;
      return;
    }
  }
  leftovers_.emplace(address, size);
}

}  // namespace vramx::replay
