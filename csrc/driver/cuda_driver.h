// The driver behind core/driver.h for a real GPU, through libcuda's virtual memory calls.
//
// Passes calls on and adds no policy: it makes each under the primary context of the device that
// the call is about, in a capture mode that leaves captures valid (cuda_scope), and times the five
// memory calls. Of the rules it enforces one, that a captured stream is left alone; the others are
// enforced by libcuda. Thread-safe: allow_peer takes a lock, and so does what concerns the streams
// of other devices. Its own cost is below 0.1 us a call.
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
#include <vector>

#include "core/driver.h"
#include "core/status.h"
#include "core/units.h"
#include "driver/cuda_api.h"
#include "driver/cuda_scope.h"
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
  int ordinal() const override { return ordinal_; }
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
  Result<Event> create_event(int device) override;
  Status destroy_event(Event event) override;
  Status record_event(Event event, StreamName stream) override;
  Status record_device(Event event, int device) override;
  Result<bool> query_event(Event event) override;
  Status wait_event(StreamName stream, Event event) override;
  Status synchronize(int device) override;
  Result<std::uint64_t> stream_id(StreamName stream) override;
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
  // Another device, whose primary context this driver has retained.
  struct Neighbour {
    int ordinal = 0;
    cuda::Device device = 0;
    cuda::ContextHandle context = nullptr;
  };

  CudaDriver(const cuda::Api& api, int ordinal) : api_(api), ordinal_(ordinal) {}
  Status start();
  int attribute(cuda::Attribute which) const;
  // The primary context of any device: of another one it is retained when it is first asked for.
  Result<cuda::ContextHandle> context_of(int ordinal);
  // Makes the call under this device's context.
  template <class Call>
  Status here(const char* name, Call call) const {
    return cuda::call_under(api_, context_, name, call);
  }
  // Makes the call under the context of the stream's device, unless the stream is being captured.
  template <class Call>
  Status outside_capture(StreamName stream, const char* name, Call call);
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

  std::mutex neighbours_mutex_;
  std::vector<Neighbour> neighbours_;

  std::array<std::atomic<std::uint64_t>, 5> counts_{};
  std::atomic<std::uint64_t> total_ns_{0};
};

}  // namespace vramx
