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

// Up to torch 2.9 native makes a device the current one to be asked or told its fraction, and
// leaves it so: the program would go on there.
class CurrentDeviceKept {
 public:
  CurrentDeviceKept() {
    if (c10::cuda::GetDevice(&device_) != cudaSuccess) device_ = -1;
  }
  // After an error of the device there is nothing to go on with.
  ~CurrentDeviceKept() {
    DeviceIndex now = device_;
    if (c10::cuda::GetDevice(&now) != cudaSuccess || now == device_ || device_ < 0) return;
    try {
      (void)c10::cuda::MaybeSetDevice(device_);
    } catch (...) {
    }
  }
  CurrentDeviceKept(const CurrentDeviceKept&) = delete;
  CurrentDeviceKept& operator=(const CurrentDeviceKept&) = delete;

 private:
  DeviceIndex device_ = -1;
};

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

// Where native is not asked it has none: up to torch 2.9 only a program gives it one, and so makes
// a context.
void JointLimits::start(DeviceIndex device) {
  if (is_reachable(device)) {
    const CurrentDeviceKept kept;
    const double fraction = native_.getMemoryFraction(device);
    if (fraction < 1) set_fraction(device, fraction);
  }
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

// Without a context on the device native holds nothing there, and prepare() comes before it does.
void JointLimits::rebalance(DeviceIndex device) {
  const std::uint64_t limit = get(device);
  if (limit == kNoLimit) return;
  core_.set_limit(device, Bytes{rest(limit, statistics_.native_held(device))});
  if (native_.initialized() && is_reachable(device)) tell(device, limit);
}

void JointLimits::prepare(DeviceIndex device) {
  const std::uint64_t limit = get(device);
  if (limit != kNoLimit) tell(device, limit);
}

void JointLimits::lift(DeviceIndex device) {
  core_.set_limit(device, Bytes{kNoLimit});
  if (is_reachable(device)) tell_fraction(device, 1.0);
}

// A context takes hundreds of MiB of a device, on each of them for every process of a machine. Up
// to torch 2.9 native makes the device current, which makes one; cudaMallocAsync, which torch may
// have in the native allocator's place, always does.
bool JointLimits::is_reachable(DeviceIndex device) const {
  if (VRAMX_TORCH >= 210 && native_.name() == "native") return true;
  return c10::cuda::hasPrimaryContext(device);
}

void JointLimits::tell(DeviceIndex device, std::uint64_t limit) {
  const auto left = static_cast<double>(rest(limit, core_.held(device).count));
  tell_fraction(device, std::min(1.0, left / total_bytes(device)));
}

void JointLimits::tell_fraction(DeviceIndex device, double fraction) {
  const CurrentDeviceKept kept;
  native_.setMemoryFraction(fraction, device);
}

std::uint64_t JointLimits::room(DeviceIndex device) const {
  const std::uint64_t limit = get(device);
  if (limit == kNoLimit) return kNoLimit;
  return rest(limit, core_.held(device).count + statistics_.native_held(device));
}

}  // namespace vramx
