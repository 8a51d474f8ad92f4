// Who serves an allocation, and what is told about it.
#include "torch/shim.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/env.h>

namespace vramx {
namespace {

constexpr std::size_t kOneExabyte = std::size_t{1} << 60;

void check_size(std::size_t size) {
  TORCH_CHECK_WITH(OutOfMemoryError, size < kOneExabyte,
                   "CUDA out of memory. Tried to allocate more than 1 EiB.");
}

// The stack trace of the request that this thread serves, for what the core maps on its behalf.
thread_local const Context* served_context = nullptr;

}  // namespace

Shim::Shim(Allocators& core, CUDAAllocator& native)
    // The base calls none of these: every member that would is overridden.
    : CUDAPluggableAllocator(nullptr, nullptr),
      core_(core),
      native_(native),
      is_uncached_(c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") == true) {
  flags_.set(Flag::kDisabled, is_uncached_ || !native_.isEnabled());
  remember_native_deleter();
}

bool Shim::is_of_core(const void* pointer) const {
  CoreBlock block;
  return core_.find(address_of(pointer), &block) == CoreCode::kOk;
}

// --- allocate ---------------------------------------------------------------------------------

// Where there is one device it is not asked for: cudaGetDevice alone takes 42 ns (H200 host, CUDA
// 13.0), half of what an allocation takes.
DeviceIndex Shim::current_device() const {
  if (device_count_.load(std::memory_order_relaxed) == 1) return 0;
  DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return device;
}

c10::DataPtr Shim::allocate(size_t size) {
  const DeviceIndex device = current_device();
  if (size == 0) return wrap(nullptr, device);
  if (flags_.has(Flag::kDisabled)) return native_.allocate(size);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  return wrap(serve({size, device, stream}), device);
}

void* Shim::raw_alloc(size_t size) {
  if (size == 0) return nullptr;
  if (flags_.has(Flag::kDisabled)) return native_.raw_alloc(size);
  const DeviceIndex device = current_device();
  return serve({size, device, c10::cuda::getCurrentCUDAStream(device).stream()});
}

void* Shim::raw_alloc_with_stream(size_t size, cudaStream_t stream) {
  if (size == 0) return nullptr;
  if (flags_.has(Flag::kDisabled)) return native_.raw_alloc_with_stream(size, stream);
  return serve({size, current_device(), stream});
}

// Nobody looks on who looks at all threads.
inline bool is_traced() { return c10::impl::GPUTrace::get_trace() != nullptr; }

// Torch keeps each thread's profiler behind five calls of functions, 8 ns together on an H200's
// host, where a call of ours takes some 80. Half of them is left out here.
inline bool is_in_profiler() {
  return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr;
}

// Two threads may count one allocation; that is no matter.
inline bool Shim::is_profiler_looked_for() {
  if (has_profiled_.load(std::memory_order_relaxed)) return true;
  const std::uint32_t count = allocations_.load(std::memory_order_relaxed) + 1;
  allocations_.store(count, std::memory_order_relaxed);
  return count % kProfilerPeriod == 0;
}

inline void* Shim::serve(const Request& request) {
  check_size(request.size);
  const bool is_watched =
      flags_.any() || is_traced() || (is_profiler_looked_for() && is_in_profiler());
  if (is_watched) return serve_observed(request);
  Address address;
  const CoreCode code =
      core_.allocate(request.device, Bytes{request.size}, stream_of(request.stream), &address);
  return code == CoreCode::kOk ? pointer_to(address) : serve_refused(request, code, nullptr);
}

bool Shim::goes_native(const Request& request) {
  // Inside native a request is for a segment of a pool that was given us as its allocator.
  if (NativeScope::is_active()) return false;
  if (!filters_.has_any(request.device)) return false;
  if (filters_.is_look_due()) end_abandoned_captures();
  return filters_.match(request.device, request.stream);
}

void* Shim::serve_observed(const Request& request) {
  if (core_.is_in_child() || goes_native(request)) return serve_from_native(request);
  const Context context = history_.gather(RecordContext::STATE);
  served_context = &context;
  Address address;
  const CoreCode code =
      core_.allocate(request.device, Bytes{request.size}, stream_of(request.stream), &address);
  served_context = nullptr;
  if (code != CoreCode::kOk) return serve_refused(request, code, context);
  void* const pointer = pointer_to(address);
  note_allocated(request, pointer, context);
  return pointer;
}

void* Shim::serve_refused(const Request& request, CoreCode code, const Context& context) {
  // Native asks for a pool's segment, and reports a failure itself.
  if (NativeScope::is_active()) return nullptr;
  if (code != CoreCode::kOutOfMemory) return serve_from_native(request);
  // Native goes on to the pools that may be used in need, and reports the failure if they fail too.
  if (has_spare_pools_.load(std::memory_order_relaxed)) return serve_from_native(request);
  fail(request, context);
}

void* Shim::serve_from_native(const Request& request) {
  if (core_.is_in_child()) return native_.raw_alloc_with_stream(request.size, request.stream);
  limits_.prepare(request.device);
  void* pointer = nullptr;
  {
    const NativeScope scope(request.size);
    pointer = native_.raw_alloc_with_stream(request.size, request.stream);
  }
  settle(request.device);
  return pointer;
}

void Shim::note_allocated(const Request& request, void* pointer, const Context& context) {
  if (flags_.has(Flag::kLate)) statistics_.note_allocation(request.device);
  if (flags_.has(Flag::kRecording)) {
    history_.remember(pointer, context);
    history_.record({TraceEntry::ALLOC, request.device, reinterpret_cast<std::size_t>(pointer),
                     request.size, request.stream},
                    context);
  }
  if (c10::memoryProfilingEnabled()) {
    note_profiler();
    CoreBlock block;
    core_.find(address_of(pointer), &block);
    report_usage(pointer, static_cast<std::int64_t>(block.size.count), request.device);
  }
  if (const auto* trace = c10::impl::GPUTrace::get_trace(); trace != nullptr) {
    (*trace)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer));
  }
}

