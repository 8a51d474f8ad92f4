#include "native.h"

#include <cstdlib>

namespace vramx::stub {
namespace {

std::size_t rounded(std::size_t size) { return (size + 511) / 512 * 512; }

using Stat = decltype(DeviceStats::allocation)::value_type;

void change(Stat& stat, std::int64_t by) {
  by > 0 ? stat.increase(static_cast<std::size_t>(by))
         : stat.decrease(static_cast<std::size_t>(-by));
}

// A graph's own pool is told from one that a program named by its first number.
std::string name_of(MempoolId_t pool) {
  const bool is_named = pool.first == 0;
  return (is_named ? "" : "graph ") + std::to_string(is_named ? pool.second : pool.first);
}

// The deleters of cached and of uncached tensors, told apart by their addresses.
void delete_cached(void* pointer) { native().raw_delete(pointer); }
void delete_uncached(void* pointer) {
  native().journal.push_back("delete uncached");
  std::free(pointer);
}

}  // namespace

Native& native() {
  static auto* native = new Native;
  return *native;
}

void Native::init(int device_count) {
  while (static_cast<int>(devices_.size()) < device_count) devices_.emplace_back();
  for (Device& device : devices_) device.stats.max_split_size = 77;
}

// --- blocks -----------------------------------------------------------------------------------

c10::DataPtr Native::allocate(size_t size) {
  const DeviceIndex device = machine().device;
  if (is_enabled_) {
    void* const pointer = raw_alloc_with_stream(size, machine().stream);
    return {pointer, pointer, &delete_cached, cuda_device(device)};
  }
  note("allocate uncached");
  void* const pointer = std::malloc(size);
  return {pointer, pointer, &delete_uncached, cuda_device(device)};
}

c10::DeleterFnPtr Native::raw_deleter() const {
  return is_enabled_ ? &delete_cached : &delete_uncached;
}

void* Native::raw_alloc(size_t size) { return raw_alloc_with_stream(size, machine().stream); }

// In the order of the real one: the cache, the callbacks, the device.
void* Native::raw_alloc_with_stream(size_t size, cudaStream_t) {
  const DeviceIndex device = machine().device;
  note("allocate " + std::to_string(size));
  TORCH_CHECK(initialized(), "not initialised");
  void* pointer = from_cache(rounded(size), device);
  if (pointer == nullptr) {
    auto* const registry = c10::FreeCudaMemoryCallbacksRegistry();
    for (const std::string& key : registry->Keys()) registry->Create(key)->Execute();
    pointer = grow(rounded(size), device);
  }
  if (pointer == nullptr) {
    ++at(device).stats.num_ooms;
    for (const auto& observer : observers_) observer(device, size, 0, 0);
    C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory. (native)");
  }
  count(at(device), rounded(size), true);
  record(TraceEntry::ALLOC, device, pointer, size);
  return pointer;
}

void* Native::from_cache(std::size_t size, DeviceIndex device) {
  for (auto& [pointer, block] : blocks_) {
    if (block.is_live || block.size != size || block.device != device) continue;
    block.is_live = true;
    return pointer;
  }
  return nullptr;
}

bool Native::has_room(std::size_t size, DeviceIndex device) {
  const auto held = static_cast<double>(at(device).stats.reserved_bytes[0].current);
  const auto total = static_cast<double>(machine().total_bytes);
  return machine().free_bytes >= size &&
         held + static_cast<double>(size) <= at(device).fraction * total;
}

void* Native::grow(std::size_t size, DeviceIndex device) {
  machine().contexts.insert(device);
  if (!has_room(size, device)) return nullptr;
  const bool is_from_source = segment_source != nullptr;
  void* const pointer = is_from_source ? segment_source->raw_alloc(size) : std::malloc(size);
  if (pointer == nullptr) return nullptr;
  blocks_[pointer] = {size, device, true, is_from_source};
  change(at(device).stats.reserved_bytes[0], static_cast<std::int64_t>(size));
  ++at(device).stats.num_device_alloc;
  return pointer;
}

void Native::raw_delete(void* pointer) {
  const auto found = blocks_.find(pointer);
  TORCH_CHECK(found != blocks_.end() && found->second.is_live, "invalid device pointer");
  note("delete");
  found->second.is_live = false;
  count(at(found->second.device), found->second.size, false);
  record(TraceEntry::FREE_COMPLETED, found->second.device, pointer, found->second.size);
}

void Native::count(Device& device, std::size_t size, bool is_allocated) {
  const std::int64_t sign = is_allocated ? 1 : -1;
  const std::int64_t bytes = sign * static_cast<std::int64_t>(size);
  for (auto* array : {&device.stats.allocation, &device.stats.active}) change((*array)[0], sign);
  for (auto* array :
       {&device.stats.allocated_bytes, &device.stats.active_bytes, &device.stats.requested_bytes}) {
    change((*array)[0], bytes);
  }
}

#if VRAMX_TORCH >= 208
void Native::emptyCache(MempoolId_t pool) {
  note("empty cache " + std::to_string(pool.first) + "," + std::to_string(pool.second));
#else
void Native::emptyCache() {
  note("empty cache 0,0");
#endif
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    const Block& block = it->second;
    if (block.is_live) {
      ++it;
      continue;
    }
    change(at(block.device).stats.reserved_bytes[0], -static_cast<std::int64_t>(block.size));
    block.is_from_source ? segment_source->raw_delete(it->first) : std::free(it->first);
    it = blocks_.erase(it);
  }
}

// --- the rest -----------------------------------------------------------------------------------

// cudaMallocAsync makes a context, and up to torch 2.9 native makes the device current, which makes
// one as well.
void Native::touch_for_fraction(DeviceIndex device) {
  TORCH_CHECK(initialized(), "not initialised");
  if (name_ == "cudaMallocAsync" || machine().fractions_make_current) {
    machine().contexts.insert(device);
  }
  if (machine().fractions_make_current) machine().device = device;
}

double Native::getMemoryFraction(DeviceIndex device) {
  touch_for_fraction(device);
  return at(device).fraction;
}

void Native::setMemoryFraction(double fraction, DeviceIndex device) {
  touch_for_fraction(device);
  TORCH_CHECK(fraction >= 0 && fraction <= 1, "invalid fraction");
  at(device).fraction = fraction;
  ++fractions_set;
}

void Native::cacheInfo(DeviceIndex, size_t* largest) {
  note("cache info");
  *largest = machine().free_bytes;
}

void* Native::getBaseAllocation(void* pointer, size_t* size) {
  *size = blocks_.at(pointer).size;
  return pointer;
}

void Native::recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream) {
  if (data.get_deleter() == &delete_cached) note("record stream");
}

