// Asking libcuda what there is; see the header.
#include "driver/cuda_probe.h"

#include <array>
#include <cstddef>
#include <string>

#include "driver/cuda_api.h"

namespace vramx {
namespace {

int attribute(const cuda::Api& api, cuda::Attribute which, cuda::Device device) {
  int value = 0;
  api.device_get_attribute(&value, static_cast<int>(which), device);
  return value;
}

Bytes granularity(const cuda::Api& api, int ordinal) {
  const cuda::AllocationProperties properties{.location = {.id = ordinal}};
  std::size_t bytes = 0;
  api.mem_get_allocation_granularity(&bytes, &properties, cuda::kGranularityMinimum);
  return {bytes};
}

CudaDeviceFacts facts_of(const cuda::Api& api, int ordinal) {
  using cuda::Attribute;
  cuda::Device device = 0;
  if (api.device_get(&device, ordinal) != cuda::kSuccess) return {};
  std::array<char, 256> name{};
  std::size_t total = 0;
  api.device_get_name(name.data(), static_cast<int>(name.size() - 1), device);
  api.device_total_mem(&total, device);
  CudaDeviceFacts facts{
      .name = name.data(),
      .total_memory = {total},
      .compute_capability_major = attribute(api, Attribute::kComputeCapabilityMajor, device),
      .compute_capability_minor = attribute(api, Attribute::kComputeCapabilityMinor, device),
      .has_virtual_memory = attribute(api, Attribute::kVirtualMemoryManagement, device) != 0,
      .has_posix_handles = attribute(api, Attribute::kPosixFileDescriptor, device) != 0,
      .has_fabric_handles = attribute(api, Attribute::kFabricHandle, device) != 0,
      .has_rdma = attribute(api, Attribute::kRdmaWithVirtualMemory, device) != 0};
  if (facts.has_virtual_memory) facts.granularity = granularity(api, ordinal);
  return facts;
}

}  // namespace

CudaProbe probe_cuda() {
  CudaProbe probe;
  const cuda::LoadedApi& loaded = cuda::load_cuda();
  // The version can be asked for even where cuInit found no device.
  if (loaded.api.driver_get_version != nullptr) {
    loaded.api.driver_get_version(&probe.driver_version);
  }
  if (!loaded.is_loaded) {
    probe.error = loaded.error.data();
    return probe;
  }
  const cuda::ResultCode result = loaded.api.device_get_count(&probe.device_count);
  if (result != cuda::kSuccess) {
    probe.error = "cuDeviceGetCount failed with " + std::to_string(result);
    return probe;
  }
  for (int ordinal = 0; ordinal < probe.device_count; ++ordinal) {
    probe.devices.push_back(facts_of(loaded.api, ordinal));
  }
  return probe;
}

}  // namespace vramx
