#include "torch/torch_streams.h"

namespace vramx {
namespace {

c10::cuda::CUDAStream current_stream(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<DeviceIndex>(device));
}

}  // namespace

// The default stream has id 0. Of the others the lowest bit is set in the ids of torch's pool; the
// id of any other stream is its handle, which is the address of something.
bool is_kept_by_torch(c10::cuda::CUDAStream stream) { return stream.id() == 0 || stream.id() & 1; }

bool TorchStreams::is_lasting(StreamName stream) const {
  if (stream.handle == Stream::kDefault) return true;
  const c10::cuda::CUDAStream current = current_stream(stream.device);
  return stream_of(current.stream()) == stream.handle && is_kept_by_torch(current);
}

bool TorchStreams::is_current(StreamName stream) const {
  return stream_of(current_stream(stream.device).stream()) == stream.handle;
}

}  // namespace vramx
