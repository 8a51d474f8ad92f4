// How much memory there is: giving it back, limiting it, and what happens when there is none left.
//
// The two sides help each other out. When the core has nothing left it calls relieve(), which runs
// torch's free-memory callbacks and empties native's cache. When native finds no cached block it
// runs those callbacks itself, ours among them: reclaim_for_native(). It does so before every
// cudaMalloc and not only after a failed one, so that one looks first whether memory is short:
// giving the core's memory back waits for the device, which would stall a program and end a graph
// capture.
#include <algorithm>
#include <cstdio>

#include "torch/shim.h"

namespace vramx {
namespace {

constexpr char kCallback[] = "vramx";
constexpr std::size_t kMiB = 1 << 20;

class FreeCoreMemory final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    Shim* const shim = Shim::installed();
    return shim != nullptr && shim->reclaim_for_native();
  }
};

std::string binary(std::uint64_t bytes) {
  char text[32];
  const auto mib = static_cast<double>(bytes) / static_cast<double>(kMiB);
  std::snprintf(text, sizeof text, mib < 1024 ? "%.2f MiB" : "%.2f GiB",
                mib < 1024 ? mib : mib / 1024);
  return text;
}

struct DeviceMemory {
  std::size_t free = 0;
  std::size_t total = 0;
};

// Of the current device. All zeros where CUDA does not say.
DeviceMemory device_memory() {
  DeviceMemory memory;
  if (cudaMemGetInfo(&memory.free, &memory.total) != cudaSuccess) {
    (void)cudaGetLastError();
    return {};
  }
  return memory;
}

// What native asks CUDA for to serve a request: its segments are 2 MiB, 20 MiB, or the request in
// steps of 2 MiB.
std::size_t native_segment(std::size_t request) {
  if (request <= kMiB) return 2 * kMiB;
  if (request < 10 * kMiB) return 20 * kMiB;
  return (request + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
}

// CUDA refuses to say for the default stream while another one is captured: then too.
bool is_capturing() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
    return status != cudaStreamCaptureStatusNone;
  }
  (void)cudaGetLastError();
  return true;
}

// A callback that fails frees nothing, and the next one may still: the request decides.
void run_free_memory_callbacks() {
  auto* const registry = c10::FreeCudaMemoryCallbacksRegistry();
  for (const std::string& key : registry->Keys()) {
    if (key == kCallback) continue;
    try {
      registry->Create(key)->Execute();
    } catch (...) {
    }
  }
}

}  // namespace

void Shim::connect(Shim& self) {
  installed_ = &self;
  const auto relieve = [](void* shim, std::int32_t device) {
    static_cast<Shim*>(shim)->relieve(static_cast<DeviceIndex>(device));
  };
  // A tracker that raises is not to raise through the core.
  const auto observe = [](void* shim, const CoreEvent& event) {
    try {
      static_cast<Shim*>(shim)->note_mapping(event);
    } catch (...) {
    }
  };
  self.core_.add_relief(relieve, &self);
  self.core_.set_observer(observe, &self);
  self.core_.set_surroundings(&self.streams_);
  const auto create = [] { return std::make_unique<FreeCoreMemory>(); };
  c10::FreeCudaMemoryCallbacksRegistry()->Register(kCallback, create);
}

// --- give back --------------------------------------------------------------------------------

