// What torch.cuda.memory_stats reports: the core and torch's own allocator behind it, as one.
//
// Counts and sums are the two sides added up at the moment of asking. A sum of two peaks would
// overstate the peak of the sum. But torch's allocator changes only where it is called, which is
// through the shim: from one such call to the next its part is a constant, and the peak of the sum
// in between is the core's own peak of that interval plus the constant. So the core is asked for
// the peaks of an interval after every call of torch's allocator, and its own calls cost nothing.
// What the core does on other threads during such a call counts with the part before it.
//
// Blocks from before a late installation are freed without passing here. While there are any, the
// constant may be too high, so an interval counts with what is left of it, and an allocation of the
// core that seems to lead past the highest sum so far is looked at, for two atomic reads below it.
//
// Thread-safe, one lock a device, held while torch's allocator is asked and never asked for from
// inside it (torch/native_scope.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "torch/core.h"
#include "torch/flags.h"

namespace vramx {

class JointStatistics {
 public:
  JointStatistics(Allocators& core, CUDAAllocator& native, Flags& flags)
      : core_(core), native_(native), flags_(flags) {}

  DeviceStats read(DeviceIndex device);
  void reset_peaks(DeviceIndex device);
  void reset_accumulated(DeviceIndex device);

  // After torch's allocator may have changed what it holds on a device.
  void refresh(DeviceIndex device);
  // The same for all devices where it held memory, for a change whose device is not known.
  void refresh_held(int device_count);
  // After CUDA was initialised, with torch's allocator in use already.
  void start_late(int device_count);
  // After the core has allocated, while kLate is set.
  void note_allocation(DeviceIndex device);

  // Of torch's own allocator, as of the last refresh.
  std::uint64_t native_allocated(DeviceIndex device) const;
  std::uint64_t native_held(DeviceIndex device) const;

 private:
  static constexpr std::size_t kStatArrays = 9;
  using Figures = std::array<std::array<std::int64_t, 3>, kStatArrays>;

  struct Device {
    std::mutex mutex;
    Figures peaks{};                               // of the sum, up to the last refresh
    Figures native{};                              // what torch's allocator had then
    std::atomic<std::uint64_t> peak_allocated{0};  // of peaks, to be read without the lock
    std::atomic<std::uint64_t> peak_held{0};
    std::atomic<std::uint64_t> native_allocated{0};
    std::atomic<std::uint64_t> native_held{0};
  };

  bool has_native_blocks() const;
  // Each under the device's lock.
  DeviceStats observe(DeviceIndex device);
  void raise(Device& state, const DeviceStats& core, const DeviceStats& native);
  void publish(Device& state);

  Device& state(DeviceIndex device) { return devices_[static_cast<std::size_t>(device)]; }
  const Device& state(DeviceIndex device) const {
    return devices_[static_cast<std::size_t>(device)];
  }

  Allocators& core_;
  CUDAAllocator& native_;
  Flags& flags_;
  std::array<Device, kMaxDevices> devices_;
};

}  // namespace vramx
