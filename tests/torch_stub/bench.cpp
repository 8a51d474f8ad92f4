// torch's allocator interface as C functions: allocations, pools, other devices.
#include "bench.h"

#include "recording_core.h"

namespace vramx::stub {
namespace {

struct EmptyState final : torch_cuda::AllocatorState {};

RecordingCore& recording_core() {
  static auto* core = new RecordingCore;
  return *core;
}

c10::DataPtr data_of(void* pointer) {
  return {pointer, pointer, current().raw_deleter(), cuda_device(machine().device)};
}

}  // namespace
}  // namespace vramx::stub

using namespace vramx;        // NOLINT: this file is the other side of the interface
using namespace vramx::stub;  // NOLINT

// --- the machine ---

BENCH void bench_start() {
  torch_cuda::allocator.store(&native());
  c10::SetAllocator(c10::kCUDA, &native(), 0);
}
BENCH const char* bench_error() { return keep(std::exchange(error(), "")); }
// From now on torch.empty() asks the installed allocator: a way into torch that needs no CUDA.
BENCH void bench_serve_cpu_tensors() { c10::SetAllocator(c10::kCPU, torch_cuda::get(), 200); }
BENCH void bench_device(int device) { machine().device = static_cast<DeviceIndex>(device); }
BENCH int bench_current_device() { return machine().device; }
BENCH int bench_contexts() { return static_cast<int>(machine().contexts.size()); }
BENCH void bench_make_context(int device) {
  machine().contexts.insert(static_cast<DeviceIndex>(device));
}
BENCH void bench_fractions_make_current() { machine().fractions_make_current = true; }
BENCH void bench_stream(std::uintptr_t stream) {
  machine().stream = reinterpret_cast<cudaStream_t>(stream);
}
BENCH void bench_memory(std::size_t free, std::size_t total) {
  machine().free_bytes = free;
  machine().total_bytes = total;
}
BENCH void bench_capturing(int value) { machine().is_capturing = value != 0; }
BENCH void bench_broken(int value) { machine().is_broken = value != 0; }
BENCH int bench_peer_copies() { return machine().peer_copies; }
BENCH const char* bench_journal() {
  std::string lines;
  for (const std::string& line : native().journal) lines += line + "\n";
  native().journal.clear();
  return keep(lines);
}
BENCH double bench_native_fraction(int device) {
  return native().fraction(static_cast<DeviceIndex>(device));
}
BENCH void bench_set_native_fraction(double fraction, int device) {
  native().setMemoryFraction(fraction, static_cast<DeviceIndex>(device));
}
BENCH void* bench_native_allocate(std::size_t size) { return native().raw_alloc(size); }
// As a tensor from before an installation is freed.
BENCH void bench_native_free(void* pointer) { native().raw_deleter()(pointer); }
BENCH int bench_native_stats_reads() { return native().stats_reads; }
BENCH int bench_native_fractions_set() { return native().fractions_set; }
BENCH void bench_rename_native(const char* name) { native().rename(name); }
BENCH void bench_segment_source() { native().segment_source = &current(); }

// --- allocations ---

BENCH void bench_init(int count) {
  guarded([&] { current().init(count); });
}
BENCH int bench_initialized() { return current().initialized(); }
BENCH int bench_is_accelerator() { return c10::GetAllocator(c10::kCUDA) == torch_cuda::get(); }
BENCH const char* bench_name() { return keep(current().name()); }
// As a tensor's storage does: the pointer is the one that the deleter is to be called with.
BENCH void* bench_allocate(std::size_t size) {
  return guarded([&] {
    c10::DataPtr data = current().allocate(size);
    TORCH_CHECK(data.get_deleter() == current().raw_deleter(), "another deleter");
    TORCH_CHECK(data.device() == cuda_device(machine().device), "another device");
    return data.release_context();
  });
}
BENCH void bench_free(void* pointer) {
  guarded([&] { current().raw_deleter()(pointer); });
}
// Allocates and frees in one, with whatever deleter the tensor got.
BENCH int bench_make_and_drop(std::size_t size) {
  return guarded([&] { return current().allocate(size).get() != nullptr ? 1 : 0; });
}
BENCH void* bench_raw_alloc(std::size_t size, std::uintptr_t stream) {
  return guarded([&] {
    return current().raw_alloc_with_stream(size, reinterpret_cast<cudaStream_t>(stream));
  });
}
BENCH void bench_raw_delete(void* pointer) {
  guarded([&] { current().raw_delete(pointer); });
}
BENCH void bench_record_stream(void* pointer, std::uintptr_t stream) {
  guarded([&] {
    c10::DataPtr data = data_of(pointer);
    const c10::Stream other(c10::Stream::UNSAFE, cuda_device(machine().device),
                            static_cast<c10::StreamId>(stream));
    current().recordStream(data, c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED, other));
    data.release_context();
  });
}
// --- a core that notes what it is told of streams ---

BENCH std::uintptr_t bench_recording_core() {
  return reinterpret_cast<std::uintptr_t>(&recording_core().handle);
}
BENCH const char* bench_recorded() {
  std::string lines;
  for (const std::string& line : recording_core().journal) lines += line + "\n";
  return keep(lines);
}
BENCH int bench_finds() { return recording_core().finds; }
BENCH int bench_is_lasting(std::uintptr_t stream, int device) {
  return recording_core().surroundings->is_lasting({Stream{stream}, device});
}
BENCH int bench_is_current(std::uintptr_t stream, int device) {
  return recording_core().surroundings->is_current({Stream{stream}, device});
}
BENCH int bench_begin_call(std::uintptr_t stream, int device) {
  return recording_core().surroundings->begin_call({Stream{stream}, device});
}
BENCH int bench_begin_device_call(int device) {
  return recording_core().surroundings->begin_device_call(device);
}
BENCH void bench_end_call(int device) { recording_core().surroundings->end_call(device); }

