// The Python module vramx._core: facts about the machine, and the doors to the other bindings.
//
// No logic: arguments become the core's types and its answers become Python's. vramx/_core.pyi has
// the types that Python sees.
#include "bindings.h"

#include <pybind11/stl.h>

#include "driver/cuda_probe.h"
#include "replay/core_benchmark.h"

namespace vramx::bindings {
namespace {

namespace py = pybind11;

py::dict device_facts(const CudaDeviceFacts& facts) {
  py::dict result;
  result["name"] = facts.name;
  result["total_bytes"] = facts.total_memory.count;
  result["granularity_bytes"] = facts.granularity.count;
  result["vmm_supported"] = facts.has_virtual_memory;
  result["posix_handles"] = facts.has_posix_handles;
  result["fabric_handles"] = facts.has_fabric_handles;
  result["compute_capability"] = std::to_string(facts.compute_capability_major) + "." +
                                 std::to_string(facts.compute_capability_minor);
  return result;
}

py::dict cuda_facts() {
  const CudaProbe probe = probe_cuda();
  py::list devices;
  for (const CudaDeviceFacts& facts : probe.devices) devices.append(device_facts(facts));
  py::dict result;
  result["error"] = probe.error;
  result["driver_version"] = probe.driver_version;
  result["devices"] = devices;
  return result;
}

py::dict benchmark_core(std::uint64_t live_blocks, std::uint64_t operations, std::uint64_t low,
                        std::uint64_t high, std::uint32_t threads) {
  if (live_blocks == 0 || operations == 0 || threads == 0 || low == 0 || high < low) {
    throw py::value_error("blocks, operations, threads and sizes must be positive and in order");
  }
  replay::CoreCost cost;
  {
    const py::gil_scoped_release released;
    cost = replay::measure_core({live_blocks, operations, Bytes{low}, Bytes{high}, threads});
  }
  if (cost.is_out_of_memory) throw py::value_error("the blocks do not fit into 16 TiB");
  py::dict result;
  result["ns_per_operation"] = cost.ns_per_operation;
  result["bytes_per_block"] = cost.bytes_per_block;
  return result;
}

}  // namespace
}  // namespace vramx::bindings

PYBIND11_MODULE(_core, module) {
  namespace py = pybind11;
  namespace bindings = vramx::bindings;
  module.doc() = "The compiled core of vramx: allocator, drivers and replay.";
  module.def("probe_cuda", &bindings::cuda_facts);
  module.def("benchmark_core", &bindings::benchmark_core, py::arg("live_blocks"),
             py::arg("operations"), py::arg("size_bytes_low"), py::arg("size_bytes_high"),
             py::arg("threads"));
  bindings::bind_replay(module);
  bindings::bind_device(module);
  bindings::bind_process(module);
  bindings::bind_looks(module);
}
