// The symbols of libcudart and libc10_cuda, answered from Machine.
#include <cstring>

#include "stub.h"

namespace vramx::stub {

Machine& machine() {
  static auto* machine = new Machine;
  return *machine;
}

}  // namespace vramx::stub

using vramx::stub::machine;

extern "C" {

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  if (machine().is_broken) return cudaErrorIllegalAddress;
  *free = machine().free_bytes;
  *total = machine().total_bytes;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const auto found = machine().captures.find(stream);
  *status = machine().is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (found != machine().captures.end()) *status = found->second;
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) {
  ++machine().peer_copies;
  return cudaSuccess;
}

}  // extern "C"

namespace at::cuda {

cudaDeviceProp* getDeviceProperties(c10::DeviceIndex) {
  static auto* properties = new cudaDeviceProp{};
  properties->totalGlobalMem = machine().total_bytes;
  return properties;
}

}  // namespace at::cuda

namespace c10::cuda {

DeviceIndex device_count() noexcept { return static_cast<DeviceIndex>(machine().device_count); }
DeviceIndex current_device() { return machine().device; }

cudaError_t GetDevice(DeviceIndex* device) {
  *device = machine().device;
  return cudaSuccess;
}

// Unlike cudaSetDevice() it makes no context.
cudaError_t MaybeSetDevice(DeviceIndex device) {
  machine().device = device;
  return cudaSuccess;
}

bool hasPrimaryContext(DeviceIndex device) { return machine().contexts.contains(device); }

// The stream's number is its address: the real library looks it up in tables of its own.
CUDAStream getCurrentCUDAStream(DeviceIndex device) {
  const auto id = reinterpret_cast<c10::StreamId>(machine().stream);
  return CUDAStream(CUDAStream::UNCHECKED,
                    c10::Stream(c10::Stream::UNSAFE, vramx::cuda_device(device), id));
}

cudaStream_t CUDAStream::stream() const { return reinterpret_cast<cudaStream_t>(id()); }

#if VRAMX_TORCH >= 214
CUDAErrorLogCapture::CUDAErrorLogCapture() noexcept = default;

void c10_cuda_check_implementation(const int32_t error, const char*, const char*, const uint32_t,
                                   const bool, CUDAErrorLogCapture*) {
  TORCH_CHECK(error == 0, "CUDA error: ", error);
}
#endif

// Up to torch 2.8 a line is an int.
void c10_cuda_check_implementation(const int32_t error, const char*, const char*, const int,
                                   const bool) {
  TORCH_CHECK(error == 0, "CUDA error: ", error);
}

void c10_cuda_check_implementation(const int32_t error, const char*, const char*, const uint32_t,
                                   const bool) {
  TORCH_CHECK(error == 0, "CUDA error: ", error);
}

}  // namespace c10::cuda

namespace c10 {
C10_DEFINE_REGISTRY(FreeCudaMemoryCallbacksRegistry, FreeMemoryCallback);
}  // namespace c10

namespace c10::cuda::CUDACachingAllocator {
std::atomic<CUDAAllocator*> allocator{nullptr};
}  // namespace c10::cuda::CUDACachingAllocator
