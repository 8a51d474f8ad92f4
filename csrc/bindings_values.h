// The allocator's answers as Python's dicts and lists, and Python's words as its settings: what the
// bindings of the simulated device and of the process share. vramx/_core.pyi has their types.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>

#include "core/device_allocator.h"

namespace vramx::bindings {

// An enumerator's name: all up to the last have one.
template <auto kLast, std::size_t n>
const char* name_of(decltype(kLast) value, const char* const (&names)[n]) {
  static_assert(n == static_cast<std::size_t>(kLast) + 1, "an enumerator without a name");
  return names[static_cast<std::size_t>(value)];
}

pybind11::dict stats_dict(const AllocatorStats& stats);
pybind11::dict report_dict(const DefragmentReport& report);
pybind11::list layout_list(const DeviceAllocator& allocator);
pybind11::list events_list(const DeviceAllocator& allocator);
pybind11::dict driver_calls_dict(const DriverCalls& calls);
// Raises ValueError for a name that is unknown.
CrossStream cross_stream_named(const std::string& name);

}  // namespace vramx::bindings