#if VRAMX_TORCH >= 208
void Shim::emptyCache(MempoolId_t pool) {
  const bool is_whole = pool == MempoolId_t{0, 0};
#else
void Shim::emptyCache() {
  const bool is_whole = true;
#endif
  end_abandoned_captures();
  // As native does: while a graph or a pool is being filled on a device, its cache stays, because
  // giving back waits for the device.
  for (int i = 0; is_whole && i < device_count(); ++i) {
    const auto device = static_cast<DeviceIndex>(i);
    if (!filters_.has_any(device)) core_.trim(device);
  }
  {
    const NativeScope scope(0);
#if VRAMX_TORCH >= 208
    native_.emptyCache(pool);
#else
    native_.emptyCache();
#endif
  }
  for (int i = 0; i < device_count(); ++i) settle(static_cast<DeviceIndex>(i));
}

void Shim::settle(DeviceIndex device) {
  statistics_.refresh(device);
  limits_.rebalance(device);
}

void Shim::relieve(DeviceIndex device) {
  // Native waits for the core with its lock held, runs its callbacks and empties its cache itself.
  if (NativeScope::is_active() || core_.is_in_child()) return;
  run_free_memory_callbacks();
  end_abandoned_captures();
  try {
    statistics_.refresh(device);
    const bool has_unused = statistics_.native_held(device) > statistics_.native_allocated(device);
    if (!has_unused || filters_.has_any()) return;
    const NativeScope scope(0);
    native_.emptyCache();
  } catch (...) {
    return;  // nothing came free, and the request decides
  }
  settle(device);
}

bool Shim::reclaim_for_native() {
  const DeviceIndex device = c10::cuda::current_device();
  if (!NativeScope::is_active() || !core_.held(device) || is_capturing()) return false;
  if (!lacks_memory(device, NativeScope::request())) return false;
  const Bytes before = core_.held(device);
  core_.trim(device);
  limits_.rebalance(device);
  return core_.held(device) < before;
}

bool Shim::lacks_memory(DeviceIndex device, std::size_t request) const {
  if (request == 0) return false;
  const std::size_t segment = native_segment(request);
  return limits_.room(device) < segment || device_memory().free < segment;
}

// --- limits -----------------------------------------------------------------------------------

void Shim::check_device(DeviceIndex device) const {
  TORCH_CHECK(0 <= device && device < device_count(), "Invalid device argument ",
              static_cast<int>(device), ": did you call init?");
}

double Shim::getMemoryFraction(DeviceIndex device) {
  check_device(device);
  return limits_.fraction(device);
}

void Shim::setMemoryFraction(double fraction, DeviceIndex device) {
  check_device(device);
  limits_.set_fraction(device, fraction);
}

// Before the core was started on a device, native's answer is right for both: what CUDA has free.
void Shim::cacheInfo(DeviceIndex device, size_t* largest) {
  check_device(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const std::uint64_t obtainable =
      goes_native({0, device, stream}) ? 0 : core_.largest_obtainable(device).count;
  if (obtainable == 0) {
    native_.cacheInfo(device, largest);
  } else {
    *largest = std::max<std::size_t>(*largest, obtainable);
  }
}

// --- out of memory ----------------------------------------------------------------------------

void Shim::attachOutOfMemoryObserver(torch_cuda::OutOfMemoryObserver observer) {
  native_.attachOutOfMemoryObserver(observer);
  const std::lock_guard lock(observers_mutex_);
  observers_.push_back(std::move(observer));
}

#if VRAMX_TORCH >= 212
// The core never rejects a request that it has not tried.
void Shim::attachOomRejectionObserver(torch_cuda::OomRejectionObserver observer) {
  native_.attachOomRejectionObserver(std::move(observer));
}
#endif

void Shim::fail(const Request& request, const Context& context) {
  const std::string text =
      out_of_memory_text(request.device);  // of this thread, until it fails again
  // An earlier error of the device, after which nothing succeeds any more, is what is to be raised.
  DeviceMemory memory;
  C10_CUDA_CHECK(cudaMemGetInfo(&memory.free, &memory.total));
  history_.record({TraceEntry::OOM, request.device, memory.free, request.size, request.stream},
                  context);
  c10::reportOutOfMemoryToProfiler(
      static_cast<std::int64_t>(request.size),
      core_.allocated(request.device).count + statistics_.native_allocated(request.device),
      core_.held(request.device).count + statistics_.native_held(request.device),
      cuda_device(request.device));
  std::unique_lock lock(observers_mutex_);
  const auto observers = observers_;
  lock.unlock();
  const std::uint64_t limit = std::min<std::uint64_t>(limits_.get(request.device), memory.total);
  for (const auto& observer : observers) {
    observer(request.device, request.size, limit, memory.free);
  }
  C10_THROW_ERROR(OutOfMemoryError, text);
}

std::string Shim::out_of_memory_text(DeviceIndex device) const {
  std::string text = core_.out_of_memory_text();
  const std::uint64_t held = statistics_.native_held(device);
  if (held == 0) return text;
  text += " torch's own allocator, which serves CUDA graphs and memory pools, holds " +
          binary(held) + ", of which " + binary(statistics_.native_allocated(device)) +
          " is live: delete graphs and pools that are no longer used.";
  return text;
}

}  // namespace vramx
