// The shim's C interface: what Python calls after loading it beside torch.
//
// Nothing throws across it. Installing is done once, by one thread; the rest is thread-safe.
// Nothing made here is destroyed before the process ends.
#include "torch/install.h"

#include <string>

#include "torch/shim.h"

namespace vramx {
namespace {

std::string* last_error = nullptr;  // never destroyed

int fail_with(const std::string& text) {
  if (last_error == nullptr) last_error = new std::string;
  *last_error = text;
  return 1;
}

bool is_torchs_own(const std::string& name) {
  return name == "native" || name == "cudaMallocAsync";
}

std::string refusal(const AllocatorsHandle* core, CUDAAllocator* current, bool is_late) {
  if (core == nullptr || !core->fits()) {
    return "the shim and the core were built from different versions of vramx";
  }
  if (Shim::installed() != nullptr) return "vramx is already installed in this process";
  if (core->allocators->is_in_child()) return "vramx cannot be installed in a forked child";
  if (current == nullptr) return "this torch has no CUDA allocator";
  if (!is_torchs_own(current->name())) {
    return "another CUDA allocator is installed in torch already: " + current->name();
  }
  if (c10::FreeCudaMemoryCallbacksRegistry()->Has("vramx")) {
    return "another free-memory callback of torch has the name vramx";
  }
  if (!is_late && current->initialized()) {
    return "torch's CUDA allocator is already initialised";
  }
  return {};
}

void install(Allocators& core, CUDAAllocator& native) {
  const bool is_initialized = native.initialized();
  const auto shim = std::make_shared<Shim>(core, native);
  // A reference that is never given up: torch's own is gone before the last tensor is.
  new std::shared_ptr<Shim>(shim);
  Shim::connect(*shim);
  // torch accepts a change only from an allocator that is not initialised, as ours is not yet.
  if (is_initialized) torch_cuda::allocator.store(shim.get());
  torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(shim);
  // torch.accelerator asks this table, which the change above leaves alone. The native allocator
  // was entered with the same priority, the lowest.
  c10::SetAllocator(c10::kCUDA, shim.get(), 0);
  if (is_initialized) shim->init(c10::cuda::device_count());
}

}  // namespace
}  // namespace vramx

VRAMX_EXPORT const char* vramx_torch_built_for() { return TORCH_VERSION; }

VRAMX_EXPORT int vramx_torch_install(const vramx::AllocatorsHandle* core, int is_late) {
  try {
    vramx::CUDAAllocator* const current = vramx::torch_cuda::get();
    const std::string refused = vramx::refusal(core, current, is_late != 0);
    if (!refused.empty()) return vramx::fail_with(refused);
    vramx::install(*core->allocators, *current);
    return 0;
  } catch (const c10::Error& error) {
    return vramx::fail_with(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return vramx::fail_with(error.what());
  }
}

VRAMX_EXPORT const char* vramx_torch_error() {
  return vramx::last_error == nullptr ? "" : vramx::last_error->c_str();
}

VRAMX_EXPORT void vramx_torch_set_limit(int device, unsigned long long bytes) {
  vramx::Shim* const shim = vramx::Shim::installed();
  if (shim == nullptr) return;
  try {
    shim->set_limit(device, bytes);
  } catch (const std::exception& error) {
    vramx::fail_with(error.what());
  }
}

VRAMX_EXPORT void vramx_torch_note_profiler() {
  if (vramx::Shim* const shim = vramx::Shim::installed()) shim->note_profiler();
}

// Asked of an allocator that is not initialised, torch's would read the first of no devices.
VRAMX_EXPORT int vramx_torch_keeps_history() {
  vramx::CUDAAllocator* const current = vramx::torch_cuda::get();
  if (current == nullptr || !current->initialized()) return 0;
  try {
    return current->isHistoryEnabled();
  } catch (const std::exception&) {  // cudaMallocAsync keeps none, and says so this way
    return 0;
  }
}

VRAMX_EXPORT int vramx_torch_is_installed() {
  return vramx::Shim::installed() != nullptr &&
         vramx::torch_cuda::get() == vramx::Shim::installed();
}
