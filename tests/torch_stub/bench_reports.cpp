// torch's allocator interface as C functions: statistics, history, snapshots, as JSON.
#include <c10/util/ThreadLocalDebugInfo.h>

#include <thread>

#include "bench.h"

namespace vramx::stub {
namespace {

// --- the context of a fake recorder ---

struct NumberedContext final : c10::GatheredContext {
  int number = 0;
};

int gathered = 0;

Context gather() {
  auto context = std::make_shared<NumberedContext>();
  context->number = ++gathered;
  return context;
}

std::string number_of(const Context& context) {
  return number(context ? static_cast<const NumberedContext&>(*context).number : 0);
}

const char* name_of(TraceEntry::Action action) {
  switch (action) {
    case TraceEntry::ALLOC:
      return "alloc";
    case TraceEntry::FREE_REQUESTED:
      return "free_requested";
    case TraceEntry::FREE_COMPLETED:
      return "free_completed";
    case TraceEntry::SEGMENT_MAP:
      return "segment_map";
    case TraceEntry::SEGMENT_UNMAP:
      return "segment_unmap";
    case TraceEntry::SNAPSHOT:
      return "snapshot";
    case TraceEntry::OOM:
      return "oom";
    default:
      return "other";
  }
}

std::string json(const TraceEntry& entry) {
  return object({{"action", quoted(name_of(entry.action_))},
                 {"device", number(entry.device_)},
                 {"addr", number(entry.addr_)},
                 {"size", number(entry.size_)},
                 {"time_us", number(entry.time_.t_)},
                 {"context", number_of(entry.context_)},
#if VRAMX_TORCH >= 208
                 {"compile_context", quoted(entry.compile_context_)},
#endif
#if VRAMX_TORCH >= 210
                 {"user_metadata", quoted(entry.user_metadata_)},
#endif
                 {"stream", number(reinterpret_cast<std::size_t>(entry.stream_))}});
}

std::string json(const torch_cuda::SegmentInfo& segment) {
  std::vector<std::string> blocks;
  for (const torch_cuda::BlockInfo& block : segment.blocks) {
    blocks.push_back(object({{"size", number(block.size)},
                             {"requested_size", number(block.requested_size)},
                             {"allocated", block.allocated ? "true" : "false"},
                             {"active", block.active ? "true" : "false"},
                             {"context", number_of(block.context_when_allocated)}}));
  }
  return object({{"device", number(segment.device)},
                 {"address", number(segment.address)},
                 {"total_size", number(segment.total_size)},
                 {"allocated_size", number(segment.allocated_size)},
                 {"active_size", number(segment.active_size)},
                 {"requested_size", number(segment.requested_size)},
                 {"stream", number(reinterpret_cast<std::size_t>(segment.stream))},
                 {"is_expandable", segment.is_expandable ? "true" : "false"},
                 {"is_large", segment.is_large ? "true" : "false"},
                 {"blocks", list(blocks)}});
}

template <class Array>
std::string json_stats(const Array& array) {
  std::vector<std::string> pools;
  for (const auto& stat : array) {
    pools.push_back(list(
        {number(stat.current), number(stat.peak), number(stat.allocated), number(stat.freed)}));
  }
  return list(pools);
}

std::vector<TraceEntry>& tracked() {
  static auto* entries = new std::vector<TraceEntry>;
  return *entries;
}

std::vector<std::string>& observed() {
  static auto* calls = new std::vector<std::string>;
  return *calls;
}

// What torch's profiler puts in place.
struct Profiler final : c10::MemoryReportingInfoBase {
  std::vector<std::string> reports;

  void reportMemoryUsage(void* pointer, int64_t change, size_t allocated, size_t reserved,
                         c10::Device device) override {
    reports.push_back(list({number(reinterpret_cast<std::size_t>(pointer)), number(change),
                            number(allocated), number(reserved), number(device.index())}));
  }
  void reportOutOfMemory(int64_t size, size_t allocated, size_t reserved,
                         c10::Device device) override {
    reports.push_back(list(
        {number(0), number(size), number(allocated), number(reserved), number(device.index())}));
  }
  bool memoryProfilingEnabled() const override { return true; }
};

std::shared_ptr<Profiler>& profiler() {
  static auto* profiler = new std::shared_ptr<Profiler>;
  return *profiler;
}

}  // namespace
}  // namespace vramx::stub

using namespace vramx;        // NOLINT: this file is the other side of the interface
using namespace vramx::stub;  // NOLINT

// --- statistics ---

