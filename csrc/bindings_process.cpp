// Binds the device allocators of the process: those of its GPUs and simulated ones.
//
// What Python gets is a handle. Devices on GPUs are never destroyed, because their blocks may be
// freed until the process is gone; simulated ones go with their handle.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_values.h"
#include "driver/sim_driver.h"
#include "process/allocators.h"
#include "process/devices.h"
#include "process/plain.h"

namespace vramx::bindings {
namespace {

namespace py = pybind11;
using Released = py::call_guard<py::gil_scoped_release>;

class DevicesHandle {
 public:
  enum class Lifetime { kOfProcess, kOfHandle };

  DevicesHandle(std::unique_ptr<Devices> devices, Lifetime lifetime)
      : lifetime_(lifetime), devices_(devices.release()) {}
  ~DevicesHandle() {
    if (lifetime_ == Lifetime::kOfHandle) delete devices_;
  }
  DevicesHandle(const DevicesHandle&) = delete;
  DevicesHandle& operator=(const DevicesHandle&) = delete;

  Devices& operator*() const { return *devices_; }
  Devices* operator->() const { return devices_; }

  // Raises ValueError before the device's start.
  DeviceAllocator& started(int device) const {
    DeviceAllocator* const allocator = devices_->started(device);
    if (allocator != nullptr) return *allocator;
    throw py::value_error("device " + std::to_string(device) + " was not started");
  }

