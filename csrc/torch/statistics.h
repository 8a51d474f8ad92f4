// What torch.cuda.memory_stats reports: the core and torch's own allocator behind it, as one.
//
// Counts and sums are the two sides added up at the moment of asking. A sum of two peaks would
// overstate the peak of the sum, so once torch's allocator has held memory the joint peaks are
// raised here: after everything that it did, and whenever the core's allocation leads past the
// highest joint sum so far. Before that the core's own peaks are the joint ones.
//
// Thread-safe, one lock a device, held while torch's allocator is asked and never asked for from
// inside it (torch/native_scope.h). note_allocation() costs two atomic reads below the peak.
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
  // After the core has allocated, while torch's allocator holds memory.
  void note_allocation(DeviceIndex device);

  // Of torch's own allocator, as of the last refresh.
  std::uint64_t native_allocated(DeviceIndex device) const;
  std::uint64_t native_held(DeviceIndex device) const;

 private:
  static constexpr std::size_t kStatArrays = 9;
  using Peaks = std::array<std::array<std::int64_t, 3>, kStatArrays>;

  struct Device {
    std::mutex mutex;
    Peaks peaks{};
    std::atomic<std::int64_t> peak_allocated{0};  // of peaks, to be read without the lock
    std::atomic<std::int64_t> peak_held{0};
    std::atomic<std::uint64_t> native_allocated{0};
    std::atomic<std::uint64_t> native_held{0};
  };

  // Each under the device's lock.
  DeviceStats observe(DeviceIndex device);
  DeviceStats joint(DeviceIndex device, const DeviceStats& native) const;
  void raise(Device& state, const DeviceStats& now);

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
