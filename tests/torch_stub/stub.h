// A stand-in for the parts of torch and CUDA that a shim needs and a machine without a GPU lacks.
//
// It defines what libc10_cuda, libtorch_cuda and libcudart would: a device and a stream that a test
// sets, an allocator interface to derive from, and a small allocator behind the shim in the place
// of torch's own (native.h). libc10, which a CPU torch has, is the real one. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <set>

#include "torch/torch_api.h"

namespace vramx::stub {

// What the machine says, as a test sets it.
struct Machine {
  int device_count = 2;
  DeviceIndex device = 0;          // the current one
  std::set<DeviceIndex> contexts;  // devices that have one
  // As up to torch 2.9: to ask or to tell a fraction makes its device current, for good.
  bool fractions_make_current = VRAMX_TORCH < 210;
  cudaStream_t stream = nullptr;
  std::size_t total_bytes = std::size_t{1} << 30;
  std::size_t free_bytes = std::size_t{1} << 30;
  bool is_capturing = false;                                 // every stream
  std::map<cudaStream_t, cudaStreamCaptureStatus> captures;  // those that are capturing
  bool is_broken = false;                                    // an earlier error sticks
  int peer_copies = 0;                                       // calls of cudaMemcpyPeerAsync
};

Machine& machine();

}  // namespace vramx::stub
