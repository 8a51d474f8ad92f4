#include "process/device_source.h"

#include <utility>

#include "driver/cuda_driver.h"
#include "driver/cuda_probe.h"

namespace vramx {
namespace {

// What made-up addresses of one device lie apart from the next one's; no reservation is larger.
constexpr Bytes kAddressesOfDevice{std::uint64_t{1} << 46};

}  // namespace

Result<std::unique_ptr<Driver>> GpuSource::open(int device) {
  Result<std::unique_ptr<CudaDriver>> opened = CudaDriver::open(device);
  if (!opened.ok()) return opened.status();
  return std::unique_ptr<Driver>(std::move(opened.value()));
}

Bytes GpuSource::capacity(int device) const {
  const CudaProbe probe = probe_cuda();
  const bool exists = device >= 0 && static_cast<std::size_t>(device) < probe.devices.size();
  return exists ? probe.devices[static_cast<std::size_t>(device)].total_memory : Bytes{};
}

std::string GpuSource::reason(const Status& status) const {
  if (status.code == StatusCode::kNotSupported) {
    return "the device or its driver has no virtual memory management";
  }
  const CudaProbe probe = probe_cuda();
  if (!probe.error.empty()) return probe.error;
  return status.code == StatusCode::kInvalidValue
             ? "the process sees " + std::to_string(probe.device_count) + " devices"
             : std::string();
}

SimulatedSource::SimulatedSource(int count, const SimOptions& options)
    : count_(count), options_(options) {}

Result<std::unique_ptr<Driver>> SimulatedSource::open(int device) {
  if (!has(device)) return failure(StatusCode::kInvalidValue, "open");
  SimOptions options = options_;
  options.ordinal = device;
  options.first_address = {(static_cast<std::uint64_t>(device) + 1) * kAddressesOfDevice.count};
  Result<std::unique_ptr<SimDriver>> opened = SimDriver::open(options);
  if (!opened.ok()) return opened.status();
  return std::unique_ptr<Driver>(std::move(opened.value()));
}

Bytes SimulatedSource::capacity(int device) const {
  return has(device) ? options_.capacity : Bytes{};
}

std::string SimulatedSource::reason(const Status& status) const {
  return status.code == StatusCode::kInvalidValue
             ? "there are " + std::to_string(count_) + " simulated devices"
             : std::string();
}

}  // namespace vramx
