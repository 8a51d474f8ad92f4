#include "torch/pool_filters.h"

#include <algorithm>

namespace vramx {

void PoolFilters::add(DeviceIndex device, MempoolId_t pool, StreamFilter filter) {
  const std::lock_guard lock(mutex_);
  entries_.push_back({device, pool, std::move(filter)});
  change_count(device, 1);
}

void PoolFilters::remove(DeviceIndex device, MempoolId_t pool) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.device == device && entry.pool == pool;
  });
  if (found == entries_.end()) return;
  entries_.erase(found);
  change_count(device, -1);
}

bool PoolFilters::match(DeviceIndex device, cudaStream_t stream) const {
  if (!has_any(device)) return false;
  const std::lock_guard lock(mutex_);
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.device == device && entry.filter(stream);
  });
}

void PoolFilters::change_count(DeviceIndex device, int by) {
  counts_[static_cast<std::size_t>(device)] += by;
  flags_.set(Flag::kPools, !entries_.empty());
}

}  // namespace vramx
