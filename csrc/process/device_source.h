// Where the devices of a process come from: its GPUs, or simulated ones.
//
// A source opens the driver of one device and says, where it cannot, why in words that a user can
// act on. It starts nothing before it is asked, so a process may be forked, and may choose its
// visible devices, until the first allocation. Called by one thread at a time.
#pragma once

#include <memory>
#include <string>

#include "core/driver.h"
#include "driver/sim_driver.h"

namespace vramx {

class DeviceSource {
 public:
  DeviceSource() = default;
  DeviceSource(const DeviceSource&) = delete;
  DeviceSource& operator=(const DeviceSource&) = delete;
  virtual ~DeviceSource() = default;

  virtual Result<std::unique_ptr<Driver>> open(int device) = 0;
  // The memory of a device, whether it was opened or not; zero where there is no such device.
  virtual Bytes capacity(int device) const = 0;
  // What is behind a failed open, as the end of a sentence; empty where the status says it all.
  virtual std::string reason(const Status& status) const = 0;
};

// The GPUs that CUDA shows to this process, by their ordinals.
class GpuSource final : public DeviceSource {
 public:
  Result<std::unique_ptr<Driver>> open(int device) override;
  Bytes capacity(int device) const override;
  std::string reason(const Status& status) const override;
};

// Devices that are all alike, numbered from zero.
class SimulatedSource final : public DeviceSource {
 public:
  SimulatedSource(int count, const SimOptions& options);

  Result<std::unique_ptr<Driver>> open(int device) override;
  Bytes capacity(int device) const override;
  std::string reason(const Status& status) const override;

 private:
  bool has(int device) const { return device >= 0 && device < count_; }

  const int count_;
  const SimOptions options_;
};

}  // namespace vramx
