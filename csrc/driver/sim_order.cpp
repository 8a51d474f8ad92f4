// How the simulated streams move, and what comes before what; see sim_streams.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "driver/sim_calls.h"
#include "driver/sim_streams.h"

namespace vramx {

Result<StreamPoint> SimStreams::submit(StreamName stream, std::uint64_t items) {
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

std::uint64_t SimStreams::advance(StreamName stream, std::uint64_t items) {
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

SimStreams::Clock SimStreams::clock_of_device(int device) const {
  Clock clock;
  for (std::uint32_t index = 0; index < queues_.size(); ++index) {
    if (queues_[index].device == device) merge(clock, clock_of(index));
  }
  return clock;
}

Status SimStreams::drain(StreamName stream) {
  const Result<std::uint32_t> index = queue_of(stream, "drain");
  if (!index.ok()) return index.status();
  if (queues_[index.value()].capture != Capture::kNone) {
    return failure(StatusCode::kDriverError, "drain");
  }
  complete(clock_of(index.value()));
  return ok_status();
}

bool SimStreams::happens_before(StreamPoint point, StreamName stream) const {
  if (point.queue >= queues_.size()) return false;
  if (point.position <= queues_[point.queue].completed) return true;
  const auto found = names_.find(key_of(stream));
  if (found == names_.end()) return false;
  const Queue& queue = queues_[found->second];
  if (!queue.is_alive || queue.device != stream.device) return false;
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

std::string SimStreams::check_queue(std::size_t index) const {
  const Queue& queue = queues_[index];
  const std::string name = "queue " + std::to_string(index);
  if (queue.completed > queue.submitted) return name + " ran more than it was given";
  if (!is_within_submitted(queue.clock)) return name + " waits for work that does not exist";
  std::uint64_t floor = queue.completed;
  for (const Wait& wait : queue.waits) {
    if (wait.after < floor || wait.after > queue.submitted)
      return name + " has a wait out of place";
    floor = wait.after;
  }
  return {};
}

std::string SimStreams::check() const {
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    if (const std::string broken = check_queue(i); !broken.empty()) return broken;
  }
  for (const auto& [event, state] : events_) {
    if (!is_within_submitted(state.clock)) {
      return "event " + std::to_string(event) + " stands for work that does not exist";
    }
  }
  std::vector<bool> is_named(queues_.size());
  for (const auto& [name, index] : names_) {
    const std::string handle = std::to_string(static_cast<std::uint64_t>(name.handle));
    if (index >= queues_.size()) return "stream " + handle + " has no queue";
    if (is_named[index]) return "stream " + handle + " has another one's queue";
    is_named[index] = true;
  }
  return {};
}

}  // namespace vramx
