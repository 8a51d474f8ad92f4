// libcuda behind the Driver interface; see the header.
#include "driver/cuda_driver.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

namespace vramx {
namespace {

constexpr Bytes kCompareBuffer{4 << 20};

cuda::StreamHandle handle_of(Stream stream) {
  return reinterpret_cast<cuda::StreamHandle>(static_cast<std::uint64_t>(stream));
}

cuda::EventHandle handle_of(Event event) {
  return reinterpret_cast<cuda::EventHandle>(static_cast<std::uint64_t>(event));
}

std::uint64_t number_of(const void* handle) { return reinterpret_cast<std::uint64_t>(handle); }

}  // namespace

// While alive, this thread has the device's context and may make calls that a capture forbids.
class CudaDriver::Scope {
 public:
  explicit Scope(const CudaDriver& driver) : api_(driver.api_) {
    cuda::ContextHandle current = nullptr;
    result_ = api_.ctx_get_current(&current);
    if (result_ == cuda::kSuccess && current != driver.context_) {
      result_ = api_.ctx_push_current(driver.context_);
      is_pushed_ = result_ == cuda::kSuccess;
    }
    if (result_ == cuda::kSuccess) api_.thread_exchange_stream_capture_mode(&capture_mode_);
  }
  ~Scope() {
    if (result_ == cuda::kSuccess) api_.thread_exchange_stream_capture_mode(&capture_mode_);
    cuda::ContextHandle popped = nullptr;
    if (is_pushed_) api_.ctx_pop_current(&popped);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  cuda::ResultCode result() const { return result_; }

 private:
  const cuda::Api& api_;
  cuda::ResultCode result_ = cuda::kSuccess;
  int capture_mode_ = cuda::kCaptureModeRelaxed;  // the thread's own mode while we hold ours
  bool is_pushed_ = false;
};

template <class Call>
Status CudaDriver::plain(const char* name, Call call) const {
  const Scope scope(*this);
  const bool is_current = scope.result() == cuda::kSuccess;
  return cuda::to_status(is_current ? call() : scope.result(), name);
}

template <class Call>
Status CudaDriver::timed(Timed kind, const char* name, Call call) {
  using Clock = std::chrono::steady_clock;
  const Scope scope(*this);
  if (scope.result() != cuda::kSuccess) return cuda::to_status(scope.result(), name);
  const Clock::time_point start = Clock::now();
  const cuda::ResultCode result = call();
  const std::chrono::nanoseconds elapsed = Clock::now() - start;
  total_ns_.fetch_add(static_cast<std::uint64_t>(elapsed.count()), std::memory_order_relaxed);
  counts_[static_cast<std::size_t>(kind)].fetch_add(1, std::memory_order_relaxed);
  return cuda::to_status(result, name);
}

Result<std::unique_ptr<CudaDriver>> CudaDriver::open(int device) {
  const cuda::LoadedApi& loaded = cuda::load_cuda();
  if (!loaded.is_loaded) return Status{StatusCode::kNotInitialized, 0, "libcuda.so.1"};
  std::unique_ptr<CudaDriver> driver(new CudaDriver(loaded.api, device));
  const Status started = driver->start();
  if (!started.ok()) return started;
  return driver;
}

Status CudaDriver::start() {
  Status status = cuda::to_status(api_.device_get(&device_, ordinal_), "cuDeviceGet");
  if (!status.ok()) return status;
  if (attribute(cuda::Attribute::kVirtualMemoryManagement) == 0) {
    return {StatusCode::kNotSupported, cuda::kErrorNotSupported, "virtual memory management"};
  }
  properties_.location.id = ordinal_;
  accessors_[0] = {.location = properties_.location};
  accessor_count_.store(1, std::memory_order_release);
  if (attribute(cuda::Attribute::kPosixFileDescriptor) != 0) {
    properties_.requested_handle_types = cuda::kHandlePosixFileDescriptor;
  }
  if (attribute(cuda::Attribute::kRdmaWithVirtualMemory) != 0) {
    properties_.flags.gpu_direct_rdma = 1;
  }
  std::size_t bytes = 0;
  status = cuda::to_status(
      api_.mem_get_allocation_granularity(&bytes, &properties_, cuda::kGranularityMinimum),
      "cuMemGetAllocationGranularity");
  if (!status.ok()) return status;
  granularity_ = {bytes};
  return cuda::to_status(api_.device_primary_ctx_retain(&context_, device_),
                         "cuDevicePrimaryCtxRetain");
}

CudaDriver::~CudaDriver() {
  if (context_ != nullptr) api_.device_primary_ctx_release(device_);
}

int CudaDriver::attribute(cuda::Attribute which) const {
  int value = 0;
  api_.device_get_attribute(&value, static_cast<int>(which), device_);
  return value;
}

Result<MemoryInfo> CudaDriver::memory_info() {
  std::size_t free = 0;
  std::size_t total = 0;
  const Status status = plain("cuMemGetInfo", [&] { return api_.mem_get_info(&free, &total); });
  if (!status.ok()) return status;
  return MemoryInfo{{free}, {total}};
}

Result<Address> CudaDriver::reserve_address(Bytes size) {
  cuda::DevicePointer address = 0;
  const Status status = plain("cuMemAddressReserve", [&] {
    return api_.mem_address_reserve(&address, size.count, granularity_.count, 0, 0);
  });
  if (!status.ok()) return status;
  return Address{address};
}

Status CudaDriver::release_address(Address address, Bytes size) {
  return plain("cuMemAddressFree",
               [&] { return api_.mem_address_free(address.value, size.count); });
}

Result<ChunkHandle> CudaDriver::create_chunk(Bytes size) {
  cuda::AllocationHandle handle = 0;
  const Status status = timed(Timed::kCreate, "cuMemCreate", [&] {
    return api_.mem_create(&handle, size.count, &properties_, 0);
  });
  if (!status.ok()) return status;
  return ChunkHandle{handle};
}

Status CudaDriver::release_chunk(ChunkHandle chunk) {
  return timed(Timed::kRelease, "cuMemRelease",
               [&] { return api_.mem_release(static_cast<std::uint64_t>(chunk)); });
}

Status CudaDriver::map(Address address, Bytes size, ChunkHandle chunk) {
  return timed(Timed::kMap, "cuMemMap", [&] {
    return api_.mem_map(address.value, size.count, 0, static_cast<std::uint64_t>(chunk), 0);
  });
}

Status CudaDriver::unmap(Address address, Bytes size) {
  return timed(Timed::kUnmap, "cuMemUnmap",
               [&] { return api_.mem_unmap(address.value, size.count); });
}

Status CudaDriver::set_access(Address address, Bytes size) {
  const std::size_t count = accessor_count_.load(std::memory_order_acquire);
  return timed(Timed::kSetAccess, "cuMemSetAccess", [&] {
    return api_.mem_set_access(address.value, size.count, accessors_.data(), count);
  });
}

Status CudaDriver::allow_peer(int device) {
  const std::lock_guard<std::mutex> lock(peers_mutex_);
  const std::size_t count = accessor_count_.load(std::memory_order_relaxed);
  const auto last = accessors_.begin() + static_cast<std::ptrdiff_t>(count);
  const bool is_known = std::any_of(accessors_.begin(), last, [&](const auto& accessor) {
    return accessor.location.id == device;
  });
  if (is_known) return ok_status();
  cuda::Device peer = 0;
  const Status found = cuda::to_status(api_.device_get(&peer, device), "cuDeviceGet");
  if (!found.ok()) return found;
  int is_reachable = 0;
  const Status asked = cuda::to_status(api_.device_can_access_peer(&is_reachable, peer, device_),
                                       "cuDeviceCanAccessPeer");
  if (!asked.ok()) return asked;
  if (is_reachable == 0 || count == kMostAccessors) {
    return {StatusCode::kNotSupported, cuda::kErrorNotSupported, "cuDeviceCanAccessPeer"};
  }
  accessors_[count] = {.location = {.id = device}};
  accessor_count_.store(count + 1, std::memory_order_release);
  return ok_status();
}

Result<Event> CudaDriver::create_event() {
  cuda::EventHandle event = nullptr;
  const Status status =
      plain("cuEventCreate", [&] { return api_.event_create(&event, cuda::kEventDisableTiming); });
  if (!status.ok()) return status;
  return Event{number_of(event)};
}

Status CudaDriver::destroy_event(Event event) {
  return plain("cuEventDestroy", [&] { return api_.event_destroy(handle_of(event)); });
}

Status CudaDriver::record_event(Event event, Stream stream) {
  return plain("cuEventRecord",
               [&] { return api_.event_record(handle_of(event), handle_of(stream)); });
}

template <class Query>
Result<bool> CudaDriver::is_done(const char* name, Query query) const {
  bool is_ready = true;
  const Status status = plain(name, [&] {
    const cuda::ResultCode result = query();
    is_ready = result == cuda::kSuccess;
    return result == cuda::kErrorNotReady ? cuda::kSuccess : result;
  });
  if (!status.ok()) return status;
  return is_ready;
}

Result<bool> CudaDriver::query_event(Event event) {
  return is_done("cuEventQuery", [&] { return api_.event_query(handle_of(event)); });
}

Status CudaDriver::synchronize_event(Event event) {
  return plain("cuEventSynchronize", [&] { return api_.event_synchronize(handle_of(event)); });
}

Status CudaDriver::wait_event(Stream stream, Event event) {
  return plain("cuStreamWaitEvent",
               [&] { return api_.stream_wait_event(handle_of(stream), handle_of(event), 0); });
}

// A capturing stream must not be queried. Both questions under one context: the three calls around
// them take 80 ns together, and 500 ns where other work has filled the cache (measured, H200).
Result<bool> CudaDriver::is_idle(Stream stream) {
  return is_done("cuStreamQuery", [&] {
    bool is_captured = false;
    const cuda::ResultCode asked = look_for_capture(stream, &is_captured);
    if (asked != cuda::kSuccess) return asked;
    return is_captured ? cuda::kErrorNotReady : api_.stream_query(handle_of(stream));
  });
}

Result<bool> CudaDriver::is_capturing(Stream stream) {
  bool is_captured = false;
  const Status status =
      plain("cuStreamIsCapturing", [&] { return look_for_capture(stream, &is_captured); });
  if (!status.ok()) return status;
  return is_captured;
}

// Under the device's context.
cuda::ResultCode CudaDriver::look_for_capture(Stream stream, bool* is_captured) const {
  int capture = cuda::kCaptureStatusNone;
  const cuda::ResultCode result = api_.stream_is_capturing(handle_of(stream), &capture);
  // The legacy default stream while a stream that synchronises with it captures: just as unusable.
  const bool is_implicit = result == cuda::kErrorStreamCaptureImplicit;
  *is_captured = is_implicit || capture != cuda::kCaptureStatusNone;
  return is_implicit ? cuda::kSuccess : result;
}

std::uint64_t CudaDriver::count(Timed kind) const {
  return counts_[static_cast<std::size_t>(kind)].load(std::memory_order_relaxed);
}

DriverCalls CudaDriver::calls() const {
  const auto total_ns = static_cast<double>(total_ns_.load(std::memory_order_relaxed));
  return {.create = count(Timed::kCreate),
          .map = count(Timed::kMap),
          .set_access = count(Timed::kSetAccess),
          .unmap = count(Timed::kUnmap),
          .release = count(Timed::kRelease),
          .total_us = total_ns / 1000.0};
}

Status CudaDriver::fill(Address address, Bytes size, std::uint32_t pattern, Stream stream) {
  if (size % kWord || Bytes{address.value} % kWord) {
    return {StatusCode::kInvalidValue, cuda::kErrorInvalidValue, "fill"};
  }
  return plain("cuMemsetD32Async", [&] {
    return api_.memset_d32_async(address.value, pattern, size / kWord, handle_of(stream));
  });
}

Result<std::uint64_t> CudaDriver::count_mismatches(Address address, Bytes size,
                                                   std::uint32_t pattern, Stream stream) {
  const std::unique_ptr<std::uint32_t[]> buffer(new (std::nothrow)
                                                    std::uint32_t[kCompareBuffer / kWord]);
  if (size % kWord || !buffer) return Status{StatusCode::kInvalidValue, 0, "count_mismatches"};
  std::uint64_t mismatches = 0;
  for (Bytes done{}; done < size; done += kCompareBuffer) {
    const Bytes part = min(kCompareBuffer, size - done);
    const Status copied = plain("cuMemcpyDtoHAsync", [&] {
      const cuda::ResultCode result = api_.memcpy_dtoh_async(buffer.get(), (address + done).value,
                                                             part.count, handle_of(stream));
      return result == cuda::kSuccess ? api_.stream_synchronize(handle_of(stream)) : result;
    });
    if (!copied.ok()) return copied;
    const std::uint64_t words = part / kWord;
    mismatches +=
        words - static_cast<std::uint64_t>(std::count(buffer.get(), buffer.get() + words, pattern));
  }
  return mismatches;
}

Result<Stream> CudaDriver::create_stream() {
  cuda::StreamHandle stream = nullptr;
  const Status status = plain(
      "cuStreamCreate", [&] { return api_.stream_create(&stream, cuda::kStreamNonBlocking); });
  if (!status.ok()) return status;
  return Stream{number_of(stream)};
}

Status CudaDriver::destroy_stream(Stream stream) {
  return plain("cuStreamDestroy", [&] { return api_.stream_destroy(handle_of(stream)); });
}

Status CudaDriver::begin_capture(Stream stream) {
  return plain("cuStreamBeginCapture", [&] {
    return api_.stream_begin_capture(handle_of(stream), cuda::kCaptureModeGlobal);
  });
}

Status CudaDriver::end_capture(Stream stream) {
  return plain("cuStreamEndCapture", [&] {
    cuda::GraphHandle graph = nullptr;
    const cuda::ResultCode result = api_.stream_end_capture(handle_of(stream), &graph);
    return result == cuda::kSuccess ? api_.graph_destroy(graph) : result;
  });
}

}  // namespace vramx