void Native::resetAccumulatedStats(DeviceIndex device) {
  at(device).stats.allocated_bytes[0].reset_accumulated();
}

void Native::resetPeakStats(DeviceIndex device) {
  at(device).stats.allocated_bytes[0].reset_peak();
  at(device).stats.reserved_bytes[0].reset_peak();
}

void Native::beginAllocateToPool(DeviceIndex, MempoolId_t id, StreamFilter) {
  note("begin " + name_of(id));
  const bool is_known = pools_.contains(id);
  Pool& pool = pools_[id];
  TORCH_CHECK(!is_known || pool.use_count > 0, "a pool that is gone");
  TORCH_CHECK(!pool.is_filling, "already recording to mempool_id");
  ++pool.use_count;
  pool.is_filling = true;
}

void Native::endAllocateToPool(DeviceIndex, MempoolId_t id) {
  note("end " + name_of(id));
  TORCH_CHECK(pools_[id].is_filling, "not currently recording to mempool_id");
  pools_[id].is_filling = false;
}

void Native::releasePool(DeviceIndex, MempoolId_t id) {
  note("release " + name_of(id));
  TORCH_CHECK(--pools_[id].use_count >= 0, "released too often");
}

int Native::getPoolUseCount(DeviceIndex, MempoolId_t id) { return pools_[id].use_count; }

