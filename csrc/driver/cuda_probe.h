// What the machine's CUDA driver and devices can do, as plain values: the facts behind a diagnosis.
//
// Creates no context and allocates nothing on a device. Thread-safe. Costs the driver's start in
// the first call of a process (up to seconds on a machine with many devices), milliseconds after.
#pragma once

#include <string>
#include <vector>

#include "core/units.h"

namespace vramx {

struct CudaDeviceFacts {
  std::string name;
  Bytes total_memory{};
  Bytes granularity{};  // zero where virtual memory management is not supported
  int compute_capability_major = 0;
  int compute_capability_minor = 0;
  bool has_virtual_memory = false;
  bool has_posix_handles = false;
  bool has_fabric_handles = false;
  bool has_rdma = false;  // GPUDirect RDMA on mapped memory
};

struct CudaProbe {
  std::string error;       // why there is nothing to report; empty when all went well
  int driver_version = 0;  // 13000 is CUDA 13.0; 0 where no driver was found
  int device_count = 0;
  std::vector<CudaDeviceFacts> devices;
};

// Never fails: what went wrong is in `error`.
CudaProbe probe_cuda();

}  // namespace vramx
