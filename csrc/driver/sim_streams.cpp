// Names, events and captures of the simulated process; see the header. How its queues move is in
// sim_order.
#include "driver/sim_streams.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "driver/sim_calls.h"

namespace vramx {
namespace {

std::uint64_t key(Event event) { return static_cast<std::uint64_t>(event); }

// CUDA's numbers for these: CUDA_ERROR_INVALID_HANDLE and the stream-capture family.
Status invalid_handle(const char* call) { return {StatusCode::kInvalidValue, 400, call}; }
Status capture_unsupported(const char* call) { return {StatusCode::kDriverError, 900, call}; }
Status capture_invalidated(const char* call) { return {StatusCode::kDriverError, 901, call}; }
Status capture_unmatched(const char* call) { return {StatusCode::kDriverError, 903, call}; }

// Of this thread alone: the system gives a thread's own id to another one later.
std::uint64_t thread_number() {
  static std::atomic<std::uint64_t> threads{0};
  thread_local const std::uint64_t number = ++threads;
  return number;
}

[[noreturn]] void end_process(Stream stream, const char* call) {
  std::fprintf(stderr, "simulated device: %s on stream %#llx, which is destroyed\n", call,
               static_cast<unsigned long long>(stream));
  std::abort();
}

}  // namespace

SimStreams::SimStreams(int ordinal) : base_((static_cast<std::uint64_t>(ordinal) + 1) << 32) {}

SimStreams::Key SimStreams::key_of(StreamName stream) {
  switch (stream.handle) {
    case Stream::kDefault:
    case Stream::kLegacy:
      return {Stream::kDefault, stream.device, 0};
    case Stream::kPerThread:
      return {Stream::kPerThread, stream.device, thread_number()};
    default:
      return {stream.handle, 0, 0};
  }
}

std::uint32_t SimStreams::open_queue(const Key& key, int device) {
  const auto index = static_cast<std::uint32_t>(queues_.size());
  queues_.push_back({.device = device});
  names_[key] = index;
  return index;
}

Result<std::uint32_t> SimStreams::queue_of(StreamName stream, const char* call) {
  if (stream.device < 0) return invalid_handle(call);
  const Key key = key_of(stream);
  const auto found = names_.find(key);
  if (found == names_.end()) return open_queue(key, stream.device);
  const Queue& queue = queues_[found->second];
  if (!queue.is_alive || queue.device != stream.device) return invalid_handle(call);
  return found->second;
}

Result<std::uint32_t> SimStreams::open_to_calls(StreamName stream, const char* call) {
  const auto found = names_.find(key_of(stream));
  if (found != names_.end() && !queues_[found->second].is_alive) end_process(stream.handle, call);
  const Result<std::uint32_t> index = queue_of(stream, call);
  if (index.ok() && queues_[index.value()].capture != Capture::kNone) {
    return failure(StatusCode::kNotSupported, call);
  }
  return index;
}

Stream SimStreams::create_stream(int device) {
  const Stream stream{base_ + streams_made_++};  // far from the small numbers that tests make up
  open_queue(key_of({stream, device}), device);
  return stream;
}

Status SimStreams::destroy_stream(Stream stream) {
  const auto found = names_.find(Key{stream});
  const bool is_live = found != names_.end() && queues_[found->second].is_alive;
  const bool is_of_cuda = stream <= Stream::kPerThread;
  if (!is_live || is_of_cuda) return invalid_handle("destroy_stream");
  queues_[found->second].is_alive = false;
  return ok_status();
}

Status SimStreams::revive_stream(Stream stream) {
  const auto found = names_.find(Key{stream});
  if (found == names_.end() || queues_[found->second].is_alive) {
    return invalid_handle("revive_stream");
  }
  open_queue(found->first, queues_[found->second].device);
  return ok_status();
}

Result<Event> SimStreams::create_event(int device) {
  if (device < 0) return failure(StatusCode::kInvalidValue, "create_event");
  const Event event{++events_made_};
  events_[key(event)] = {.device = device};
  return event;
}

Status SimStreams::destroy_event(Event event) {
  return events_.erase(key(event)) == 1 ? ok_status() : invalid_handle("destroy_event");
}

Status SimStreams::record_event(Event event, StreamName stream) {
  const Result<std::uint32_t> index = open_to_calls(stream, "record_event");
  if (!index.ok()) return index.status();
  const auto found = events_.find(key(event));
  if (found == events_.end() || found->second.device != stream.device) {
    return invalid_handle("record_event");
  }
  found->second.clock = clock_of(index.value());
  return ok_status();
}

Status SimStreams::record_device(Event event, int device) {
  const auto found = events_.find(key(event));
  if (found == events_.end() || found->second.device != device) {
    return invalid_handle("record_device");
  }
  if (spoil_captures(device)) return capture_unsupported("record_device");
  found->second.clock = clock_of_device(device);
  return ok_status();
}

Result<bool> SimStreams::query_event(Event event) const {
  const auto found = events_.find(key(event));
  if (found == events_.end()) return invalid_handle("query_event");
  return is_reached(found->second.clock);
}

Status SimStreams::wait_event(StreamName stream, Event event) {
  const Result<std::uint32_t> index = open_to_calls(stream, "wait_event");
  if (!index.ok()) return index.status();
  const auto found = events_.find(key(event));
  if (found == events_.end()) return invalid_handle("wait_event");
  Queue& queue = queues_[index.value()];
  const Clock& until = found->second.clock;
  merge(queue.clock, until);
  if (!is_reached(until)) queue.waits.push_back({queue.submitted, until});
  return ok_status();
}

Status SimStreams::synchronize(int device) {
  if (device < 0) return failure(StatusCode::kInvalidValue, "synchronize");
  if (spoil_captures(device)) return capture_unsupported("synchronize");
  complete(clock_of_device(device));
  return ok_status();
}

Result<std::uint64_t> SimStreams::stream_id(StreamName stream) {
  const Result<std::uint32_t> index = open_to_calls(stream, "stream_id");
  if (!index.ok()) return index.status();
  return base_ + index.value();
}

Status SimStreams::begin_capture(StreamName stream) {
  const Result<std::uint32_t> index = queue_of(stream, "begin_capture");
  if (!index.ok()) return index.status();
  Queue& queue = queues_[index.value()];
  // The legacy default stream cannot capture, and captures do not nest.
  const bool is_default = key_of(stream).handle == Stream::kDefault;
  if (is_default || queue.capture != Capture::kNone) return capture_unsupported("begin_capture");
  queue.capture = Capture::kActive;
  return ok_status();
}

Status SimStreams::end_capture(StreamName stream) {
  const Result<std::uint32_t> index = queue_of(stream, "end_capture");
  if (!index.ok()) return index.status();
  const Capture was = std::exchange(queues_[index.value()].capture, Capture::kNone);
  if (was == Capture::kNone) return capture_unmatched("end_capture");
  return was == Capture::kActive ? ok_status() : capture_invalidated("end_capture");
}

Result<bool> SimStreams::is_capturing(StreamName stream) {
  const Result<std::uint32_t> index = queue_of(stream, "is_capturing");
  if (!index.ok()) return index.status();
  return queues_[index.value()].capture != Capture::kNone;
}

bool SimStreams::spoil_captures(int device) {
  bool was_capturing = false;
  for (Queue& queue : queues_) {
    if (queue.device != device || queue.capture == Capture::kNone) continue;
    queue.capture = Capture::kInvalidated;
    was_capturing = true;
  }
  return was_capturing;
}

}  // namespace vramx
