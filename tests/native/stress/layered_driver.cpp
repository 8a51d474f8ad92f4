// The drivers in between; see the header.
#include "stress/layered_driver.h"

#include <utility>

namespace vramx::stress {

// --- one broken promise

Status DefectiveDriver::release_chunk(ChunkHandle chunk) {
  if (defect_ == Defect::kReleaseDoesNothing) return ok_status();
  return inner_.release_chunk(chunk);
}

Status DefectiveDriver::map(Address at, Bytes size, ChunkHandle chunk) {
  ChunkHandle shown = chunk;
  bool& is_mapped = is_mapped_[static_cast<std::uint64_t>(chunk)];
  ChunkHandle& last = last_of_size_[size.count];
  // The one of its size that was created last may be gone by now: then the right one is mapped.
  if (defect_ == Defect::kAliasOfWrongChunk && is_mapped && last != ChunkHandle::kNone &&
      inner_.map(at, size, last).ok()) {
    return ok_status();
  }
  if (!is_mapped) last = chunk;
  is_mapped = true;
  return inner_.map(at, size, shown);
}

Status DefectiveDriver::set_access(Address at, Bytes size) {
  if (defect_ == Defect::kAccessNotGranted) return ok_status();
  return inner_.set_access(at, size);
}

Status DefectiveDriver::record_event(Event event, StreamName stream) {
  if (defect_ == Defect::kDeviceMissing) stream = {Stream::kDefault, inner_.ordinal()};
  recorded_on_[static_cast<std::uint64_t>(event)] = stream;
  return inner_.record_event(event, stream);
}

Status DefectiveDriver::record_device(Event event, int device) {
  recorded_on_.erase(static_cast<std::uint64_t>(event));
  if (defect_ != Defect::kDeviceMissing || device == inner_.ordinal()) {
    return inner_.record_device(event, device);
  }
  return inner_.record_event(event, {Stream::kDefault, device});
}

Result<bool> DefectiveDriver::query_event(Event event) {
  if (defect_ == Defect::kQueryIsHasty) return true;
  return inner_.query_event(event);
}

Status DefectiveDriver::wait_event(StreamName stream, Event event) {
  if (defect_ == Defect::kWaitDoesNothing) return ok_status();
  const auto found = recorded_on_.find(static_cast<std::uint64_t>(event));
  if (defect_ == Defect::kEventAtTheTake && found != recorded_on_.end()) {
    inner_.record_event(event, found->second).ignore();
  }
  return inner_.wait_event(stream, event);
}

Result<std::uint64_t> DefectiveDriver::stream_id(StreamName stream) {
  if (defect_ != Defect::kStreamsByHandle) return inner_.stream_id(stream);
  const Result<std::uint64_t> id = inner_.stream_id(stream);
  return id.ok() ? static_cast<std::uint64_t>(stream.handle) : id;
}

// --- the book

Result<Address> ObservedDriver::reserve_address(Bytes size) {
  ++counts_.calls;
  const Result<Address> reserved = inner_.reserve_address(size);
  if (reserved.ok()) reservations_.push_back({reserved.value(), size});
  return reserved;
}

Result<ChunkHandle> ObservedDriver::create_chunk(Bytes size) {
  ++counts_.calls;
  const Result<ChunkHandle> created = inner_.create_chunk(size);
  if (!created.ok()) {
    ++counts_.failed_growths;
    return created;
  }
  ++counts_.created;
  chunks_[created.value()].size = size;
  return created;
}

Status ObservedDriver::release_chunk(ChunkHandle chunk) {
  ++counts_.calls;
  const Status released = inner_.release_chunk(chunk);
  if (!released.ok()) {
    ++counts_.failed_returns;
    return released;
  }
  ++counts_.released;
  chunks_[chunk].is_referenced = false;
  forget_if_gone(chunk);
  return released;
}

Status ObservedDriver::map(Address at, Bytes size, ChunkHandle chunk) {
  ++counts_.calls;
  const Status mapped = inner_.map(at, size, chunk);
  if (!mapped.ok()) {
    ++counts_.failed_growths;
    return mapped;
  }
  mappings_[at] = {size, chunk, false};
  Chunk& record = chunks_[chunk];
  if (record.mappings == 0) record.canonical = at;
  ++record.mappings;
  return mapped;
}

Status ObservedDriver::unmap(Address at, Bytes size) {
  ++counts_.calls;
  listener_.on_unmap(at, size);
  const Status unmapped = inner_.unmap(at, size);
  if (!unmapped.ok()) {
    ++counts_.failed_returns;
    return unmapped;
  }
  const auto first = mappings_.lower_bound(at);
  const auto last = mappings_.lower_bound(at + size);
  std::vector<ChunkHandle> touched;
  for (auto mapping = first; mapping != last; ++mapping) {
    --chunks_[mapping->second.chunk].mappings;
    touched.push_back(mapping->second.chunk);
  }
  mappings_.erase(first, last);
  for (const ChunkHandle chunk : touched) forget_if_gone(chunk);
  return unmapped;
}

Status ObservedDriver::set_access(Address at, Bytes size) {
  ++counts_.calls;
  const Status granted = inner_.set_access(at, size);
  if (!granted.ok()) {
    ++counts_.failed_growths;
    return granted;
  }
  for (auto mapping = mappings_.lower_bound(at);
       mapping != mappings_.end() && mapping->first < at + size; ++mapping) {
    mapping->second.is_accessible = true;
  }
  return granted;
}

void ObservedDriver::forget_if_gone(ChunkHandle handle) {
  const auto found = chunks_.find(handle);
  if (found == chunks_.end() || found->second.is_referenced || found->second.mappings != 0) return;
  listener_.on_chunk_gone(handle);
  chunks_.erase(found);
}

Result<Event> ObservedDriver::create_event(int device) {
  return ++counts_.calls, inner_.create_event(device);
}

Status ObservedDriver::record_event(Event event, StreamName stream) {
  return ++counts_.marks, ++counts_.calls, inner_.record_event(event, stream);
}

Status ObservedDriver::record_device(Event event, int device) {
  return ++counts_.marks, ++counts_.calls, inner_.record_device(event, device);
}

Result<bool> ObservedDriver::query_event(Event event) {
  return ++counts_.calls, inner_.query_event(event);
}

Status ObservedDriver::wait_event(StreamName stream, Event event) {
  ++counts_.calls;
  ++counts_.waits;
  return inner_.wait_event(stream, event);
}

Status ObservedDriver::synchronize(int device) {
  ++counts_.calls;
  ++counts_.host_waits;
  return inner_.synchronize(device);
}

Result<std::uint64_t> ObservedDriver::stream_id(StreamName stream) {
  return ++counts_.calls, inner_.stream_id(stream);
}

void ObservedDriver::forget_since(const Counts& then) {
  const Counts now = std::exchange(counts_, then);
  counts_.failed_growths = now.failed_growths;
  counts_.failed_returns = now.failed_returns;
}

std::vector<PhysicalPiece> ObservedDriver::pieces(Address at, Bytes size) const {
  std::vector<PhysicalPiece> found;
  auto mapping = mappings_.upper_bound(at);
  if (mapping == mappings_.begin()) return {};
  --mapping;
  for (Address next = at; next < at + size; ++mapping) {
    if (mapping == mappings_.end() || mapping->first > next) return {};
    const Address end = mapping->first + mapping->second.size;
    if (end <= next || !mapping->second.is_accessible) return {};
    const Bytes length = min(end - next, at + size - next);
    found.push_back({mapping->second.chunk, next - mapping->first, length});
    next = next + length;
  }
  return found;
}

std::uint64_t ObservedDriver::relative(Address at) const {
  std::uint64_t number = 0;
  for (const Reservation& reservation : reservations_) {
    if (at >= reservation.base && at < reservation.base + reservation.size) {
      return (number << 56) + (at - reservation.base).count;
    }
    ++number;
  }
  return number << 56;
}

}  // namespace vramx::stress
