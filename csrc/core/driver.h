// The one seam between policy and platform: what the core asks of a GPU driver, for one device.
//
// Implemented by driver/cuda_driver (libcuda) and driver/sim_driver (memfd and mmap). Both pass the
// same contract suite. Every call is thread-safe and none takes a lock of the core. Costs on an
// H200 (driver 580.159, idle): create 11-18 us, map 0.6-1.7 us, set_access 26-46 us for each
// mapping in the range, unmap 17-24 us, release 12-174 us idle and 13 ms while a kernel runs.
//
// The contract, where CUDA leaves no choice:
//   * sizes and addresses are multiples of granularity(); a chunk is mapped whole, never in part;
//   * a chunk may be mapped at any number of addresses; all of them see the same bytes;
//   * unmap covers whole mappings; set_access covers only mapped addresses;
//   * release_chunk gives the caller's reference back; the memory returns to the device when the
//     last mapping of the chunk is gone too;
//   * a call that fails changes nothing.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "core/units.h"

namespace vramx {

struct MemoryInfo {
  Bytes free;   // what create_chunk could still take, all processes counted
  Bytes total;  // the device's capacity
};

// Calls that reached the driver and the time spent in them: measured by cuda_driver, charged from
// the cost table by sim_driver. Failed calls count too.
struct DriverCalls {
  std::uint64_t create = 0;
  std::uint64_t map = 0;
  std::uint64_t set_access = 0;  // calls; the time grows with the mappings in the range
  std::uint64_t unmap = 0;
  std::uint64_t release = 0;
  double total_us = 0.0;  // of the five above

  constexpr std::uint64_t total() const { return create + map + set_access + unmap + release; }
};

class Driver {
 public:
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  virtual ~Driver() = default;

  // --- memory -----------------------------------------------------------------------------------
  virtual Bytes granularity() const = 0;
  virtual Result<MemoryInfo> memory_info() = 0;

  // A range of addresses with nothing behind it.
  virtual Result<Address> reserve_address(Bytes size) = 0;
  virtual Status release_address(Address address, Bytes size) = 0;

  // A physical chunk, at no address yet.
  virtual Result<ChunkHandle> create_chunk(Bytes size) = 0;
  virtual Status release_chunk(ChunkHandle chunk) = 0;

  virtual Status map(Address address, Bytes size, ChunkHandle chunk) = 0;
  virtual Status unmap(Address address, Bytes size) = 0;
  virtual Status set_access(Address address, Bytes size) = 0;
  // From now on set_access lets the device `device` in as well; what it was called for before is
  // not changed. kNotSupported where that device cannot reach this one's memory. A call that was
  // under way may or may not include it.
  virtual Status allow_peer(int device) = 0;

  // --- order between streams --------------------------------------------------------------------
  virtual Result<Event> create_event() = 0;
  virtual Status destroy_event(Event event) = 0;
  virtual Status record_event(Event event, Stream stream) = 0;
  // True when everything queued before the last record has run; an event never recorded is
  // complete.
  virtual Result<bool> query_event(Event event) = 0;
  // Blocks the host. Only for shutdown and the user's own requests, never on an allocation path.
  virtual Status synchronize_event(Event event) = 0;
  // Work queued on `stream` from now on runs after the event's last record. Never blocks the host.
  virtual Status wait_event(Stream stream, Event event) = 0;
  // True when everything queued on the stream has run. False of a capturing one, which stays valid.
  virtual Result<bool> is_idle(Stream stream) = 0;
  // A capturing stream can neither be recorded on nor waited for outside its graph.
  virtual Result<bool> is_capturing(Stream stream) = 0;

  virtual DriverCalls calls() const = 0;
};

}  // namespace vramx
