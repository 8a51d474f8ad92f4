// The driver behind core/driver.h for a real GPU, through libcuda's virtual memory calls.
//
// Passes calls on and adds no policy: it makes the device's primary context current where another
// one is (torch's own threads pay one read), relaxes the thread's capture mode so that a call made
// during a graph capture leaves the capture valid, and times the five memory calls. It enforces no
// rule itself: libcuda does. Thread-safe, and only allow_peer takes a lock. Its own cost is below
// 0.1 us a call.
//
// Nothing here runs at exit: an owner that must outlive the driver's shutdown leaks the object, and
// one that does not gets errors back from libcuda, which are ignored in the destructor.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "core/driver.h"
#include "core/status.h"
#include "core/units.h"
#include "driver/cuda_api.h"
#include "driver/data_path.h"

namespace vramx {

class CudaDriver final : public Driver, public Bytewise {
 public:
  // kNotInitialized without libcuda or a device (probe_cuda says why), kInvalidValue for an ordinal
  // that does not exist, kNotSupported where the device has no virtual memory management. Retains
  // the primary context, so it starts CUDA on the device.
  static Result<std::unique_ptr<CudaDriver>> open(int device);
  ~CudaDriver() override;

  // --- Driver -----------------------------------------------------------------------------------
  Bytes granularity() const override { return granularity_; }
  Result<MemoryInfo> memory_info() override;
  Result<Address> reserve_address(Bytes size) override;
  Status release_address(Address address, Bytes size) override;
  Result<ChunkHandle> create_chunk(Bytes size) override;
  Status release_chunk(ChunkHandle chunk) override;
  Status map(Address address, Bytes size, ChunkHandle chunk) override;
  Status unmap(Address address, Bytes size) override;
  Status set_access(Address address, Bytes size) override;
  Status allow_peer(int device) override;
  Result<Event> create_event() override;
  Status destroy_event(Event event) override;
  Status record_event(Event event, Stream stream) override;
  Result<bool> query_event(Event event) override;
  Status synchronize_event(Event event) override;
  Status wait_event(Stream stream, Event event) override;
  Result<bool> is_idle(Stream stream) override;
  Result<bool> is_capturing(Stream stream) override;
  DriverCalls calls() const override;

  // --- Bytewise ---------------------------------------------------------------------------------
  Status fill(Address address, Bytes size, std::uint32_t pattern, Stream stream) override;
  Result<std::uint64_t> count_mismatches(Address address, Bytes size, std::uint32_t pattern,
                                         Stream stream) override;
  Result<Stream> create_stream() override;
  Status destroy_stream(Stream stream) override;
  // In CUDA's default mode, global: the strictest about calls that others make meanwhile.
  Status begin_capture(Stream stream) override;
  Status end_capture(Stream stream) override;

 private:
  enum class Timed : std::size_t { kCreate, kMap, kSetAccess, kUnmap, kRelease };
  class Scope;

  CudaDriver(const cuda::Api& api, int ordinal) : api_(api), ordinal_(ordinal) {}
  Status start();
  int attribute(cuda::Attribute which) const;
  template <class Call>
  Status plain(const char* name, Call call) const;
  template <class Query>
  Result<bool> is_done(const char* name, Query query) const;
  cuda::ResultCode look_for_capture(Stream stream, bool* is_captured) const;
  template <class Call>
  Status timed(Timed kind, const char* name, Call call);
  std::uint64_t count(Timed kind) const;

  const cuda::Api& api_;
  const int ordinal_;
  cuda::Device device_ = 0;
  cuda::ContextHandle context_ = nullptr;  // null until retained
  cuda::AllocationProperties properties_{};
  Bytes granularity_{};

  // Who gets access to a mapping: this device first, then its peers. Entries are only added, so a
  // reader takes the first `accessor_count_` of them without a lock.
  static constexpr std::size_t kMostAccessors = 64;
  std::array<cuda::AccessDescription, kMostAccessors> accessors_{};
  std::atomic<std::size_t> accessor_count_{0};
  std::mutex peers_mutex_;  // one writer at a time

  std::array<std::atomic<std::uint64_t>, 5> counts_{};
  std::atomic<std::uint64_t> total_ns_{0};
};

}  // namespace vramx
