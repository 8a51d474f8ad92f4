// The devices as the plain functions that torch's CUDAPluggableAllocator takes by name: what is
// left on a machine without a compiler for the shim.
//
// The functions are exported from vramx._core and looked up there:
//
//   vramx_plain_malloc, vramx_plain_free                     the allocator's two functions
//   vramx_plain_record_stream, vramx_plain_empty_cache,
//   vramx_plain_memory_fraction, vramx_plain_begin_pool      for the setters of the same meaning
//
// They throw std::runtime_error, which torch turns into a RuntimeError of that text: the one place
// here that throws, because a null address would not be noticed before a kernel uses it. Statistics
// and graphs are not to be had this way. Thread-safe.
#pragma once

#include "process/devices.h"

namespace vramx {

// The devices that the functions use from now on; null for none, when all of them do nothing or
// throw. Not owned.
void serve_plain_calls(Devices* devices);

}  // namespace vramx