BENCH const char* bench_stats(int device) {
  return guarded([&] {
    const DeviceStats s = current().getDeviceStats(static_cast<DeviceIndex>(device));
    return keep(object({{"allocation", json_stats(s.allocation)},
                        {"segment", json_stats(s.segment)},
                        {"active", json_stats(s.active)},
                        {"inactive_split", json_stats(s.inactive_split)},
                        {"allocated_bytes", json_stats(s.allocated_bytes)},
                        {"reserved_bytes", json_stats(s.reserved_bytes)},
                        {"active_bytes", json_stats(s.active_bytes)},
                        {"inactive_split_bytes", json_stats(s.inactive_split_bytes)},
                        {"requested_bytes", json_stats(s.requested_bytes)},
                        {"num_alloc_retries", number(s.num_alloc_retries)},
                        {"num_ooms", number(s.num_ooms)},
                        {"num_device_alloc", number(s.num_device_alloc)},
                        {"num_device_free", number(s.num_device_free)},
                        {"max_split_size", number(s.max_split_size)}}));
  });
}
BENCH void bench_reset_peaks(int device) {
  guarded([&] { current().resetPeakStats(static_cast<DeviceIndex>(device)); });
}
BENCH void bench_reset_accumulated(int device) {
  guarded([&] { current().resetAccumulatedStats(static_cast<DeviceIndex>(device)); });
}

BENCH void bench_start_profiler() {
  profiler() = std::make_shared<Profiler>();
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, profiler());
}
BENCH const char* bench_stop_profiler() {
  c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
  return keep(list(profiler()->reports));
}

// --- history ---

// `level` is torch's: 0 for none, 1 state, 2 alloc, 3 all.
BENCH void bench_record_history(int enabled, std::size_t entries, int level, const char* skipped) {
  guarded([&] {
    const auto when = static_cast<torch_cuda::RecordContext>(level);
#if VRAMX_TORCH >= 211
    std::vector<std::string> skips;
    if (*skipped != 0) skips.emplace_back(skipped);
    current().recordHistory(enabled != 0, gather, entries, when, true, skips);
#elif VRAMX_TORCH >= 208
    (void)skipped;
    current().recordHistory(enabled != 0, gather, entries, when, true);
#else
    (void)skipped;
    current().recordHistory(enabled != 0, gather, entries, when);
#endif
  });
}
BENCH int bench_is_history_enabled() { return current().isHistoryEnabled(); }
BENCH void bench_labels(const char* compile_context, const char* user_metadata) {
#if VRAMX_TORCH >= 208
  std::string label = compile_context;
  current().pushCompileContext(label);
#endif
#if VRAMX_TORCH >= 210
  current().setUserMetadata(user_metadata);
#endif
  (void)compile_context;
  (void)user_metadata;
}
BENCH const char* bench_user_metadata() {
#if VRAMX_TORCH >= 210
  return keep(current().getUserMetadata());
#else
  return "";
#endif
}
BENCH const char* bench_snapshot([[maybe_unused]] unsigned long long pool) {
  return guarded([&] {
#if VRAMX_TORCH >= 208
    const torch_cuda::SnapshotInfo info = current().snapshot({0, pool});
#else
    const torch_cuda::SnapshotInfo info = current().snapshot();
#endif
    std::vector<std::string> segments;
    std::vector<std::string> traces;
    for (const auto& segment : info.segments) segments.push_back(json(segment));
    for (const auto& trace : info.device_traces) {
      std::vector<std::string> entries;
      for (const TraceEntry& entry : trace) entries.push_back(json(entry));
      traces.push_back(list(entries));
    }
    return keep(object({{"segments", list(segments)},
                        {"device_traces", list(traces)},
                        {"max_split_size", number(info.config_metadata.max_split_size)}}));
  });
}
BENCH void bench_attach_tracker() {
  current().attachAllocatorTraceTracker([](const TraceEntry& e) { tracked().push_back(e); });
}
BENCH const char* bench_tracked() {
  std::vector<std::string> entries;
  for (const TraceEntry& entry : tracked()) entries.push_back(json(entry));
  tracked().clear();
  return keep(list(entries));
}
BENCH void bench_attach_observer() {
  current().attachOutOfMemoryObserver(
      [](std::int64_t device, std::size_t size, std::size_t allowed, std::size_t free) {
        observed().push_back(list({number(device), number(size), number(allowed), number(free)}));
      });
}
// One that asks and allocates on another thread and waits for it: with any of the allocator's locks
// in its caller's hand neither would end.
BENCH void bench_attach_waiting_observer() {
  current().attachOutOfMemoryObserver(
      [](std::int64_t device, std::size_t, std::size_t, std::size_t) {
        std::thread([device] {
#if VRAMX_TORCH >= 208
          const auto info = current().snapshot({0, 0});
#else
          const auto info = current().snapshot();
#endif
          void* const pointer = current().raw_alloc(512);
          current().raw_delete(pointer);
          observed().push_back(list({number(device), number(info.segments.size())}));
        }).join();
      });
}
BENCH const char* bench_observed() {
  const std::string calls = list(observed());
  observed().clear();
  return keep(calls);
}
BENCH int bench_context_of(void* pointer) {
#if VRAMX_TORCH >= 212
  const Context context = current().getContextForPointer(pointer);
  return context ? static_cast<const NumberedContext&>(*context).number : 0;
#else
  (void)pointer;
  return -1;
#endif
}
