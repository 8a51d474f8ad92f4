#include "core/recurrence.h"

#include <algorithm>
#include <bit>

namespace vramx {

// The window's last occurrence counts: where the same stretch lies at several distances, the longer
// ones show at its end, when the shorter one breaks off.
void Recurrence::begin_run(std::uint32_t distance) {
  if (distance >= kLongest) return;
  if (distance >= past_.size()) remember(std::max(distance + 1, kFewest));
  distance_ = distance;
  needed_ = distance < kLongestLayer ? kLayers : distance;
}

void Recurrence::remember(std::uint32_t requests) {
  std::vector<Request> grown(std::bit_ceil(requests));
  const auto had = static_cast<std::uint32_t>(past_.size());
  const auto mask = static_cast<std::uint32_t>(grown.size() - 1);
  for (std::uint32_t i = 1; i <= had; ++i) grown[(count_ - i) & mask] = past(count_ - i);
  past_.swap(grown);
  mask_ = mask;
}

std::string Recurrence::check() const {
  const auto size = static_cast<std::uint32_t>(past_.size());
  if (distance_ >= size) return "recurrence 1: the distance is " + std::to_string(distance_);
  if (distance_ == 0) return run_ == 0 ? "" : "recurrence 2: a run of " + std::to_string(run_);
  for (std::uint32_t i = 1; i <= std::min(run_, size - distance_); ++i) {
    if (past(count_ - i).key != past(count_ - i - distance_).key) {
      return "recurrence 2: the request " + std::to_string(i) + " before is not as it was";
    }
  }
  return {};
}

}  // namespace vramx
