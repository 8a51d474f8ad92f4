// vramx in a C++ program on LibTorch: the whole of its interface, without torch's or CUDA's
// headers.
//
//     #include <vramx.h>
//     int main() {
//       vramx::install_allocator();  // before anything uses CUDA
//       ...
//     }
//
// Statistics are those of torch: c10::cuda::CUDACachingAllocator::getDeviceStats() and snapshot().
#pragma once

#include <cstdint>
#include <limits>

namespace vramx {

inline constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

// Serves torch's CUDA memory from vramx, in this process, from now on. Call it once, before
// anything uses CUDA: it does not initialise CUDA itself. `limit_bytes`: the most that vramx and
// torch's own allocator hold of a device together. Throws std::runtime_error with the reason where
// it cannot be done; torch's own allocator then stays. No environment variable counts here.
__attribute__((visibility("default"))) void install_allocator(std::uint64_t limit_bytes = kNoLimit);

// Whether torch's CUDA memory comes from vramx in this process.
__attribute__((visibility("default"))) bool allocator_installed();

}  // namespace vramx
