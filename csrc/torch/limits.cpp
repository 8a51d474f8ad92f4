#include "torch/limits.h"

#include <algorithm>

namespace vramx {
namespace {

// Needs no context on the device, unlike a question to the driver.
double total_bytes(DeviceIndex device) {
  return static_cast<double>(at::cuda::getDeviceProperties(device)->totalGlobalMem);
}

std::uint64_t rest(std::uint64_t limit, std::uint64_t taken) {
  return limit > taken ? limit - taken : 0;
}

}  // namespace

JointLimits::JointLimits(Allocators& core, CUDAAllocator& native, const JointStatistics& statistics)
    : core_(core), native_(native), statistics_(statistics) {
  for (auto& limit : limits_) limit.store(kNoLimit);
  for (auto& share : shares_) share.store(kNoLimit);
}

void JointLimits::set(int device, std::uint64_t bytes) {
  const int first = device < 0 ? 0 : device;
  const int last = device < 0 ? static_cast<int>(kMaxDevices) - 1 : device;
  const int count = native_.initialized() ? c10::cuda::device_count() : 0;
  core_.set_limit(device, Bytes{bytes});
  for (int i = first; i <= last && i < static_cast<int>(kMaxDevices); ++i) {
    const auto index = static_cast<DeviceIndex>(i);
    const std::uint64_t before = get(index);
    at(limits_, i) = bytes;
    if (i < count) apply(index, before);
  }
}

std::uint64_t JointLimits::get(DeviceIndex device) const {
  return std::min(at(limits_, device).load(std::memory_order_relaxed),
                  at(shares_, device).load(std::memory_order_relaxed));
}

void JointLimits::set_fraction(DeviceIndex device, double fraction) {
  TORCH_CHECK(fraction >= 0 && fraction <= 1, "invalid fraction: ", fraction,
              "; it is a number from 0 to 1");
  const bool is_all = fraction == 1;
  const std::uint64_t before = get(device);
  at(shares_, device) =
      is_all ? kNoLimit : static_cast<std::uint64_t>(fraction * total_bytes(device));
  apply(device, before);
}

double JointLimits::fraction(DeviceIndex device) const {
  const std::uint64_t limit = get(device);
  if (limit == kNoLimit) return 1.0;
  return std::min(1.0, static_cast<double>(limit) / total_bytes(device));
}

// cudaMallocAsync, which torch may have in the native allocator's place, would make a context on
// the device to answer.
void JointLimits::start(DeviceIndex device) {
  const double fraction = native_.name() == "native" ? native_.getMemoryFraction(device) : 1;
  if (fraction < 1) set_fraction(device, fraction);
  rebalance(device);
}

// Torch's allocator is told of no limit only where it had one: with a fraction of 1 it would allow
// no more than the device has, and pools of managed memory may have more.
void JointLimits::apply(DeviceIndex device, std::uint64_t before) {
  if (get(device) != kNoLimit) {
    rebalance(device);
  } else if (before != kNoLimit) {
    lift(device);
  }
}

void JointLimits::rebalance(DeviceIndex device) {
  const std::uint64_t limit = get(device);
  if (limit == kNoLimit) return;
  core_.set_limit(device, Bytes{rest(limit, statistics_.native_held(device))});
  if (!native_.initialized()) return;
  const auto left = static_cast<double>(rest(limit, core_.held(device).count));
  native_.setMemoryFraction(std::min(1.0, left / total_bytes(device)), device);
}

void JointLimits::lift(DeviceIndex device) {
  core_.set_limit(device, Bytes{kNoLimit});
  native_.setMemoryFraction(1.0, device);
}

std::uint64_t JointLimits::room(DeviceIndex device) const {
  const std::uint64_t limit = get(device);
  if (limit == kNoLimit) return kNoLimit;
  return rest(limit, core_.held(device).count + statistics_.native_held(device));
}

}  // namespace vramx
