#include "library/vramx.h"

#include <memory>
#include <stdexcept>
#include <utility>

#include "process/device_source.h"
#include "process/devices.h"
#include "torch/install.h"

namespace vramx {

void install_allocator(std::uint64_t limit_bytes) {
  auto devices = std::make_unique<Devices>(std::make_unique<GpuSource>(), DevicesOptions{});
  if (vramx_torch_install(&devices->handle(), 0) != 0) {
    throw std::runtime_error(std::string("vramx: ") + vramx_torch_error());
  }
  // Nobody announces the profilers of a program without Python.
  vramx_torch_note_profiler();
  // Never destroyed: torch frees tensors until the process is gone.
  static_cast<void>(devices.release());
  if (limit_bytes != kNoLimit) vramx_torch_set_limit(Allocators::kAll, limit_bytes);
}

bool allocator_installed() { return vramx_torch_is_installed() != 0; }

}  // namespace vramx
