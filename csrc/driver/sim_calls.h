// The call desk of the simulated device: every fallible call passes here once, and here it is
// counted, made to fail on request, and written to the journal.
//
// Knows nothing of what a call does. Not thread-safe: sim_driver holds its lock. A call costs two
// comparisons and a count, plus a copy of one record where the journal is on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/driver.h"
#include "core/status.h"
#include "core/units.h"

namespace vramx {

enum class CallKind : std::uint8_t {
  kMemoryInfo,
  kReserveAddress,
  kReleaseAddress,
  kCreateChunk,
  kReleaseChunk,
  kMap,
  kUnmap,
  kSetAccess,
  kCreateEvent,
  kDestroyEvent,
  kRecordEvent,
  kRecordDevice,
  kQueryEvent,
  kWaitEvent,
  kSynchronize,
  kStreamId,
  kAllowPeer,
};
constexpr std::size_t kCallKinds = 17;

const char* call_name(CallKind kind);

// The number CUDA gives to a failure of this kind, so that a simulated status reads like a real
// one.
Status failure(StatusCode code, const char* call);

// One call as it was made; fields that the call does not have stay zero. What the call returned
// (an address, a chunk, an event) is filled in when it succeeded. A call about a whole device has
// the device in `stream`.
struct CallRecord {
  CallKind kind = CallKind::kMemoryInfo;
  Address address{};
  Bytes size{};
  ChunkHandle chunk = ChunkHandle::kNone;
  StreamName stream{};
  Event event = Event::kNone;
  Status status{};
};

class CallDesk {
 public:
  explicit CallDesk(std::size_t journal_entries) : journal_entries_(journal_entries) {}

  // Runs `operation` unless this call is the one that was asked to fail; either way it is counted
  // and recorded. `operation` returns a Status or a Result and changes nothing when it fails.
  template <class Operation>
  auto run(CallRecord record, Operation operation) -> decltype(operation()) {
    if (const Status injected = admit(record.kind); !injected.ok()) {
      record.status = injected;
      write(record);
      return injected;
    }
    auto outcome = operation();
    if (journal_entries_ != 0) {
      note(record, outcome);
      write(record);
    }
    return outcome;
  }

  // The nth call from now, 1 being the next, fails with `code` and does nothing: the nth of one
  // kind, or the nth of all kinds. Each request fires once.
  void fail_call(CallKind kind, std::uint64_t nth, StatusCode code);
  void fail_nth_call(std::uint64_t nth, StatusCode code);
  void clear_faults();

  std::uint64_t faults_fired() const { return faults_fired_; }
  std::uint64_t call_count() const { return total_; }
  std::uint64_t call_count(CallKind kind) const { return counts_[index(kind)]; }
  std::vector<CallRecord> journal() const;  // oldest first, at most `journal_entries`
  DriverCalls driver_calls(double total_us) const;

 private:
  struct Fault {
    std::uint64_t at = 0;  // the value of the counter at which it fires; 0 is never
    StatusCode code = StatusCode::kOk;
  };

  static std::size_t index(CallKind kind) { return static_cast<std::size_t>(kind); }
  Status admit(CallKind kind);
  bool fires(Fault& fault, std::uint64_t count);
  void write(const CallRecord& record);

  static void note(CallRecord& record, const Status& status) { record.status = status; }
  static void note(CallRecord& record, const Result<Address>& result);
  static void note(CallRecord& record, const Result<ChunkHandle>& result);
  static void note(CallRecord& record, const Result<Event>& result);
  template <class T>
  static void note(CallRecord& record, const Result<T>& result) {
    record.status = result.status();
  }

  const std::size_t journal_entries_;
  std::vector<CallRecord> ring_;  // grows to journal_entries_, then wraps
  std::size_t next_ = 0;          // the slot to write, once the ring is full

  std::array<std::uint64_t, kCallKinds> counts_{};
  std::array<Fault, kCallKinds> kind_faults_{};
  std::uint64_t total_ = 0;
  Fault any_fault_{};
  std::uint64_t faults_fired_ = 0;
};

}  // namespace vramx
