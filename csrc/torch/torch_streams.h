// What torch knows of streams, for the core (core/surroundings.h).
//
// A stream of torch's carries an id that tells where it is from: torch's own pool and the default
// streams are never destroyed, others are somebody else's. But the id cannot be had from a handle,
// so that a handle is only known while it is the calling thread's current stream.
//
// Thread-safe; a look costs torch's own look-up of the current stream, and while a graph or a pool
// is filled on the device a call of the driver takes the filters' lock.
#pragma once

#include "core/surroundings.h"
#include "torch/core.h"
#include "torch/pool_filters.h"

namespace vramx {

// Whether torch keeps the stream for as long as the process lives.
bool is_kept_by_torch(c10::cuda::CUDAStream stream);

class TorchStreams final : public Surroundings {
 public:
  explicit TorchStreams(PoolFilters& filters) : filters_(filters) {}

  bool is_lasting(StreamName stream) const override;
  bool is_current(StreamName stream) const override;
  bool begin_call(StreamName stream) const override {
    return filters_.begin_call(static_cast<DeviceIndex>(stream.device), cuda_stream(stream.handle));
  }
  bool begin_device_call(int device) const override {
    return filters_.begin_device_call(static_cast<DeviceIndex>(device));
  }
  void end_call(int device) const override { filters_.end_call(static_cast<DeviceIndex>(device)); }

 private:
  PoolFilters& filters_;
};

}  // namespace vramx
