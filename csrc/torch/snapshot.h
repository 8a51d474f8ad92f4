// The core's part of torch.cuda.memory._snapshot(): its pieces as torch's segments and blocks, its
// history joined with that of torch's own allocator. Stateless. Looks at every piece of a device.
#pragma once

#include <functional>
#include <vector>

#include "torch/core.h"
#include "torch/history.h"

namespace vramx {

using Segments = std::vector<torch_cuda::SegmentInfo>;
using Trace = std::vector<TraceEntry>;
using ToUnixTime = std::function<c10::time_t(c10::approx_time_t)>;

// A run of contiguous pieces whose live blocks are of one stream is a segment. Each live block is
// found at the address that its owner has; the sizes add up to what the core holds.
void append_segments(const Allocators& core, const History& history, DeviceIndex device,
                     Segments* segments);

// Joins two traces of a device in order of time. Those of `core` still have the approximate clock's
// times; those of `native` have microseconds already, as torch's snapshots have.
Trace join_traces(Trace core, Trace native, const ToUnixTime& to_nanoseconds);

}  // namespace vramx
