// A GPU that is simulated on the host: the second driver behind core/driver.h, not a mock of it.
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
  Status synchronize_event(Event event) override;  // runs the work that the event stands for
  Status wait_event(Stream stream, Event event) override;
  Result<bool> is_idle(Stream stream) override;
  Result<bool> is_capturing(Stream stream) override;
  DriverCalls calls() const override;

  // --- Bytewise: kNotSupported for bytes in accounting mode -------------------------------------
  Status fill(Address address, Bytes size, std::uint32_t pattern, Stream stream) override;
  Result<std::uint64_t> count_mismatches(Address address, Bytes size, std::uint32_t pattern,
                                         Stream stream) override;
  Result<Stream> create_stream() override;
  Status destroy_stream(Stream stream) override;
  Status begin_capture(Stream stream) override;
  Status end_capture(Stream stream) override;

  // --- for tests: streams (sim_streams says what each does) -------------------------------------
  Result<StreamPoint> submit(Stream stream, std::uint64_t items = 1);
  std::uint64_t advance(Stream stream, std::uint64_t items);
  void advance_all();
  Status revive_stream(Stream stream);
  bool happens_before(StreamPoint point, Stream stream) const;

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

  const Bytes granularity_;
  const SimMode mode_;
  mutable AdaptiveMutex mutex_;
  CallDesk desk_;
  SimMemory memory_;
  SimStreams streams_;
};

}  // namespace vramx
