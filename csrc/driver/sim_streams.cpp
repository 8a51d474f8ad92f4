// Queues, clocks and captures of the simulated device; see the header.
#include "driver/sim_streams.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "driver/sim_calls.h"

namespace vramx {
namespace {

std::uint64_t key(Stream stream) { return static_cast<std::uint64_t>(stream); }
std::uint64_t key(Event event) { return static_cast<std::uint64_t>(event); }

// CUDA's numbers for these: CUDA_ERROR_INVALID_HANDLE and the stream-capture family.
Status invalid_handle(const char* call) { return {StatusCode::kInvalidValue, 400, call}; }
Status capture_unsupported(const char* call) { return {StatusCode::kDriverError, 900, call}; }
Status capture_invalidated(const char* call) { return {StatusCode::kDriverError, 901, call}; }
Status capture_unmatched(const char* call) { return {StatusCode::kDriverError, 903, call}; }
Status capture_isolation(const char* call) { return {StatusCode::kDriverError, 905, call}; }

}  // namespace

std::uint32_t SimStreams::open_queue(Stream stream) {
  const auto index = static_cast<std::uint32_t>(queues_.size());
  queues_.emplace_back();
  names_[key(stream)] = index;
  return index;
}

Result<std::uint32_t> SimStreams::queue_of(Stream stream, const char* call) {
  const auto found = names_.find(key(stream));
  if (found == names_.end()) return open_queue(stream);
  if (found->second == kDestroyed) return invalid_handle(call);
  return found->second;
}

Result<Stream> SimStreams::create_stream() {
  const Stream stream{next_stream_++};
  open_queue(stream);
  return stream;
}

Status SimStreams::destroy_stream(Stream stream) {
  const auto found = names_.find(key(stream));
  const bool is_live = found != names_.end() && found->second != kDestroyed;
  if (!is_live || stream == Stream::kDefault) return invalid_handle("destroy_stream");
  found->second = kDestroyed;
  return ok_status();
}

Status SimStreams::revive_stream(Stream stream) {
  const auto found = names_.find(key(stream));
  if (found == names_.end() || found->second != kDestroyed) return invalid_handle("revive_stream");
  open_queue(stream);
  return ok_status();
}

Result<Event> SimStreams::create_event() {
  const Event event{next_event_++};
  events_[key(event)];
  return event;
}

Status SimStreams::destroy_event(Event event) {
  return events_.erase(key(event)) == 1 ? ok_status() : invalid_handle("destroy_event");
}

Status SimStreams::record_event(Event event, Stream stream) {
  const auto found = events_.find(key(event));
  if (found == events_.end()) return invalid_handle("record_event");
  const Result<std::uint32_t> index = queue_of(stream, "record_event");
  if (!index.ok()) return index.status();
  Queue& queue = queues_[index.value()];
  if (queue.capture != Capture::kNone) {
    queue.capture = Capture::kInvalidated;
    return capture_unsupported("record_event");
  }
  found->second = clock_of(index.value());
  return ok_status();
}

Result<bool> SimStreams::query_event(Event event) const {
  const auto found = events_.find(key(event));
  if (found == events_.end()) return invalid_handle("query_event");
  return is_reached(found->second);
}

Status SimStreams::synchronize_event(Event event) {
  const auto found = events_.find(key(event));
  if (found == events_.end()) return invalid_handle("synchronize_event");
  complete(found->second);
  return ok_status();
}

Status SimStreams::wait_event(Stream stream, Event event) {
  const auto found = events_.find(key(event));
  if (found == events_.end()) return invalid_handle("wait_event");
  const Result<std::uint32_t> index = queue_of(stream, "wait_event");
  if (!index.ok()) return index.status();
  Queue& queue = queues_[index.value()];
  if (queue.capture != Capture::kNone) {
    queue.capture = Capture::kInvalidated;
    return capture_isolation("wait_event");
  }
  merge(queue.clock, found->second);
  if (!is_reached(found->second)) queue.waits.push_back({queue.submitted, found->second});
  return ok_status();
}

Status SimStreams::begin_capture(Stream stream) {
  const Result<std::uint32_t> index = queue_of(stream, "begin_capture");
  if (!index.ok()) return index.status();
  Queue& queue = queues_[index.value()];
  // The legacy default stream cannot capture, and captures do not nest.
  if (stream == Stream::kDefault || queue.capture != Capture::kNone) {
    return capture_unsupported("begin_capture");
  }
  queue.capture = Capture::kActive;
  return ok_status();
}

Status SimStreams::end_capture(Stream stream) {
  const Result<std::uint32_t> index = queue_of(stream, "end_capture");
  if (!index.ok()) return index.status();
  const Capture was = std::exchange(queues_[index.value()].capture, Capture::kNone);
  if (was == Capture::kNone) return capture_unmatched("end_capture");
  return was == Capture::kActive ? ok_status() : capture_invalidated("end_capture");
}

Result<bool> SimStreams::is_idle(Stream stream) {
  const Result<std::uint32_t> index = queue_of(stream, "is_idle");
  if (!index.ok()) return index.status();
  const Queue& queue = queues_[index.value()];
  return queue.capture == Capture::kNone && queue.completed == queue.submitted &&
         is_reached(queue.clock);
}

Result<bool> SimStreams::is_capturing(Stream stream) {
  const Result<std::uint32_t> index = queue_of(stream, "is_capturing");
  if (!index.ok()) return index.status();
  return queues_[index.value()].capture != Capture::kNone;
}

Result<StreamPoint> SimStreams::submit(Stream stream, std::uint64_t items) {
  const Result<std::uint32_t> index = queue_of(stream, "submit");
  if (!index.ok()) return index.status();
  Queue& queue = queues_[index.value()];
  if (queue.capture == Capture::kNone) queue.submitted += items;
  return StreamPoint{index.value(), queue.submitted};
}

bool SimStreams::is_reached(const Clock& clock) const {
  for (std::size_t i = 0; i < clock.size(); ++i) {
    if (queues_[i].completed < clock[i]) return false;
  }
  return true;
}

bool SimStreams::pass_waits(Queue& queue) {
  while (!queue.waits.empty() && queue.waits.front().after == queue.completed) {
    if (!is_reached(queue.waits.front().until)) return false;
    queue.waits.pop_front();
  }
  return true;
}

std::uint64_t SimStreams::advance(Stream stream, std::uint64_t items) {
  const Result<std::uint32_t> index = queue_of(stream, "advance");
  if (!index.ok()) return 0;
  Queue& queue = queues_[index.value()];
  std::uint64_t done = 0;
  while (done < items && pass_waits(queue) && queue.completed < queue.submitted) {
    ++queue.completed;
    ++done;
  }
  return done;
}

// A clock is closed: what an item in it waited for is in it too, since a record copies all that its
// stream waited for. So everything up to it can be finished at once, in any order.
void SimStreams::complete(const Clock& clock) {
  for (std::size_t i = 0; i < clock.size(); ++i) {
    Queue& queue = queues_[i];
    queue.completed = std::max(queue.completed, clock[i]);
    while (!queue.waits.empty() && queue.waits.front().after < queue.completed) {
      queue.waits.pop_front();
    }
  }
}

void SimStreams::advance_all() {
  Clock everything;
  for (const Queue& queue : queues_) everything.push_back(queue.submitted);
  complete(everything);
}

SimStreams::Clock SimStreams::clock_of(std::uint32_t index) const {
  Clock clock = queues_[index].clock;
  clock.resize(std::max<std::size_t>(clock.size(), index + 1));
  clock[index] = queues_[index].submitted;
  return clock;
}

Status SimStreams::drain(Stream stream) {
  const Result<std::uint32_t> index = queue_of(stream, "drain");
  if (!index.ok()) return index.status();
  if (queues_[index.value()].capture != Capture::kNone) return capture_unsupported("drain");
  complete(clock_of(index.value()));
  return ok_status();
}

bool SimStreams::happens_before(StreamPoint point, Stream stream) const {
  if (point.queue >= queues_.size()) return false;
  if (point.position <= queues_[point.queue].completed) return true;
  const auto found = names_.find(key(stream));
  if (found == names_.end() || found->second == kDestroyed) return false;
  const Queue& queue = queues_[found->second];
  if (found->second == point.queue) return point.position <= queue.submitted;
  return point.queue < queue.clock.size() && point.position <= queue.clock[point.queue];
}

void SimStreams::merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

bool SimStreams::is_within_submitted(const Clock& clock) const {
  for (std::size_t i = 0; i < clock.size(); ++i) {
    if (i >= queues_.size() || clock[i] > queues_[i].submitted) return false;
  }
  return true;
}

std::string SimStreams::check() const {
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    const Queue& queue = queues_[i];
    const std::string name = "queue " + std::to_string(i);
    if (queue.completed > queue.submitted) return name + " ran more than it was given";
    if (!is_within_submitted(queue.clock)) return name + " waits for work that does not exist";
    std::uint64_t floor = queue.completed;
    for (const Wait& wait : queue.waits) {
      if (wait.after < floor || wait.after > queue.submitted)
        return name + " has a wait out of place";
      floor = wait.after;
    }
  }
  for (const auto& [event, clock] : events_) {
    if (!is_within_submitted(clock)) {
      return "event " + std::to_string(event) + " stands for work that does not exist";
    }
  }
  for (const auto& [stream, index] : names_) {
    if (index != kDestroyed && index >= queues_.size()) {
      return "stream " + std::to_string(stream) + " has no queue";
    }
  }
  return {};
}

}  // namespace vramx