// --- free ---------------------------------------------------------------------------------------

// Whose memory it is, the core tells without a lock, so it is asked first: pools, graphs and late
// installations cost a free of the core's memory nothing.
void Shim::release(void* pointer) {
  if (pointer == nullptr) return;
  Shim& self = *installed_;
  const bool may_be_profiled = self.has_profiled_.load(std::memory_order_relaxed);
  const bool is_watched =
      self.flags_.has(Flag::kRecording) || is_traced() || (may_be_profiled && is_in_profiler());
  if (!is_watched && self.core_.free(address_of(pointer), nullptr) == CoreCode::kOk) return;
  self.free_observed(pointer);
}

// Unlike release(), for memory without a deleter of its own: native decides how it is freed, by
// whether caching is on now.
void Shim::raw_delete(void* pointer) {
  if (pointer == nullptr) return;
  if (flags_.has(Flag::kDisabled) && !is_of_core(pointer)) {
    native_.raw_delete(pointer);
    return;
  }
  release(pointer);
}

// What is recorded of a free is recorded before it: after it another thread may get the address.
void Shim::free_observed(void* pointer) {
  if (core_.is_in_child()) return;
  CoreBlock block;
  if (core_.find(address_of(pointer), &block) != CoreCode::kOk) {
    free_native(pointer);
    return;
  }
  const Context context = history_.gather(RecordContext::ALL);
  if (const auto* trace = c10::impl::GPUTrace::get_trace(); trace != nullptr) {
    (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer));
  }
  if (flags_.has(Flag::kRecording)) note_freed(block, context);
  core_.free(block.address, nullptr);
  if (c10::memoryProfilingEnabled()) {
    report_usage(pointer, -static_cast<std::int64_t>(block.size.count),
                 static_cast<DeviceIndex>(block.device));
  }
}

// The core takes a block back at once and remembers which streams it waits for, so the free is
// complete when it is asked for.
void Shim::note_freed(const CoreBlock& block, const Context& context) {
  const void* const pointer = pointer_to(block.address);
  const Context shown = context != nullptr ? context : history_.context_of(pointer);
  history_.forget(pointer);
  for (const auto action : {TraceEntry::FREE_REQUESTED, TraceEntry::FREE_COMPLETED}) {
    history_.record({action, static_cast<DeviceIndex>(block.device), block.address.value,
                     block.requested.count, cuda_stream(block.stream)},
                    shown);
  }
}

// The deleter of native's own tensors: its raw_delete() would take a cached block for an uncached
// one while caching is off.
void Shim::free_native(void* pointer) {
  const c10::DeleterFnPtr deleter = native_deleter_.load();
  deleter != nullptr ? deleter(pointer) : native_.raw_delete(pointer);
  statistics_.refresh_held(device_count());
}

void Shim::remember_native_deleter() {
  if (native_.isEnabled()) native_deleter_.store(native_.raw_deleter());
}

void Shim::report_usage(void* pointer, std::int64_t change, DeviceIndex device) {
  c10::reportMemoryUsageToProfiler(
      pointer, change, core_.allocated(device).count + statistics_.native_allocated(device),
      core_.held(device).count + statistics_.native_held(device), cuda_device(device));
}

void Shim::note_mapping(const CoreEvent& event) {
  const bool is_mapped = event.kind == CoreEventKind::kMapped;
  history_.record({is_mapped ? TraceEntry::SEGMENT_MAP : TraceEntry::SEGMENT_UNMAP,
                   static_cast<DeviceIndex>(event.device), event.begin.value, event.size.count},
                  served_context == nullptr ? nullptr : *served_context);
}

// --- streams, start, switch ---------------------------------------------------------------------

// Native ignores a DataPtr that does not carry its own deleter, so memory of a pool is shown to it
// with that deleter. Other deleters belong to memory that is shared by another process or was never
// any allocator's; native ignores them, and so it is with ours.
void Shim::recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) {
  if (data.get() == nullptr || core_.is_in_child()) return;
  if (data.get_deleter() != &release) {
    native_.recordStream(data, stream);
    return;
  }
  const StreamName name{stream_of(stream.stream()), stream.device_index()};
  if (core_.record_stream(address_of(data.get()), name, is_kept_by_torch(stream)) !=
      CoreCode::kNotOurs)
    return;
  c10::DataPtr as_native(data.get(), data.get(), native_deleter_.load(), data.device());
  native_.recordStream(as_native, stream);
  as_native.release_context();
}

void Shim::init(int device_count) {
  core_.note_use();
  const bool is_late = native_.initialized();
  native_.init(device_count);
  if (is_late) statistics_.start_late(device_count);
  for (int i = device_count_.load(); i < device_count; ++i) {
    limits_.start(static_cast<DeviceIndex>(i));
  }
  if (device_count > device_count_.load()) device_count_.store(device_count);
}

void Shim::enable(bool value) {
  native_.enable(value);
  flags_.set(Flag::kDisabled, is_uncached_ || !native_.isEnabled());
  remember_native_deleter();
}

}  // namespace vramx
