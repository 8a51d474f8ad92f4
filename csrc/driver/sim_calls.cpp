// Counting, fault injection and the journal of the simulated device; see the header.
#include "driver/sim_calls.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace vramx {

const char* call_name(CallKind kind) {
  static constexpr std::array<const char*, kCallKinds> kNames{
      "memory_info",  "reserve_address", "release_address", "create_chunk", "release_chunk",
      "map",          "unmap",           "set_access",      "create_event", "destroy_event",
      "record_event", "record_device",   "query_event",     "wait_event",   "synchronize",
      "stream_id",    "allow_peer"};
  return kNames[static_cast<std::size_t>(kind)];
}

Status failure(StatusCode code, const char* call) {
  switch (code) {
    case StatusCode::kOk:
      return ok_status();
    case StatusCode::kInvalidValue:
      return {code, 1, call};
    case StatusCode::kOutOfMemory:
      return {code, 2, call};
    case StatusCode::kNotInitialized:
      return {code, 3, call};
    case StatusCode::kNotSupported:
      return {code, 801, call};
    case StatusCode::kDriverError:
      break;
  }
  return {StatusCode::kDriverError, 999, call};
}

void CallDesk::fail_call(CallKind kind, std::uint64_t nth, StatusCode code) {
  kind_faults_[index(kind)] = {counts_[index(kind)] + nth, code};
}

void CallDesk::fail_nth_call(std::uint64_t nth, StatusCode code) {
  any_fault_ = {total_ + nth, code};
}

void CallDesk::clear_faults() {
  kind_faults_.fill({});
  any_fault_ = {};
}

bool CallDesk::fires(Fault& fault, std::uint64_t count) {
  if (fault.at != count) return false;
  fault.at = 0;
  ++faults_fired_;
  return true;
}

Status CallDesk::admit(CallKind kind) {
  ++total_;
  Fault& fault = kind_faults_[index(kind)];
  if (fires(fault, ++counts_[index(kind)])) return failure(fault.code, call_name(kind));
  if (fires(any_fault_, total_)) return failure(any_fault_.code, call_name(kind));
  return ok_status();
}

void CallDesk::write(const CallRecord& record) {
  if (journal_entries_ == 0) return;
  if (ring_.size() < journal_entries_) {
    ring_.push_back(record);
    return;
  }
  ring_[next_] = record;
  next_ = (next_ + 1) % journal_entries_;
}

void CallDesk::note(CallRecord& record, const Result<Address>& result) {
  record.status = result.status();
  if (result.ok()) record.address = result.value();
}

void CallDesk::note(CallRecord& record, const Result<ChunkHandle>& result) {
  record.status = result.status();
  if (result.ok()) record.chunk = result.value();
}

void CallDesk::note(CallRecord& record, const Result<Event>& result) {
  record.status = result.status();
  if (result.ok()) record.event = result.value();
}

std::vector<CallRecord> CallDesk::journal() const {
  std::vector<CallRecord> oldest_first;
  oldest_first.reserve(ring_.size());
  for (std::size_t i = 0; i < ring_.size(); ++i) {
    oldest_first.push_back(ring_[(next_ + i) % ring_.size()]);
  }
  return oldest_first;
}

DriverCalls CallDesk::driver_calls(double total_us) const {
  return {.create = call_count(CallKind::kCreateChunk),
          .map = call_count(CallKind::kMap),
          .set_access = call_count(CallKind::kSetAccess),
          .unmap = call_count(CallKind::kUnmap),
          .release = call_count(CallKind::kReleaseChunk),
          .total_us = total_us};
}

}  // namespace vramx
