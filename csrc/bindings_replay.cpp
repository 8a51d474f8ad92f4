// Binds replay: a trace's arrays in, figures and timelines out. The loop runs without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "bindings_values.h"
#include "replay/replay.h"

namespace vramx::bindings {
namespace {

namespace py = pybind11;
using replay::Policy;

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
std::span<const T> view(const Array<T>& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

Policy policy_named(const std::string& name) {
  if (name == "live") return Policy::kLive;
  if (name == "native") return Policy::kNative;
  if (name == "expandable") return Policy::kExpandable;
  if (name == "vramx") return Policy::kVramx;
  throw py::value_error("policy '" + name +
                        "' is unknown; accepted are live, native, expandable, vramx");
}

replay::CoreOptions::Device device_named(const std::string& name) {
  if (name == "sim") return replay::CoreOptions::Device::kSimulated;
  if (name == "cuda") return replay::CoreOptions::Device::kCuda;
  throw py::value_error("driver '" + name + "' is unknown; accepted are sim, cuda");
}

[[noreturn]] void fail(const Status& status) {
  throw std::runtime_error(std::string("the device cannot be used: ") + status.call +
                           " failed with code " + std::to_string(status.driver_code));
}

// Calls Python now and then. An exception there stops the run and is raised when it has ended.
class Reporter {
 public:
  explicit Reporter(py::object callback) : callback_(std::move(callback)) {}

  replay::Progress progress() {
    return [this](std::uint64_t done, std::uint64_t total) {
      const py::gil_scoped_acquire acquired;
      try {
        if (!callback_.is_none()) callback_(done, total);
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      } catch (py::error_already_set& error) {
        error_ = std::make_unique<py::error_already_set>(error);
        return false;
      }
      return true;
    };
  }

  void raise_if_stopped() const {
    if (error_) throw py::error_already_set(*error_);
  }

 private:
  py::object callback_;
  std::unique_ptr<py::error_already_set> error_;
};

py::array_t<std::uint64_t> counts(const std::vector<Bytes>& values) {
  py::array_t<std::uint64_t> array(static_cast<py::ssize_t>(values.size()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    array.mutable_at(static_cast<py::ssize_t>(i)) = values[i].count;
  }
  return array;
}

py::object timeline(const replay::Timeline& line) {
  if (line.time_us.empty()) return py::none();
  py::dict result;
  result["time_us"] =
      py::array_t<double>(static_cast<py::ssize_t>(line.time_us.size()), line.time_us.data());
  result["live_bytes"] = counts(line.live);
  result["reserved_bytes"] = counts(line.reserved);
  return result;
}

py::dict figures(const replay::RunResult& result) {
  py::dict calls;
  calls["create"] = result.calls.create;
  calls["map"] = result.calls.map;
  calls["set_access"] = result.calls.set_access;
  calls["unmap"] = result.calls.unmap;
  calls["release"] = result.calls.release;
  py::dict figures;
  figures["peak_reserved_bytes"] = result.peak_reserved.count;
  figures["peak_allocated_bytes"] = result.peak_allocated.count;
  figures["oom"] = result.is_out_of_memory;
  figures["oom_event"] = result.out_of_memory_event;
  figures["ns_per_event"] = result.ns_per_event;
  figures["driver_calls"] = calls;
  figures["driver_us"] = result.calls.total_us;
  figures["driver_us_second_half"] = result.driver_us_second_half;
  figures["driver_calls_second_half"] = result.calls_second_half;
  figures["retries"] = result.retries;
  figures["mismatches"] = result.mismatches;
  figures["waits"] = result.waits;
  figures["peak_in_use_bytes"] = result.peak_in_use.count;
  figures["host_bytes"] = result.host_bytes;
  figures["timeline"] = timeline(result.timeline);
  return figures;
}

class Replay {
 public:
  Replay(const Array<std::uint8_t>& op, const Array<std::uint32_t>& id,
         const Array<std::uint64_t>& size, const Array<std::uint8_t>& stream,
         const Array<std::uint32_t>& time_us) {
    std::string error;
    trace_ =
        replay::Trace::build({view(op), view(id), view(size), view(stream), view(time_us)}, &error);
    if (!error.empty()) throw py::value_error(error);
  }

  const replay::Trace& trace() const { return trace_; }

  py::dict run(const std::string& policy, std::uint64_t capacity, const std::string& driver,
               int device, std::size_t samples, py::object progress, std::uint32_t pattern_streams,
               std::optional<std::uint32_t> gpu_lag_us) {
    Reporter reporter(std::move(progress));
    replay::RunOptions options{.policy = policy_named(policy),
                               .device = device_named(driver),
                               .ordinal = device,
                               .pattern_streams = pattern_streams,
                               .gpu_lag_us = gpu_lag_us,
                               .samples = samples,
                               .progress = reporter.progress()};
    if (pattern_streams != 0 && options.device != replay::CoreOptions::Device::kCuda) {
      throw py::value_error(
          "pattern_streams needs driver cuda: without a GPU a replay has no bytes");
    }
    if (capacity != 0) options.capacity = Bytes{capacity};
    replay::RunResult result;
    {
      const py::gil_scoped_release released;
      result = replay::run(trace_, options);
    }
    reporter.raise_if_stopped();
    if (!result.status.ok()) fail(result.status);
    return figures(result);
  }

  std::uint64_t min_capacity(const std::string& policy, py::object progress) {
    Reporter reporter(std::move(progress));
    const replay::RunOptions options{.policy = policy_named(policy),
                                     .progress = reporter.progress()};
    replay::Capacity capacity;
    {
      const py::gil_scoped_release released;
      capacity = replay::min_capacity(trace_, options);
    }
    reporter.raise_if_stopped();
    if (!capacity.status.ok()) fail(capacity.status);
    return capacity.bytes.count;
  }

  py::list layout(const std::string& policy, std::int64_t event) const {
    if (policy_named(policy) != Policy::kVramx) {
      throw py::value_error("policy '" + policy + "' has no layout; accepted is vramx");
    }
    const std::size_t at = event < 0 ? trace_.peak_event() : static_cast<std::size_t>(event);
    const auto placed = replay::layout_after(trace_, at);
    if (!placed.ok()) fail(placed.status());
    py::list spans;
    for (const replay::Placed& each : placed.value()) {
      py::dict span;
      span["address"] = each.address.value;
      span["size"] = each.size.count;
      span["kind"] =
          bindings::name_of<replay::Placed::Kind::kFree>(each.kind, {"block", "alias", "free"});
      span["allocation"] = each.id;
      spans.append(span);
    }
    return spans;
  }

 private:
  replay::Trace trace_;
};

}  // namespace

void bind_replay(py::module_& module) {
  py::class_<Replay>(module, "Replay")
      .def(py::init<const Array<std::uint8_t>&, const Array<std::uint32_t>&,
                    const Array<std::uint64_t>&, const Array<std::uint8_t>&,
                    const Array<std::uint32_t>&>(),
           py::arg("op"), py::arg("id"), py::arg("size"), py::arg("stream"), py::arg("time_us"))
      .def_property_readonly("events", [](const Replay& r) { return r.trace().events().size(); })
      .def_property_readonly("peak_live_bytes",
                             [](const Replay& r) { return r.trace().peak_live().count; })
      .def_property_readonly("peak_event", [](const Replay& r) { return r.trace().peak_event(); })
      .def_property_readonly(
          "trace_us", [](const Replay& r) { return static_cast<double>(r.trace().span_us()); })
      .def("run", &Replay::run, py::arg("policy"), py::arg("capacity_bytes") = 0,
           py::arg("driver") = "sim", py::arg("device") = 0, py::arg("samples") = 0,
           py::arg("progress") = py::none(), py::arg("pattern_streams") = 0,
           py::arg("gpu_lag_us") = py::none())
      .def("min_capacity", &Replay::min_capacity, py::arg("policy"),
           py::arg("progress") = py::none())
      .def("layout", &Replay::layout, py::arg("policy") = "vramx", py::arg("event") = -1);
}

}  // namespace vramx::bindings