std::shared_ptr<void> Native::getIpcDevPtr(std::string handle) {
  note("open " + handle);
  return nullptr;
}

torch_cuda::ShareableHandle Native::shareIpcHandle(void*) { return {0, "shared"}; }

void Native::attachOutOfMemoryObserver(torch_cuda::OutOfMemoryObserver observer) {
  observers_.push_back(std::move(observer));
}

// Two blocks come back to life, as after a graph was replayed.
torch_cuda::CheckpointDelta Native::setCheckpointPoolState(
    DeviceIndex, std::shared_ptr<torch_cuda::AllocatorState>) {
  torch_cuda::CheckpointDelta delta;
  for (int i = 0; i < 2; ++i) delta.dataptrs_allocd.push_back(allocate(512));
  return delta;
}

void Native::enablePeerAccess(DeviceIndex device, DeviceIndex accessed) {
  note("peer " + std::to_string(device) + " to " + std::to_string(accessed));
}

cudaError_t Native::memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) {
  note("copy");
  return cudaSuccess;
}

// --- history ------------------------------------------------------------------------------------

void Native::record(TraceEntry::Action action, DeviceIndex device, void* pointer,
                    std::size_t size) {
  if (!keeps_history_ && !tracker_) return;
  const auto address = reinterpret_cast<std::size_t>(pointer);
  const c10::approx_time_t now = c10::getApproximateTime();
#if VRAMX_TORCH >= 208
  const TraceEntry entry(action, device, address, size, nullptr, MempoolId_t{0, 0}, now);
#else
  const TraceEntry entry(action, device, address, size, nullptr, now);
#endif
  if (tracker_) tracker_(entry);
  if (keeps_history_) at(device).trace.push_back(entry);
}

torch_cuda::SnapshotInfo Native::whole_snapshot() {
  const auto convert = clock_.makeConverter();
  torch_cuda::SnapshotInfo info;
  for (const auto& [pointer, block] : blocks_) {
    torch_cuda::SegmentInfo segment;
    segment.device = block.device;
    segment.address = reinterpret_cast<std::size_t>(pointer);
    segment.total_size = block.size;
    segment.blocks.push_back({});
    segment.blocks[0].size = block.size;
    segment.blocks[0].allocated = block.is_live;
    info.segments.push_back(segment);
  }
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    std::vector<TraceEntry> trace = devices_[i].trace;
    for (TraceEntry& entry : trace) entry.time_.t_ = convert(entry.time_.approx_t_) / 1000;
    info.device_traces.push_back(std::move(trace));
    record(TraceEntry::SNAPSHOT, static_cast<DeviceIndex>(i), nullptr, 0);
  }
  info.config_metadata = {};
  info.config_metadata.max_split_size = 77;
  return info;
}

#if VRAMX_TORCH >= 211
torch_cuda::SnapshotInfo Native::snapshot(MempoolId_t, bool) { return whole_snapshot(); }
void Native::recordHistory(bool enabled, torch_cuda::CreateContextFn, size_t,
                           torch_cuda::RecordContext, bool, const std::vector<std::string>&) {
  keeps_history_ = enabled;
}
#elif VRAMX_TORCH >= 208
torch_cuda::SnapshotInfo Native::snapshot(MempoolId_t) { return whole_snapshot(); }
void Native::recordHistory(bool enabled, torch_cuda::CreateContextFn, size_t,
                           torch_cuda::RecordContext, bool) {
  keeps_history_ = enabled;
}
#else
torch_cuda::SnapshotInfo Native::snapshot() { return whole_snapshot(); }
void Native::recordHistory(bool enabled, torch_cuda::CreateContextFn, size_t,
                           torch_cuda::RecordContext) {
  keeps_history_ = enabled;
}
#endif

}  // namespace vramx::stub
