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

  virtual int ordinal() const = 0;  // the device's number in this process

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
  // A stream is named by its handle and its device, and may be of another device than this
  // driver's, because memory of one device is used on streams of another. kDefault and kLegacy are
  // one stream. kPerThread always exists and is the calling thread's own. Any other handle must be
  // of a stream that exists: a driver that is asked about a destroyed one may end the process. An
  // event, whose handle is the caller's alone, is the safe thing to ask later.
  //
  // A stream that is being captured into a graph is refused with kNotSupported by the three calls
  // that name one, and its capture stays valid. That the stream begins a capture meanwhile, in
  // another thread, is for the caller to rule out.

  // An event belongs to the context of a device, and stands for work of that device alone.
  virtual Result<Event> create_event(int device) = 0;
  virtual Status destroy_event(Event event) = 0;
  // The event stands for everything queued on the stream until now; for nothing else any more.
  // kInvalidValue where the event is of another device, or other context, than the stream.
  virtual Status record_event(Event event, StreamName stream) = 0;
  // The event stands for everything queued until now on any stream of the device's primary context.
  // A capture on the device makes the call fail and is invalidated by it, so the caller knows that
  // none is under way. kNotSupported where the driver cannot do it (before CUDA 12.5).
  virtual Status record_device(Event event, int device) = 0;
  // True when everything that the event stands for has run; an event never recorded is complete.
  virtual Result<bool> query_event(Event event) = 0;
  // Work queued on the stream from now on runs after what the event stands for now. Never blocks
  // the host. The event may be of another device.
  virtual Status wait_event(StreamName stream, Event event) = 0;
  // Blocks the host until everything queued on the device has run. Only for what the user asks for.
  // A capture on the device makes the call fail and is invalidated by it.
  virtual Status synchronize(int device) = 0;
  // A number that no other stream of the process has, had or will have: a handle is given out again
  // once its stream is destroyed, and kPerThread is another stream in every thread. kNotSupported
  // before CUDA 12.0.
  virtual Result<std::uint64_t> stream_id(StreamName stream) = 0;

  virtual DriverCalls calls() const = 0;
};

}  // namespace vramx
