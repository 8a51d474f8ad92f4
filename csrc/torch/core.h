// The core's interface, and its units as torch has them: an address is a pointer, a stream a
// cudaStream_t. The one place that converts. No state, no logic.
#pragma once

#include <cstdint>

#include "process/allocators.h"
#include "torch/torch_api.h"

namespace vramx {

inline Address address_of(const void* pointer) {
  return {reinterpret_cast<std::uintptr_t>(pointer)};
}

inline void* pointer_to(Address address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address.value));
}

inline Stream stream_of(cudaStream_t stream) {
  return static_cast<Stream>(reinterpret_cast<std::uintptr_t>(stream));
}

inline cudaStream_t cuda_stream(Stream stream) {
  return reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(stream));
}

}  // namespace vramx
