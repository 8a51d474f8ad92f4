// torch's allocator interface as the installed torch has it: the one place that includes its
// headers.
//
// VRAMX_TORCH is the release as a number, 211 for 2.11; where the form of a member depends on it,
// the member says so. Nothing of this is stable between releases: a shim serves one torch minor.
// Names only, no state.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ApproximateClock.h>
#include <c10/util/Exception.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <torch/version.h>

#include <functional>
#include <memory>

#define VRAMX_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

#if VRAMX_TORCH < 206
#error "vramx needs torch 2.6 or later"
#endif

// Declared here because its own header includes cuBLAS and cuSPARSE, whose headers a machine that
// only runs torch does not have.
namespace at::cuda {
TORCH_CUDA_CPP_API cudaDeviceProp* getDeviceProperties(c10::DeviceIndex device);
}  // namespace at::cuda

namespace vramx {

namespace torch_cuda = c10::cuda::CUDACachingAllocator;

using c10::DeviceIndex;
using c10::cuda::MempoolId_t;
using torch_cuda::CUDAAllocator;
using torch_cuda::DeviceStats;
using torch_cuda::TraceEntry;

// A stack trace as torch's recorder gathers it. Null where none was asked for.
using Context = std::shared_ptr<c10::GatheredContext>;
using StreamFilter = std::function<bool(cudaStream_t)>;

// More than any machine has; DeviceIndex itself ends at 127.
constexpr std::size_t kMaxDevices = 128;

inline c10::Device cuda_device(DeviceIndex index) { return {c10::DeviceType::CUDA, index}; }

}  // namespace vramx
