// Memory seen from other devices and other processes.
#include "torch/shim.h"

namespace vramx {

void* Shim::getBaseAllocation(void* pointer, size_t* size) {
  CoreBlock block;
  if (core_.find(address_of(pointer), &block) != CoreCode::kOk)
    return native_.getBaseAllocation(pointer, size);
  if (size != nullptr) *size = block.size.count;
  return pointer;
}

torch_cuda::ShareableHandle Shim::shareIpcHandle(void* pointer) {
  TORCH_CHECK(!is_of_core(pointer),
              "vramx: this tensor's memory cannot be shared with another process, because it is "
              "put together from pieces. Allocate what is to be shared inside "
              "`with torch.cuda.use_mem_pool(torch.cuda.MemPool()):`; that memory can be shared.");
  return native_.shareIpcHandle(pointer);
}

std::shared_ptr<void> Shim::getIpcDevPtr(std::string handle) {
  return native_.getIpcDevPtr(std::move(handle));
}

// From now on `device` may touch the memory of `accessed`. CUDA's own peer access, which native
// asks for, covers memory from cudaMalloc alone; mapped memory has its accessors set one by one.
void Shim::enablePeerAccess(DeviceIndex device, DeviceIndex accessed) {
  native_.enablePeerAccess(device, accessed);
  const CoreCode code = core_.allow_peer(accessed, device);
  TORCH_CHECK(code == CoreCode::kOk, "vramx: device ", static_cast<int>(device),
              " cannot be given access to the memory of device ", static_cast<int>(accessed), ": ",
              core_.failure_text());
}

// Mapped memory is out of reach of a plain copy between devices without peer access. The pointers
// may point into the middle of a block, so what decides is whether the core holds anything there;
// the copy that names both devices is right for every memory.
cudaError_t Shim::memcpyAsync(void* to, int to_device, const void* from, int from_device,
                              size_t count, cudaStream_t stream, bool p2p_enabled) {
  const bool is_plain = p2p_enabled || to_device == from_device ||
                        (!core_.held(to_device) && !core_.held(from_device));
  if (!is_plain) return cudaMemcpyPeerAsync(to, to_device, from, from_device, count, stream);
  return native_.memcpyAsync(to, to_device, from, from_device, count, stream, p2p_enabled);
}

}  // namespace vramx
