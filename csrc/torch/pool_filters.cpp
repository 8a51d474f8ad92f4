#include "torch/pool_filters.h"

#include <algorithm>

namespace vramx {

void PoolFilters::add(DeviceIndex device, MempoolId_t pool, StreamFilter filter) {
  const std::lock_guard lock(mutex_);
  entries_.push_back({device, pool, std::move(filter)});
  flags_.set(Flag::kPools, true);
}

void PoolFilters::remove(DeviceIndex device, MempoolId_t pool) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.device == device && entry.pool == pool;
  });
  if (found != entries_.end()) entries_.erase(found);
  flags_.set(Flag::kPools, !entries_.empty());
}

bool PoolFilters::match(DeviceIndex device, cudaStream_t stream) const {
  if (!has_any()) return false;
  const std::lock_guard lock(mutex_);
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.device == device && entry.filter(stream);
  });
}

bool PoolFilters::has_any(DeviceIndex device) const {
  if (!has_any()) return false;
  const std::lock_guard lock(mutex_);
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return entry.device == device; });
}

}  // namespace vramx
