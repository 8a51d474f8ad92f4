// Binds the allocator on a simulated device, which is how Python's tests drive the core.
//
// One object owns both. Failures become exceptions: MemoryError for out of memory, ValueError for a
// caller's mistake, RuntimeError for what a driver call reported.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "bindings_values.h"
#include "core/device_allocator.h"
#include "core/surroundings.h"
#include "driver/sim_driver.h"

namespace vramx::bindings {
namespace {

namespace py = pybind11;

class SimulatedDevice {
 public:
  SimulatedDevice(std::uint64_t capacity, std::uint64_t granularity, bool has_bytes,
                  std::uint64_t limit, const std::string& cross_stream, std::size_t trace_events) {
    auto driver = SimDriver::open({.capacity = Bytes{capacity},
                                   .granularity = Bytes{granularity},
                                   .mode = has_bytes ? SimMode::kBytes : SimMode::kAccounting});
    if (!driver.ok()) throw py::value_error("capacity or granularity is not accepted");
    driver_ = std::move(driver.value());
    AllocatorConfig config;
    config.cross_stream = cross_stream_named(cross_stream);
    config.trace_events = trace_events;
    config.patience = {};  // nothing moves on a simulated device while a request waits
    // The host's addresses are fewer than a device's.
    config.alias_addresses = round_up(Bytes{capacity}, Bytes{granularity}) * 64;
    if (limit != 0) config.limit = Bytes{limit};
    auto allocator = DeviceAllocator::create(*driver_, config);
    if (!allocator.ok()) throw std::runtime_error(allocator.status().call);
    allocator_ = std::move(allocator.value());
    allocator_->set_surroundings(&surroundings_);
  }

  std::uint64_t allocate(std::uint64_t size, std::uint64_t stream) {
    const Result<Address> made = [&] {
      const py::gil_scoped_release released;
      return allocator_->allocate(Bytes{size}, Stream{stream});
    }();
    if (!made.ok()) {
      PyErr_SetString(PyExc_MemoryError, allocator_->last_out_of_memory().message().c_str());
      throw py::error_already_set();
    }
    return made.value().value;
  }

  void free(std::uint64_t address) { require(allocator_->free(Address{address})); }
  void record_stream(std::uint64_t address, std::uint64_t stream) {
    const StreamName name{Stream{stream}, driver_->ordinal()};
    require(allocator_->record_stream(Address{address}, name, true));
  }
  void fill(std::uint64_t address, std::uint64_t size, std::uint32_t pattern) {
    require(driver_->fill(Address{address}, Bytes{size}, pattern, Stream::kDefault));
  }
  std::uint64_t count_mismatches(std::uint64_t address, std::uint64_t size, std::uint32_t pattern) {
    const auto found =
        driver_->count_mismatches(Address{address}, Bytes{size}, pattern, Stream::kDefault);
    if (!found.ok()) throw std::runtime_error(found.status().call);
    return found.value();
  }

  DeviceAllocator& allocator() { return *allocator_; }
  SimDriver& driver() { return *driver_; }

 private:
  static void require(const Status& status) {
    if (status.ok()) return;
    if (status.code == StatusCode::kInvalidValue) throw py::value_error(status.call);
    throw std::runtime_error(status.call);
  }

  const LastingStreams surroundings_;
  std::unique_ptr<SimDriver> driver_;  // outlives the allocator
  std::unique_ptr<DeviceAllocator> allocator_;
};

}  // namespace

void bind_device(py::module_& module) {
  using Device = SimulatedDevice;
  py::class_<Device>(module, "SimulatedDevice")
      .def(py::init<std::uint64_t, std::uint64_t, bool, std::uint64_t, const std::string&,
                    std::size_t>(),
           py::arg("capacity_bytes"), py::arg("granularity_bytes") = 2 << 20,
           py::arg("has_bytes") = true, py::arg("limit_bytes") = 0,
           py::arg("cross_stream") = "under_pressure", py::arg("trace_events") = 0)
      .def("allocate", &Device::allocate, py::arg("size_bytes"), py::arg("stream") = 0)
      .def("free", &Device::free)
      .def("record_stream", &Device::record_stream)
      .def("fill", &Device::fill)
      .def("count_mismatches", &Device::count_mismatches)
      .def("trim", [](Device& d) { return report_dict(d.allocator().trim()); })
      .def("defragment", [](Device& d) { return report_dict(d.allocator().defragment()); })
      .def("set_limit", [](Device& d, std::uint64_t n) { d.allocator().set_limit(Bytes{n}); })
      .def("add_relief",
           [](Device& d, std::function<void()> callback) {
             d.allocator().add_relief([callback = std::move(callback)] {
               const py::gil_scoped_acquire acquired;
               callback();
             });
           })
      .def("owns", [](Device& d, std::uint64_t a) { return d.allocator().owns(Address{a}); })
      .def("stats", [](Device& d) { return stats_dict(d.allocator().stats()); })
      .def("reset_peak_stats", [](Device& d) { d.allocator().reset_peak_stats(); })
      .def("reset_accumulated_stats", [](Device& d) { d.allocator().reset_accumulated_stats(); })
      .def("layout", [](Device& d) { return layout_list(d.allocator()); })
      .def("events", [](Device& d) { return events_list(d.allocator()); })
      .def("check",
           [](Device& d) {
             const std::string broken = d.allocator().check();
             return broken.empty() ? d.driver().check() : broken;
           })
      .def("driver_calls", [](Device& d) { return d.driver().calls().total(); })
      .def("waits", [](Device& d) { return d.driver().call_count(CallKind::kWaitEvent); })
      .def("submit",
           [](Device& d, std::uint64_t s) { d.driver().submit(Stream{s}).status().ignore(); })
      .def("advance", [](Device& d, std::uint64_t s,
                         std::uint64_t items) { d.driver().advance(Stream{s}, items); })
      .def("advance_all", [](Device& d) { d.driver().advance_all(); })
      .def("fail_nth_call", [](Device& d, std::uint64_t n) {
        d.driver().fail_nth_call(n, StatusCode::kOutOfMemory);
      });
}

}  // namespace vramx::bindings
