// The part of StreamOrder that finds out what is over: it asks marks, marks what none covers, and
// waits where the user wants memory back.
#include <algorithm>

#include "core/stream_order.h"

namespace vramx {

void StreamOrder::note_told() {
  for (State& state : streams_) state.told = state.over;
}

bool StreamOrder::has_unfinished() const {
  const auto has_marks = [](const State& state) { return !state.marks.empty(); };
  return under_way_ != 0 || !device_marks_.empty() ||
         std::any_of(streams_.begin(), streams_.end(), has_marks);
}

void StreamOrder::note_over(StreamIndex index, std::uint64_t number) {
  State& state = streams_[index];
  finished_ += state.over < number ? 1 : 0;
  state.over = std::max(state.over, number);
  while (!state.marks.empty() && state.marks.front().number <= state.over) {
    events_.give_back(state.marks.front().event, state.name.device);
    state.marks.pop_front();
  }
}

void StreamOrder::note_waited(StreamIndex reader, const StreamWait& wait) {
  std::vector<std::uint64_t>& known = streams_[reader].known;
  if (known.size() <= wait.donor) known.resize(wait.donor + 1);
  known[wait.donor] = std::max(known[wait.donor], wait.number);
}

// Whether it is still to be asked: then its event has stood for it all the time. An event that was
// given back may stand for the work of any stream.
bool StreamOrder::is_waited_for(StreamIndex index, std::uint64_t number) const {
  const std::deque<Mark>& marks = streams_[index].marks;
  const auto found = std::partition_point(marks.begin(), marks.end(),
                                          [&](const Mark& mark) { return mark.number < number; });
  return found != marks.end() && found->number == number;
}

// Marks of one stream are over in their order: each question halves what is unknown. An answer
// about a mark that another thread has given up meanwhile says nothing.
void StreamOrder::ask(Lock& lock) {
  struct Question {
    StreamIndex stream;
    std::vector<Mark> marks;
    std::uint64_t over = 0;
  };
  cover_streams(lock);
  if (streams_.size() > kMostPassing || uncovered_by_passing() >= kMostUncovered) {
    cover_devices(lock);
  }
  std::vector<Question> questions;
  for (StreamIndex index = 0; index < streams_.size(); ++index) {
    const std::deque<Mark>& marks = streams_[index].marks;
    if (!marks.empty()) questions.push_back({index, {marks.begin(), marks.end()}});
  }
  const auto is_done = [&](const Mark& mark) {
    const Result<bool> done = driver_.query_event(mark.event);
    return done.ok() && done.value();
  };
  if (!questions.empty()) {
    lock.unlock();
    for (Question& each : questions) {
      if (is_done(each.marks.back())) {
        each.over = each.marks.back().number;
        continue;
      }
      const auto first = std::partition_point(each.marks.begin(), each.marks.end() - 1, is_done);
      if (first != each.marks.begin()) each.over = std::prev(first)->number;
    }
    lock.lock();
  }
  for (const Question& each : questions) {
    if (is_waited_for(each.stream, each.over)) note_over(each.stream, each.over);
  }
  ask_device_marks(lock);
}

void StreamOrder::ask_device_marks(Lock& lock) {
  for (std::size_t i = 0; i < device_marks_.size();) {
    const std::uint64_t id = device_marks_[i].id;
    const Event event = device_marks_[i].event;
    lock.unlock();
    const Result<bool> done = driver_.query_event(event);
    lock.lock();
    // Another thread may have been here, and the event may stand for a mark that came since.
    if (i >= device_marks_.size() || device_marks_[i].id != id) return;
    if (!done.ok() || !done.value()) {
      ++i;
      continue;
    }
    const DeviceMark mark = device_marks_[i];
    device_marks_.erase(device_marks_.begin() + static_cast<std::ptrdiff_t>(i));
    for (StreamIndex index = 0; index < mark.numbers.size(); ++index) {
      note_over(index, mark.numbers[index]);
    }
    events_.give_back(mark.event, mark.device);
  }
}

template <class Is>
std::vector<int> StreamOrder::devices_where(Is is) const {
  std::vector<int> devices;
  for (const State& state : streams_) {
    const auto known = std::find(devices.begin(), devices.end(), state.name.device);
    if (is(state) && known == devices.end()) devices.push_back(state.name.device);
  }
  return devices;
}

// What is freed on streams of the device from now on has a higher number. Zero for other streams.
std::vector<std::uint64_t> StreamOrder::close_numbers(int device) {
  std::vector<std::uint64_t> numbers(streams_.size());
  for (StreamIndex index = 0; index < streams_.size(); ++index) {
    State& state = streams_[index];
    if (state.name.device != device) continue;
    if (state.has_uncovered) state.last = state.next++;
    numbers[index] = state.last;
    state.has_uncovered = false;
    state.uncovered = {};
  }
  return numbers;
}

void StreamOrder::cover_streams(Lock& lock) {
  for (StreamIndex index = 0; index < streams_.size(); ++index) {
    if (streams_[index].has_uncovered && streams_[index].is_lasting) mark(index, lock);
  }
}

void StreamOrder::cover(Lock& lock) {
  cover_streams(lock);
  cover_devices(lock);
}

Bytes StreamOrder::uncovered_by_passing() const {
  Bytes sum;
  for (const State& state : streams_) {
    if (state.has_uncovered && !state.is_lasting) sum += state.uncovered;
  }
  return sum;
}

// Of the devices that have streams which may be gone, and on them what no mark covers.
void StreamOrder::cover_devices(Lock& lock) {
  for (const int device :
       devices_where([](const State& state) { return state.has_uncovered && !state.is_lasting; })) {
    cover_device(device, lock);
  }
}

// Not where another library's capture was met that may still go on. Where the driver cannot mark a
// device, only settle() brings such memory back.
void StreamOrder::cover_device(int device, Lock& lock) {
  const bool has_captured =
      std::any_of(captured_.begin(), captured_.end(),
                  [&](const Captured& each) { return each.name.device == device; });
  if (has_captured) return;
  const OutsideCapture outside(surroundings_, device);
  if (!outside.may_call()) return;
  DeviceMark mark{++device_marks_made_, device, events_.take(device), close_numbers(device)};
  ++under_way_;
  lock.unlock();
  if (mark.event == Event::kNone) mark.event = events_.create(device);
  const bool is_recorded =
      mark.event != Event::kNone && driver_.record_device(mark.event, device).ok();
  lock.lock();
  --under_way_;
  if (is_recorded) {
    device_marks_.push_back(std::move(mark));
    return;
  }
  events_.give_back(mark.event, device);
  for (StreamIndex index = 0; index < mark.numbers.size(); ++index) {
    streams_[index].has_uncovered |= streams_[index].over < mark.numbers[index];
  }
}

void StreamOrder::settle(Lock& lock) {
  for (const int device : devices_where([](const State& state) { return !state.is_quiet(); })) {
    const OutsideCapture outside(surroundings_, device);
    if (!outside.may_call()) continue;
    const std::vector<std::uint64_t> numbers = close_numbers(device);
    ++under_way_;
    lock.unlock();
    const bool is_done = driver_.synchronize(device).ok();
    lock.lock();
    --under_way_;
    for (StreamIndex index = 0; index < numbers.size(); ++index) {
      if (is_done)
        note_over(index, numbers[index]);
      else
        streams_[index].has_uncovered |= streams_[index].over < numbers[index];
    }
  }
  ask(lock);
}

std::size_t StreamOrder::host_bytes() const {
  std::size_t bytes = streams_.capacity() * sizeof(State) + events_.host_bytes();
  for (const State& state : streams_) {
    bytes += state.known.capacity() * sizeof(std::uint64_t) + state.marks.size() * sizeof(Mark);
  }
  return bytes;
}

std::string StreamOrder::check(const TagSet& tags) const {
  for (std::size_t i = 0; i < tags.size(); ++i) {
    const Tag& tag = tags[i];
    if (tag.stream >= streams_.size() || tag.number > streams_[tag.stream].next) {
      return "order 1: a tag of stream " + std::to_string(tag.stream) + " lies in the future";
    }
  }
  return {};
}

std::string StreamOrder::check() const {
  for (StreamIndex index = 0; index < streams_.size(); ++index) {
    const State& state = streams_[index];
    std::uint64_t last = state.over;
    for (const Mark& mark : state.marks) {
      if (mark.number <= last || mark.number >= state.next) {
        return "order 2: mark " + std::to_string(mark.number) + " of stream " +
               std::to_string(index);
      }
      last = mark.number;
    }
    for (StreamIndex other = 0; other < state.known.size(); ++other) {
      if (state.known[other] >= streams_[other].next) {
        return "order 3: more is known of stream " + std::to_string(other) + " than it did";
      }
    }
  }
  return {};
}

}  // namespace vramx
