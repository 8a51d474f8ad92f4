// One limit a device for the core and torch's own allocator together: the lower of vramx's own and
// of the fraction that torch was given, so that a program cannot lift what it was started under.
//
// Each side is told what the other leaves of it: the core a limit in bytes, torch's allocator a
// fraction of the device. They are told again before and after everything that torch's allocator
// is asked for, so the joint limit holds between such calls; two that grow at the same moment may
// pass it by what they grow. Lock-free, because it is also called from inside torch's allocator,
// which holds its own lock. Costs one atomic read while there is no limit.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "torch/core.h"
#include "torch/statistics.h"

namespace vramx {

constexpr std::uint64_t kNoLimit = UINT64_MAX;

class JointLimits {
 public:
  JointLimits(Allocators& core, CUDAAllocator& native, const JointStatistics& statistics);

  // vramx's own. Before CUDA is initialised too: torch's allocator is told when it is. -1 means
  // every device.
  void set(int device, std::uint64_t bytes);
  // What holds; kNoLimit for none.
  std::uint64_t get(DeviceIndex device) const;

  void set_fraction(DeviceIndex device, double fraction);
  double fraction(DeviceIndex device) const;
  // When torch's allocator is initialised: it learns the limit that was set before, and the
  // fraction that it was given by the environment or before a late installation holds for both.
  void start(DeviceIndex device);

  // Before torch's allocator allocates on the device, where it may not know the limit yet.
  void prepare(DeviceIndex device);
  void rebalance(DeviceIndex device);
  // What both together may still take.
  std::uint64_t room(DeviceIndex device) const;

 private:
  using Limits = std::array<std::atomic<std::uint64_t>, kMaxDevices>;

  template <class Array>
  static auto& at(Array& array, int device) {
    return array[static_cast<std::size_t>(device)];
  }
  // `before` is what held until now.
  void apply(DeviceIndex device, std::uint64_t before);
  void lift(DeviceIndex device);
  // Whether torch's allocator can be asked or told a fraction without making a context for it.
  bool is_reachable(DeviceIndex device) const;
  // What the core leaves of a limit.
  void tell(DeviceIndex device, std::uint64_t limit);
  void tell_fraction(DeviceIndex device, double fraction);

  Allocators& core_;
  CUDAAllocator& native_;
  const JointStatistics& statistics_;
  Limits limits_;  // vramx's own
  Limits shares_;  // torch's fractions, in bytes
};

}  // namespace vramx