BENCH void bench_enable(int value) { current().enable(value != 0); }

// --- memory as a whole ---

BENCH void bench_empty_cache([[maybe_unused]] unsigned long long pool) {
  guarded([&] {
#if VRAMX_TORCH >= 208
    current().emptyCache({0, pool});
#else
    current().emptyCache();
#endif
  });
}
BENCH std::size_t bench_cache_info(int device) {
  return guarded([&] {
    std::size_t largest = 0;
    current().cacheInfo(static_cast<DeviceIndex>(device), &largest);
    return largest;
  });
}
BENCH double bench_fraction(int device) {
  return guarded([&] { return current().getMemoryFraction(static_cast<DeviceIndex>(device)); });
}
BENCH void bench_set_fraction(double fraction, int device) {
  guarded([&] { current().setMemoryFraction(fraction, static_cast<DeviceIndex>(device)); });
}
// --- pools ---

// A pool whose segments come from the allocator that is installed, as MemPool(allocator) makes it.
BENCH void bench_make_pool([[maybe_unused]] int device, [[maybe_unused]] unsigned long long pool) {
  guarded([&] {
#if VRAMX_TORCH >= 211
    // Torch owns the allocator that is installed; this one gives nothing up.
    const std::shared_ptr<CUDAAllocator> installed(&current(), [](CUDAAllocator*) {});
    current().createOrIncrefPool(static_cast<DeviceIndex>(device), {0, pool}, installed);
#elif VRAMX_TORCH >= 208
    current().createOrIncrefPool(static_cast<DeviceIndex>(device), {0, pool}, &current());
#endif
  });
}
BENCH void bench_begin_pool(int device, unsigned long long pool, std::uintptr_t stream) {
  guarded([&] {
    const auto wanted = reinterpret_cast<cudaStream_t>(stream);
    current().beginAllocateToPool(static_cast<DeviceIndex>(device), {0, pool},
                                  [=](cudaStream_t asked) { return asked == wanted; });
  });
}
BENCH void bench_end_pool(int device, unsigned long long pool) {
  guarded([&] { current().endAllocateToPool(static_cast<DeviceIndex>(device), {0, pool}); });
}
// --- captures, in the steps of torch's CUDAGraph ---

// On the current stream, with the graph's own pool or one that the program has named.
BENCH void bench_capture_begin(int device, unsigned long long own, unsigned long long named) {
  guarded([&] {
    const cudaStream_t stream = machine().stream;
    current().beginAllocateToPool(static_cast<DeviceIndex>(device), {own, named},
                                  [=](cudaStream_t asked) {
                                    const auto found = machine().captures.find(asked);
                                    return asked == stream && found != machine().captures.end() &&
                                           found->second == cudaStreamCaptureStatusActive;
                                  });
    machine().captures[stream] = cudaStreamCaptureStatusActive;
  });
}
// From now on it can only be ended, and that fails.
BENCH void bench_capture_invalidate(std::uintptr_t stream) {
  machine().captures[reinterpret_cast<cudaStream_t>(stream)] = cudaStreamCaptureStatusInvalidated;
}
// What cudaStreamEndCapture does, without what torch does after it.
BENCH void bench_capture_stop(std::uintptr_t stream) {
  machine().captures.erase(reinterpret_cast<cudaStream_t>(stream));
}
BENCH void bench_capture_tell_end(int device, unsigned long long own, unsigned long long named) {
  guarded([&] { current().endAllocateToPool(static_cast<DeviceIndex>(device), {own, named}); });
}
BENCH int bench_pool_use_count(unsigned long long named) {
  return native().getPoolUseCount(0, {0, named});
}

BENCH void bench_use_in_need([[maybe_unused]] int device,
                             [[maybe_unused]] unsigned long long pool) {
  guarded([&] {
#if VRAMX_TORCH >= 211
    current().setUseOnOOM(static_cast<DeviceIndex>(device), {0, pool}, true);
#elif VRAMX_TORCH >= 208
    current().setUseOnOOM(static_cast<DeviceIndex>(device), {0, pool});
#endif
  });
}
// How many of the checkpoint's tensors carry the deleter by which torch knows its allocator's.
BENCH int bench_checkpoint(int device) {
  return guarded([&] {
    auto delta = current().setCheckpointPoolState(static_cast<DeviceIndex>(device),
                                                  std::make_shared<EmptyState>());
    int known = 0;
    for (const c10::DataPtr& data : delta.dataptrs_allocd) {
      known += data.get_deleter() == current().raw_deleter() ? 1 : 0;
    }
    return known;
  });
}

// --- other devices and processes ---

BENCH std::size_t bench_base_allocation(void* pointer) {
  return guarded([&] {
    std::size_t size = 0;
    TORCH_CHECK(current().getBaseAllocation(pointer, &size) == pointer, "another base");
    return size;
  });
}
BENCH const char* bench_share(void* pointer) {
  return guarded([&] { return keep(current().shareIpcHandle(pointer).handle); });
}
BENCH void bench_peer(int device, int accessed) {
  guarded([&] {
    current().enablePeerAccess(static_cast<DeviceIndex>(device),
                               static_cast<DeviceIndex>(accessed));
  });
}
BENCH void bench_copy(int to_device, int from_device, int p2p_enabled) {
  guarded([&] {
    current().memcpyAsync(nullptr, to_device, nullptr, from_device, 1, nullptr, p2p_enabled != 0);
  });
}
