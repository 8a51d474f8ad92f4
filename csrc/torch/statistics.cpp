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

void add(Stat& sum, const Stat& other) {
  sum.current += other.current;
  sum.allocated += other.allocated;
  sum.freed += other.freed;
}

// What only torch's allocator has - oversize blocks, pools, what later releases add - stays as it
// is in `native`; peaks are not added.
DeviceStats sum_of(const DeviceStats& core, const DeviceStats& native) {
  DeviceStats sum = native;
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

}  // namespace

void JointStatistics::raise(Device& state, const DeviceStats& core, const DeviceStats& native) {
  const bool is_late = flags_.has(Flag::kLate);
  for (std::size_t i = 0; i < kStatArrays; ++i) {
    for (std::size_t kind = 0; kind < core.allocation.size(); ++kind) {
      const Stat& own = (core.*kArrays[i])[kind];
      const std::int64_t now = (native.*kArrays[i])[kind].current;
      std::int64_t& before = state.native[i][kind];
      const std::int64_t constant = is_late ? std::min(before, now) : before;
      std::int64_t& peak = state.peaks[i][kind];
      peak = std::max({peak, own.peak + constant, own.current + now});
      before = now;
    }
  }
}

void JointStatistics::publish(Device& state) {
  const auto publish = [](std::int64_t value, std::atomic<std::uint64_t>& where) {
    where.store(static_cast<std::uint64_t>(value), std::memory_order_relaxed);
  };
  publish(state.peaks[kAllocatedBytes][0], state.peak_allocated);
  publish(state.peaks[kReservedBytes][0], state.peak_held);
  publish(state.native[kAllocatedBytes][0], state.native_allocated);
  publish(state.native[kReservedBytes][0], state.native_held);
  if (flags_.has(Flag::kLate) && !has_native_blocks()) flags_.set(Flag::kLate, false);
}

// What is known is never too low.
bool JointStatistics::has_native_blocks() const {
  return std::any_of(devices_.begin(), devices_.end(),
                     [](const Device& each) { return each.native_allocated.load() > 0; });
}

DeviceStats JointStatistics::observe(DeviceIndex device) {
  static_assert(std::size(kArrays) == kStatArrays);
  Device& state = this->state(device);
  const DeviceStats native = native_.getDeviceStats(device);
  const DeviceStats core = torch_stats(core_.take_interval_stats(device));
  raise(state, core, native);
  publish(state);
  return sum_of(core, native);
}

DeviceStats JointStatistics::read(DeviceIndex device) {
  Device& state = this->state(device);
  const std::lock_guard lock(state.mutex);
  DeviceStats now = observe(device);
  for (std::size_t i = 0; i < kStatArrays; ++i) {
    for (std::size_t kind = 0; kind < now.allocation.size(); ++kind) {
      (now.*kArrays[i])[kind].peak = state.peaks[i][kind];
    }
  }
  return now;
}

// Observed before as well, so that what torch's allocator had in the past counts no more.
void JointStatistics::reset_peaks(DeviceIndex device) {
  Device& state = this->state(device);
  const std::lock_guard lock(state.mutex);
  observe(device);
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

void JointStatistics::start_late(int device_count) {
  for (int i = 0; i < device_count; ++i) refresh(static_cast<DeviceIndex>(i));
  flags_.set(Flag::kLate, has_native_blocks());
}

void JointStatistics::note_allocation(DeviceIndex device) {
  const Device& state = this->state(device);
  const std::uint64_t allocated = core_.allocated(device).count + native_allocated(device);
  const std::uint64_t held = core_.held(device).count + native_held(device);
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
