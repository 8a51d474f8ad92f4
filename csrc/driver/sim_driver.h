// A GPU that is simulated on the host: the second driver behind core/driver.h, not a mock of it. Of
// the other devices of its process it has the streams and events, which the core may name.
//
// Composes the memory (sim_memory), the streams (sim_streams) and the call desk (sim_calls) behind
// one mutex, and adds no rule of its own. Everything below "for tests" drives or observes the
// device and is neither counted nor journalled. Thread-safe. In accounting mode a map or unmap
// costs some 30 ns, in bytes mode a system call. Bytes are written when a fill is submitted, in
// the host's order: one of the orders that the streams allow. Whether another was possible is what
// happens_before answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/adaptive_mutex.h"
#include "core/driver.h"
#include "core/status.h"
#include "core/units.h"
#include "driver/data_path.h"
#include "driver/sim_calls.h"
#include "driver/sim_memory.h"
#include "driver/sim_streams.h"

namespace vramx {

class SimDriver final : public Driver, public Bytewise {
 public:
  // Fails with kInvalidValue on a granularity of zero or, with bytes, off the host's page size.
  static Result<std::unique_ptr<SimDriver>> open(const SimOptions& options);

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
  Status synchronize(int device) override;  // runs what is queued
  Result<std::uint64_t> stream_id(StreamName stream) override;
  DriverCalls calls() const override;

  // --- Bytewise: kNotSupported for bytes in accounting mode -------------------------------------
  Status fill(Address address, Bytes size, std::uint32_t pattern, Stream stream) override;
  Result<std::uint64_t> count_mismatches(Address address, Bytes size, std::uint32_t pattern,
                                         Stream stream) override;
  Result<Stream> create_stream() override;
  Status destroy_stream(Stream stream) override;
  Status begin_capture(Stream stream) override;
  Status end_capture(Stream stream) override;

  // --- for tests: streams (sim_streams says what each does); a Stream is of this device ----------
  Stream create_stream(int device);
  Status revive_stream(Stream stream);
  Result<StreamPoint> submit(StreamName stream, std::uint64_t items = 1);
  Result<StreamPoint> submit(Stream stream, std::uint64_t items = 1) {
    return submit(here(stream), items);
  }
  std::uint64_t advance(StreamName stream, std::uint64_t items);
  std::uint64_t advance(Stream stream, std::uint64_t items) { return advance(here(stream), items); }
  void advance_all();
  bool happens_before(StreamPoint point, StreamName stream) const;
  bool happens_before(StreamPoint point, Stream stream) const {
    return happens_before(point, here(stream));
  }

  // --- for tests: failures (sim_calls says what each does) --------------------------------------
  void fail_call(CallKind kind, std::uint64_t nth, StatusCode code);
  void fail_nth_call(std::uint64_t nth, StatusCode code);
  void clear_faults();
  std::uint64_t faults_fired() const;
  std::uint64_t call_count() const;
  std::uint64_t call_count(CallKind kind) const;
  std::vector<CallRecord> journal() const;

  // --- for tests: what is alive -----------------------------------------------------------------
  std::size_t live_reservations() const;
  std::size_t live_chunks() const;
  std::size_t live_mappings() const;
  std::size_t mappings_open_to(int peer) const;
  std::size_t live_events() const;
  Bytes used() const;
  Bytes resident() const;
  std::string check() const;  // the first broken equation of memory or streams, or empty

 private:
  SimDriver(const SimOptions& options, std::unique_ptr<SimPages> pages);
  Status admit_bytes(Address address, Bytes size, const char* call) const;
  StreamName here(Stream stream) const { return {stream, ordinal_}; }
  template <class Ask>
  auto locked(Ask ask) const {
    const std::lock_guard lock(mutex_);
    return ask();
  }

  const int ordinal_;
  const Bytes granularity_;
  const SimMode mode_;
  mutable AdaptiveMutex mutex_;
  CallDesk desk_;
  SimMemory memory_;
  SimStreams streams_;
};

}  // namespace vramx