 private:
  const Lifetime lifetime_;
  Devices* const devices_;
};
using Handle = std::unique_ptr<DevicesHandle>;

AllocatorConfig config_for(std::uint64_t limit, const std::string& cross_stream,
                           std::size_t trace_events) {
  AllocatorConfig config;
  if (limit != 0) config.limit = Bytes{limit};
  config.cross_stream = cross_stream_named(cross_stream);
  config.trace_events = trace_events;
  return config;
}

Handle open_gpus(std::uint64_t limit, const std::string& cross_stream, std::size_t trace_events,
                 const std::optional<std::vector<int>>& devices) {
  DevicesOptions options{config_for(limit, cross_stream, trace_events), !devices, {}};
  if (devices) options.devices = *devices;
  auto opened = std::make_unique<Devices>(std::make_unique<GpuSource>(), std::move(options));
  serve_plain_calls(opened.get());
  return std::make_unique<DevicesHandle>(std::move(opened), DevicesHandle::Lifetime::kOfProcess);
}

Handle open_simulated(int count, std::uint64_t capacity, std::uint64_t granularity, bool has_bytes,
                      std::uint64_t limit, const std::string& cross_stream,
                      std::size_t trace_events) {
  const SimOptions options{.capacity = Bytes{capacity},
                           .granularity = Bytes{granularity},
                           .mode = has_bytes ? SimMode::kBytes : SimMode::kAccounting};
  if (count < 1 || count > Devices::kMostDevices) {
    throw py::value_error("count " + std::to_string(count) + " is not accepted: 1 to " +
                          std::to_string(Devices::kMostDevices));
  }
  if (capacity == 0 || !SimDriver::open(options).ok()) {
    throw py::value_error("capacity or granularity is not accepted");
  }
  DevicesOptions of_all{config_for(limit, cross_stream, trace_events), true, {}};
  // The host's addresses are fewer than a device's.
  of_all.config.alias_addresses = round_up(options.capacity, options.granularity) * 64;
  auto opened = std::make_unique<Devices>(std::make_unique<SimulatedSource>(count, options),
                                          std::move(of_all));
  return std::make_unique<DevicesHandle>(std::move(opened), DevicesHandle::Lifetime::kOfHandle);
}

py::dict stats_of(const DevicesHandle& handle, int device) {
  return stats_dict(handle->stats(device));
}

py::dict driver_calls_of(const DevicesHandle& handle, int device) {
  DriverCalls sum;
  handle->for_each_started(device, [&](int number, const DeviceAllocator&) {
    const DriverCalls calls = handle->driver(number)->calls();
    sum.create += calls.create;
    sum.map += calls.map;
    sum.set_access += calls.set_access;
    sum.unmap += calls.unmap;
    sum.release += calls.release;
    sum.total_us += calls.total_us;
  });
  return driver_calls_dict(sum);
}

py::dict defragment(const DevicesHandle& handle, int device) {
  DefragmentReport sum;
  {
    const py::gil_scoped_release released;
    handle->for_each_started(device, [&](int, DeviceAllocator& allocator) {
      const DefragmentReport report = allocator.defragment();
      sum.aliases_collected += report.aliases_collected;
      sum.alias_addresses += report.alias_addresses;
      sum.extents_before += report.extents_before;
      sum.extents_after += report.extents_after;
      sum.chunks_released += report.chunks_released;
      sum.released += report.released;
    });
  }
  return report_dict(sum);
}

std::string check(const DevicesHandle& handle, int device) {
  std::string broken;
  handle->for_each_started(device, [&](int number, const DeviceAllocator& allocator) {
    std::string found = allocator.check();
    const auto* const simulated = dynamic_cast<const SimDriver*>(handle->driver(number));
    if (found.empty() && simulated != nullptr) found = simulated->check();
    if (broken.empty() && !found.empty()) broken = "GPU " + std::to_string(number) + ": " + found;
  });
  return broken;
}

std::vector<int> numbers_of_started(const DevicesHandle& handle) {
  std::vector<int> numbers;
  handle->for_each_started(Devices::kAll,
                           [&](int device, DeviceAllocator&) { numbers.push_back(device); });
  return numbers;
}

void bind_openers(py::module_& module) {
  module.def("open_gpus", &open_gpus, py::arg("limit_bytes") = 0,
             py::arg("cross_stream") = "under_pressure", py::arg("trace_events") = 0,
             py::arg("devices") = py::none());
  module.def("open_simulated", &open_simulated, py::arg("count"), py::arg("capacity_bytes"),
             py::arg("granularity_bytes") = 2 << 20, py::arg("has_bytes") = true,
             py::arg("limit_bytes") = 0, py::arg("cross_stream") = "under_pressure",
             py::arg("trace_events") = 0);
}

// What the shim does through the interface, for tests: a block's code and address.
std::pair<int, std::uint64_t> allocate(const DevicesHandle& handle, int device, std::uint64_t size,
                                       std::uint64_t stream) {
  Address address;
  const CoreCode code = handle->allocate(device, Bytes{size}, Stream{stream}, &address);
  return {static_cast<int>(code), address.value};
}

int free_block(const DevicesHandle& handle, std::uint64_t address) {
  return static_cast<int>(handle->free(Address{address}, nullptr));
}

void bind_blocks(py::class_<DevicesHandle>& devices) {
  devices.def("allocate", &allocate, py::arg("device"), py::arg("size_bytes"),
              py::arg("stream") = 0, Released());
  devices.def("free", &free_block, py::arg("address"), Released());
  devices.def("out_of_memory_text", [](const DevicesHandle& h) { return h->out_of_memory_text(); });
  devices.def("failure_text", [](const DevicesHandle& h) { return h->failure_text(); });
}

}  // namespace

void bind_process(py::module_& module) {
  py::class_<DevicesHandle> devices(module, "Devices");
  bind_blocks(devices);
  devices
      .def_property_readonly(
          "handle_address",
          [](const DevicesHandle& h) { return reinterpret_cast<std::uintptr_t>(&h->handle()); })
      .def("started", &numbers_of_started)
      .def("stats", &stats_of, py::arg("device"))
      .def("driver_calls", &driver_calls_of, py::arg("device") = Devices::kAll)
      .def(
          "trim", [](const DevicesHandle& h, int device) { h->trim(device); },
          py::arg("device") = Devices::kAll, Released())
      .def("defragment", &defragment, py::arg("device") = Devices::kAll)
      .def(
          "set_limit",
          [](const DevicesHandle& h, int device, std::uint64_t limit) {
            h->set_limit(device, Bytes{limit});
          },
          py::arg("device"), py::arg("limit_bytes"), Released())
      .def("check", &check, py::arg("device") = Devices::kAll)
      .def(
          "held", [](const DevicesHandle& h, int device) { return h->held(device).count; },
          py::arg("device") = Devices::kAll)
      .def(
          "allocated",
          [](const DevicesHandle& h, int device) { return h->allocated(device).count; },
          py::arg("device") = Devices::kAll)
      .def(
          "layout",
          [](const DevicesHandle& h, int device) { return layout_list(h.started(device)); },
          py::arg("device"))
      .def(
          "events",
          [](const DevicesHandle& h, int device) { return events_list(h.started(device)); },
          py::arg("device"));
  bind_openers(module);
}

}  // namespace vramx::bindings
