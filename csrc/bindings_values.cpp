#include "bindings_values.h"

#include <string>

namespace vramx::bindings {
namespace {

namespace py = pybind11;

py::dict counter(const Counter& counter) {
  py::dict result;
  result["current"] = counter.current;
  result["peak"] = counter.peak;
  result["allocated"] = counter.allocated;
  result["freed"] = counter.freed;
  return result;
}

py::dict by_pool(const PoolCounters& counters) {
  py::dict result;
  result["all"] = counter(counters[0]);
  result["small_pool"] = counter(counters[1]);
  result["large_pool"] = counter(counters[2]);
  return result;
}

}  // namespace

py::dict stats_dict(const AllocatorStats& stats) {
  py::dict result;
  result["allocation"] = by_pool(stats.allocation);
  result["allocated_bytes"] = by_pool(stats.allocated_bytes);
  result["requested_bytes"] = by_pool(stats.requested_bytes);
  result["segment"] = counter(stats.segment);
  result["reserved_bytes"] = counter(stats.reserved_bytes);
  result["inactive_split"] = counter(stats.inactive_split);
  result["inactive_split_bytes"] = counter(stats.inactive_split_bytes);
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  result["num_sync_all_streams"] = stats.num_sync_all_streams;
  result["num_device_alloc"] = stats.num_device_alloc;
  result["num_device_free"] = stats.num_device_free;
  result["alias_count"] = stats.alias_count;
  result["alias_mappings"] = stats.alias_mappings;
  result["alias_bytes"] = stats.alias_bytes;
  result["num_alias_hits"] = stats.num_alias_hits;
  result["num_stitches"] = stats.num_stitches;
  result["num_growths"] = stats.num_growths;
  result["num_cross_stream"] = stats.num_cross_stream;
  result["host_bytes"] = stats.host_bytes;
  return result;
}

py::dict report_dict(const DefragmentReport& report) {
  py::dict result;
  result["aliases_collected"] = report.aliases_collected;
  result["alias_address_bytes"] = report.alias_addresses.count;
  result["extents_before"] = report.extents_before;
  result["extents_after"] = report.extents_after;
  result["chunks_released"] = report.chunks_released;
  result["released_bytes"] = report.released.count;
  return result;
}

py::list layout_list(const DeviceAllocator& allocator) {
  py::list spans;
  for (const SpanInfo& span : allocator.layout()) {
    py::dict item;
    item["address"] = span.address.value;
    item["size"] = span.size.count;
    item["state"] =
        name_of<SpanState::kBorder>(span.state, {"used", "free", "unmapped", "building", "border"});
    item["block"] = span.block.value;
    spans.append(item);
  }
  return spans;
}

py::list events_list(const DeviceAllocator& allocator) {
  py::list result;
  for (const TraceEvent& event : allocator.events()) {
    const char* kind = name_of<TraceKind::kOutOfMemory>(
        event.kind,
        {"allocate", "free", "record_stream", "grow", "shrink", "stitch", "out_of_memory"});
    result.append(py::make_tuple(kind, event.address.value, event.size.count,
                                 static_cast<std::uint64_t>(event.stream)));
  }
  return result;
}

py::dict driver_calls_dict(const DriverCalls& calls) {
  py::dict result;
  result["create"] = calls.create;
  result["map"] = calls.map;
  result["set_access"] = calls.set_access;
  result["unmap"] = calls.unmap;
  result["release"] = calls.release;
  result["total_us"] = calls.total_us;
  return result;
}

CrossStream cross_stream_named(const std::string& name) {
  if (name == "never") return CrossStream::kNever;
  if (name == "under_pressure") return CrossStream::kUnderPressure;
  if (name == "always") return CrossStream::kAlways;
  throw py::value_error("cross_stream '" + name +
                        "' is unknown; accepted are never, under_pressure, always");
}

}  // namespace vramx::bindings
