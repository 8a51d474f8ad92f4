// What is reported about memory: statistics, snapshots, history. Each answer is that of both sides.
#include <algorithm>

#include "torch/shim.h"
#include "torch/snapshot.h"

namespace vramx {

DeviceStats Shim::getDeviceStats(DeviceIndex device) {
  check_device(device);
  return statistics_.read(device);
}

void Shim::resetAccumulatedStats(DeviceIndex device) {
  check_device(device);
  statistics_.reset_accumulated(device);
}

void Shim::resetPeakStats(DeviceIndex device) {
  check_device(device);
  statistics_.reset_peaks(device);
}

// --- snapshot ---------------------------------------------------------------------------------

// A pool is native's alone.
#if VRAMX_TORCH >= 211
torch_cuda::SnapshotInfo Shim::snapshot(MempoolId_t pool, bool include_traces) {
  torch_cuda::SnapshotInfo info = native_.snapshot(pool, include_traces);
  return pool == MempoolId_t{0, 0} ? join_snapshot(std::move(info), include_traces) : info;
}
#elif VRAMX_TORCH >= 208
torch_cuda::SnapshotInfo Shim::snapshot(MempoolId_t pool) {
  torch_cuda::SnapshotInfo info = native_.snapshot(pool);
  return pool == MempoolId_t{0, 0} ? join_snapshot(std::move(info), true) : info;
}
#else
torch_cuda::SnapshotInfo Shim::snapshot() { return join_snapshot(native_.snapshot(), true); }
#endif

torch_cuda::SnapshotInfo Shim::join_snapshot(torch_cuda::SnapshotInfo info, bool include_traces) {
  const auto devices = static_cast<std::size_t>(device_count());
  const ToUnixTime to_nanoseconds = clock_.makeConverter();
  if (info.device_traces.size() < devices) info.device_traces.resize(devices);
  for (std::size_t i = 0; i < devices; ++i) {
    const auto device = static_cast<DeviceIndex>(i);
    append_segments(core_, history_, device, &info.segments);
    if (include_traces) {
      Trace& trace = info.device_traces[i];
      trace = join_traces(history_.entries(device), std::move(trace), to_nanoseconds);
    }
    const std::size_t active = core_.allocated(device).count + statistics_.native_allocated(device);
    history_.record({TraceEntry::SNAPSHOT, device, 0, active}, nullptr);
  }
  return info;
}

// --- history ----------------------------------------------------------------------------------

#if VRAMX_TORCH >= 211
void Shim::recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                         RecordContext when, bool clears, const std::vector<std::string>& skipped) {
  native_.recordHistory(enabled, recorder, max_entries, when, clears, skipped);
  history_.configure({enabled, recorder, max_entries, when, clears, skipped});
}
#elif VRAMX_TORCH >= 208
void Shim::recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                         RecordContext when, bool clears) {
  native_.recordHistory(enabled, recorder, max_entries, when, clears);
  history_.configure({enabled, recorder, max_entries, when, clears, {}});
}
#else
void Shim::recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                         RecordContext when) {
  native_.recordHistory(enabled, recorder, max_entries, when);
  history_.configure({enabled, recorder, max_entries, when, !enabled, {}});
}
#endif

// Kept by native alone, whose annotations a joint snapshot takes over.
void Shim::recordAnnotation(const std::vector<std::pair<std::string, std::string>>& labels) {
  native_.recordAnnotation(labels);
}

void Shim::attachAllocatorTraceTracker(Tracker tracker) {
  native_.attachAllocatorTraceTracker(tracker);
  history_.attach(std::move(tracker));
}

#if VRAMX_TORCH >= 208
void Shim::pushCompileContext(std::string& label) {
  native_.pushCompileContext(label);
  history_.push_compile_context(label);
}

void Shim::popCompileContext() {
  native_.popCompileContext();
  history_.pop_compile_context();
}
#endif

#if VRAMX_TORCH >= 210
// Native looks at the current device's own allocator, of which there is none before init().
void Shim::setUserMetadata(const std::string& metadata) {
  if (native_.initialized()) native_.setUserMetadata(metadata);
  History::set_user_metadata(metadata);
}

std::string Shim::getUserMetadata() {
  return native_.initialized() ? native_.getUserMetadata() : History::user_metadata();
}
#endif

#if VRAMX_TORCH >= 212
Context Shim::getContextForPointer(const void* pointer) {
  return is_of_core(pointer) ? history_.context_of(pointer) : native_.getContextForPointer(pointer);
}
#endif

#if VRAMX_TORCH >= 214
void Shim::annotateMemory(const void* pointer, const std::string& metadata) {
  CoreBlock block;
  if (core_.find(address_of(pointer), &block) != CoreCode::kOk) {
    native_.annotateMemory(pointer, metadata);
    return;
  }
  history_.annotate({TraceEntry::ANNOTATE, static_cast<DeviceIndex>(block.device),
                     block.address.value, block.requested.count},
                    metadata);
}
#endif

}  // namespace vramx
