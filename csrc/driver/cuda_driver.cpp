// Memory of a real GPU, and the contexts of its neighbours; see the header. Its streams and events
// are in cuda_streams.
#include "driver/cuda_driver.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "driver/cuda_scope.h"

namespace vramx {
namespace {

constexpr Bytes kCompareBuffer{4 << 20};

}  // namespace

template <class Call>
Status CudaDriver::timed(Timed kind, const char* name, Call call) {
  using Clock = std::chrono::steady_clock;
  const cuda::ContextScope scope(api_, context_);
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
  for (const Neighbour& neighbour : neighbours_) {
    api_.device_primary_ctx_release(neighbour.device);
  }
}

Result<cuda::ContextHandle> CudaDriver::context_of(int ordinal) {
  if (ordinal == ordinal_) return context_;
  const std::lock_guard<std::mutex> lock(neighbours_mutex_);
  for (const Neighbour& neighbour : neighbours_) {
    if (neighbour.ordinal == ordinal) return neighbour.context;
  }
  Neighbour& added = neighbours_.emplace_back(Neighbour{.ordinal = ordinal});
  Status status = cuda::to_status(api_.device_get(&added.device, ordinal), "cuDeviceGet");
  if (status.ok()) {
    status = cuda::to_status(api_.device_primary_ctx_retain(&added.context, added.device),
                             "cuDevicePrimaryCtxRetain");
  }
  if (status.ok()) return added.context;
  neighbours_.pop_back();
  return status;
}

int CudaDriver::attribute(cuda::Attribute which) const {
  int value = 0;
  api_.device_get_attribute(&value, static_cast<int>(which), device_);
  return value;
}

Result<MemoryInfo> CudaDriver::memory_info() {
  std::size_t free = 0;
  std::size_t total = 0;
  const Status status = here("cuMemGetInfo", [&] { return api_.mem_get_info(&free, &total); });
  if (!status.ok()) return status;
  return MemoryInfo{{free}, {total}};
}

Result<Address> CudaDriver::reserve_address(Bytes size) {
  cuda::DevicePointer address = 0;
  const Status status = here("cuMemAddressReserve", [&] {
    return api_.mem_address_reserve(&address, size.count, granularity_.count, 0, 0);
  });
  if (!status.ok()) return status;
  return Address{address};
}

Status CudaDriver::release_address(Address address, Bytes size) {
  return here("cuMemAddressFree", [&] { return api_.mem_address_free(address.value, size.count); });
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
  return here("cuMemsetD32Async", [&] {
    return api_.memset_d32_async(address.value, pattern, size / kWord, cuda::handle_of(stream));
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
    const Status copied = here("cuMemcpyDtoHAsync", [&] {
      const cuda::ResultCode result = api_.memcpy_dtoh_async(buffer.get(), (address + done).value,
                                                             part.count, cuda::handle_of(stream));
      return result == cuda::kSuccess ? api_.stream_synchronize(cuda::handle_of(stream)) : result;
    });
    if (!copied.ok()) return copied;
    const std::uint64_t words = part / kWord;
    mismatches +=
        words - static_cast<std::uint64_t>(std::count(buffer.get(), buffer.get() + words, pattern));
  }
  return mismatches;
}

}  // namespace vramx
