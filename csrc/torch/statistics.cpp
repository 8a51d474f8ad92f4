#include "torch/statistics.h"

#include <algorithm>

#include "torch/native_scope.h"

namespace vramx {
namespace {

using StatArray = decltype(DeviceStats::allocation);
using Stat = StatArray::value_type;

// Every statistic that torch keeps three times, in one order.
constexpr StatArray DeviceStats::* kArrays[] = {
    &DeviceStats::allocation,      &DeviceStats::segment,
    &DeviceStats::active,          &DeviceStats::inactive_split,
    &DeviceStats::allocated_bytes, &DeviceStats::reserved_bytes,
    &DeviceStats::active_bytes,    &DeviceStats::inactive_split_bytes,
    &DeviceStats::requested_bytes,
};
constexpr std::size_t kAllocatedBytes = 4;
constexpr std::size_t kReservedBytes = 5;
static_assert(kArrays[kAllocatedBytes] == &DeviceStats::allocated_bytes);
static_assert(kArrays[kReservedBytes] == &DeviceStats::reserved_bytes);

Stat stat_of(const Counter& counter) {
  Stat stat;
  stat.current = counter.current;
  stat.peak = counter.peak;
  stat.allocated = counter.allocated;
  stat.freed = counter.freed;
  return stat;
}

StatArray stats_of(const PoolCounters& counters) {
  return {stat_of(counters[0]), stat_of(counters[1]), stat_of(counters[2])};
}

// Chunks serve requests of every size, and torch's large pool is the one that is not only small.
StatArray stats_of(const Counter& counter) { return {stat_of(counter), {}, stat_of(counter)}; }

// A block of the core is active exactly while it is allocated: after a free it is an extent that
// may have to be waited for.
DeviceStats torch_stats(const AllocatorStats& core) {
  DeviceStats stats;
  stats.allocation = stats_of(core.allocation);
  stats.segment = stats_of(core.segment);
  stats.active = stats.allocation;
  stats.inactive_split = stats_of(core.inactive_split);
  stats.allocated_bytes = stats_of(core.allocated_bytes);
  stats.reserved_bytes = stats_of(core.reserved_bytes);
  stats.active_bytes = stats.allocated_bytes;
  stats.inactive_split_bytes = stats_of(core.inactive_split_bytes);
  stats.requested_bytes = stats_of(core.requested_bytes);
  stats.num_alloc_retries = core.num_alloc_retries;
  stats.num_ooms = core.num_ooms;
  stats.num_sync_all_streams = core.num_sync_all_streams;
  stats.num_device_alloc = core.num_device_alloc;
  stats.num_device_free = core.num_device_free;
  return stats;
}

// Peaks apart, which do not add up: whichever is higher.
void add(Stat& sum, const Stat& other) {
  sum.current += other.current;
  sum.allocated += other.allocated;
  sum.freed += other.freed;
  sum.peak = std::max({sum.peak, other.peak, sum.current});
}

}  // namespace

// What only torch's allocator has - oversize blocks, pools, what later releases add - stays as it
// is in `native`.
DeviceStats JointStatistics::joint(DeviceIndex device, const DeviceStats& native) const {
  DeviceStats sum = native;
  const DeviceStats core = torch_stats(core_.stats(device));
  for (const auto array : kArrays) {
    for (std::size_t kind = 0; kind < sum.allocation.size(); ++kind) {
      add((sum.*array)[kind], (core.*array)[kind]);
    }
  }
  sum.num_alloc_retries += core.num_alloc_retries;
  sum.num_ooms += core.num_ooms;
  sum.num_sync_all_streams += core.num_sync_all_streams;
  sum.num_device_alloc += core.num_device_alloc;
  sum.num_device_free += core.num_device_free;
  return sum;
}

void JointStatistics::raise(Device& state, const DeviceStats& now) {
  for (std::size_t i = 0; i < kStatArrays; ++i) {
    for (std::size_t kind = 0; kind < now.allocation.size(); ++kind) {
      std::int64_t& peak = state.peaks[i][kind];
      peak = std::max(peak, (now.*kArrays[i])[kind].current);
    }
  }
  state.peak_allocated.store(state.peaks[kAllocatedBytes][0], std::memory_order_relaxed);
  state.peak_held.store(state.peaks[kReservedBytes][0], std::memory_order_relaxed);
}

DeviceStats JointStatistics::observe(DeviceIndex device) {
  static_assert(std::size(kArrays) == kStatArrays);
  Device& state = this->state(device);
  const DeviceStats native = native_.getDeviceStats(device);
  const auto held = static_cast<std::uint64_t>(native.reserved_bytes[0].current);
  state.native_allocated.store(static_cast<std::uint64_t>(native.allocated_bytes[0].current),
                               std::memory_order_relaxed);
  state.native_held.store(held, std::memory_order_relaxed);
  if (held > 0 && !flags_.has(Flag::kNativeHolds)) flags_.set(Flag::kNativeHolds, true);
  DeviceStats now = joint(device, native);
  if (flags_.has(Flag::kNativeHolds)) raise(state, now);
  return now;
}

DeviceStats JointStatistics::read(DeviceIndex device) {
  Device& state = this->state(device);
  const std::lock_guard lock(state.mutex);
  DeviceStats now = observe(device);
  for (std::size_t i = 0; i < kStatArrays; ++i) {
    for (std::size_t kind = 0; kind < now.allocation.size(); ++kind) {
      Stat& stat = (now.*kArrays[i])[kind];
      stat.peak = std::max(stat.peak, state.peaks[i][kind]);
    }
  }
  return now;
}

void JointStatistics::reset_peaks(DeviceIndex device) {
  Device& state = this->state(device);
  const std::lock_guard lock(state.mutex);
  core_.reset_peak_stats(device);
  native_.resetPeakStats(device);
  state.peaks = {};
  observe(device);
}

void JointStatistics::reset_accumulated(DeviceIndex device) {
  core_.reset_accumulated_stats(device);
  native_.resetAccumulatedStats(device);
}

void JointStatistics::refresh(DeviceIndex device) {
  if (NativeScope::is_active() || !native_.initialized()) return;
  const std::lock_guard lock(state(device).mutex);
  observe(device);
}

void JointStatistics::refresh_held(int device_count) {
  for (int i = 0; i < device_count; ++i) {
    const auto device = static_cast<DeviceIndex>(i);
    if (native_held(device) > 0) refresh(device);
  }
}

// What is known of torch's allocator may be out of date, and then too high: tensors from before a
// late installation are freed without passing here. So the sum only says when to look.
void JointStatistics::note_allocation(DeviceIndex device) {
  const Device& state = this->state(device);
  const auto allocated =
      static_cast<std::int64_t>(core_.allocated(device).count + native_allocated(device));
  const auto held = static_cast<std::int64_t>(core_.held(device).count + native_held(device));
  if (allocated > state.peak_allocated.load(std::memory_order_relaxed) ||
      held > state.peak_held.load(std::memory_order_relaxed)) {
    refresh(device);
  }
}

std::uint64_t JointStatistics::native_allocated(DeviceIndex device) const {
  return state(device).native_allocated.load(std::memory_order_relaxed);
}

std::uint64_t JointStatistics::native_held(DeviceIndex device) const {
  return state(device).native_held.load(std::memory_order_relaxed);
}

}  // namespace vramx
