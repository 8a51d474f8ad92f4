#include "core/stream_clocks.h"

#include <algorithm>

namespace vramx {
namespace {

// Lets a lock go for as long as it lives.
class Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

}  // namespace

StreamClocks::~StreamClocks() {
  if (fork_guard_.is_in_child()) return;
  for (const State& state : streams_) {
    if (state.last.event != Event::kNone) driver_.destroy_event(state.last.event).ignore();
  }
}

StreamIndex StreamClocks::look_up(Stream stream) {
  const auto [entry, is_new] = by_handle_.try_emplace(static_cast<std::uint64_t>(stream),
                                                      static_cast<StreamIndex>(streams_.size()));
  if (is_new) streams_.push_back(State{.handle = stream});
  recent_[slot_of(stream)] = {stream, entry->second};
  return entry->second;
}

bool StreamClocks::is_ordered(const Tag& tag, StreamIndex reader) const {
  if (tag.stream == reader || is_complete(tag)) return true;
  const std::vector<std::uint64_t>& known = streams_[reader].known;
  return tag.stream < known.size() && known[tag.stream] >= tag.sequence;
}

bool StreamClocks::is_ordered(const TagSet& tags, StreamIndex reader) const {
  for (std::size_t i = 0; i < tags.size(); ++i) {
    if (!is_ordered(tags[i], reader)) return false;
  }
  return true;
}

void StreamClocks::raise(std::vector<std::uint64_t>& clock, StreamIndex stream, std::uint64_t to) {
  if (clock.size() <= stream) clock.resize(stream + 1);
  clock[stream] = std::max(clock[stream], to);
}

void StreamClocks::raise(std::vector<std::uint64_t>& clock, const std::vector<std::uint64_t>& to) {
  for (StreamIndex stream = 0; stream < to.size(); ++stream) raise(clock, stream, to[stream]);
}

Status StreamClocks::prepare_event(StreamIndex index, Lock& lock) {
  if (streams_[index].last.event != Event::kNone) return ok_status();
  Result<Event> made = [&] {
    const Unlocked unlocked(lock);
    return driver_.create_event(driver_.ordinal());
  }();
  if (!made.ok()) return made.status();
  // Another thread may have been quicker.
  if (streams_[index].last.event == Event::kNone) {
    streams_[index].last.event = made.value();
  } else {
    driver_.destroy_event(made.value()).ignore();
  }
  return ok_status();
}

// Sequence and clock are read before the event is recorded: it then covers at least those. Two
// threads may record the same event at once; the later record covers more, so either may wait.
Status StreamClocks::record(StreamIndex index, Lock& lock) {
  if (streams_[index].last.sequence == streams_[index].sequence &&
      streams_[index].last.event != Event::kNone) {
    return ok_status();
  }
  if (streams_[index].is_forgotten) return Status{StatusCode::kInvalidValue, 0, "destroyed stream"};
  if (const Status made = prepare_event(index, lock); !made.ok()) return made;
  const std::uint64_t sequence = streams_[index].sequence;
  std::vector<std::uint64_t> clock = streams_[index].known;
  const Event event = streams_[index].last.event;
  const Stream handle = streams_[index].handle;
  const Status recorded = [&] {
    const Unlocked unlocked(lock);
    return driver_.record_event(event, {handle, driver_.ordinal()});
  }();
  if (!recorded.ok()) return recorded;
  Record& last = streams_[index].last;
  last.sequence = std::max(last.sequence, sequence);
  raise(last.clock, clock);
  return ok_status();
}

Status StreamClocks::order(StreamIndex reader, const TagSet& tags, Lock& lock) {
  for (std::size_t i = 0; i < tags.size(); ++i) {
    const Tag tag = tags[i];
    if (is_ordered(tag, reader)) continue;
    if (streams_[tag.stream].last.sequence < tag.sequence) {
      if (const Status recorded = record(tag.stream, lock); !recorded.ok()) return recorded;
    }
    const Record last = streams_[tag.stream].last;
    const Stream handle = streams_[reader].handle;
    const Status waited = [&] {
      const Unlocked unlocked(lock);
      return driver_.wait_event({handle, driver_.ordinal()}, last.event);
    }();
    if (!waited.ok()) return waited;
    raise(streams_[reader].known, last.clock);
    raise(streams_[reader].known, tag.stream, last.sequence);
  }
  return ok_status();
}

void StreamClocks::settle(Settle how, Lock& lock) {
  if (how == Settle::kWait) wait_for_device(lock);
  for (StreamIndex index = 0; index < streams_.size(); ++index) settle_one(index, lock);
}

// The host must not wait while a stream captures: a stream that cannot be recorded on may.
void StreamClocks::wait_for_device(Lock& lock) {
  for (StreamIndex index = 0; index < streams_.size(); ++index) {
    if (streams_[index].is_forgotten) continue;
    stamp(index);
    if (!record(index, lock).ok()) return;
  }
  const Unlocked unlocked(lock);
  driver_.synchronize(driver_.ordinal()).ignore();
}

bool StreamClocks::ask(const TagSet& tags, StreamIndex reader, std::uint64_t now, Lock& lock) {
  for (std::size_t i = 0; i < tags.size(); ++i) {
    const StreamIndex stream = tags[i].stream;
    if (is_ordered(tags[i], reader)) continue;
    // A longer pause than is ever set: the caller has begun to count anew.
    const std::uint64_t pause = streams_[stream].ask_from - now;
    if (now < streams_[stream].ask_from && pause <= kPause) return false;
    settle_one(stream, lock);
    if (is_ordered(tags[i], reader)) continue;
    streams_[stream].ask_from = now + kPause;
    return false;
  }
  return true;
}

// On a stream that is never idle what is recorded now is not complete yet; what was recorded at the
// last question is, or else will be: recorded anew at every question it might never be.
void StreamClocks::settle_one(StreamIndex index, Lock& lock) {
  if (streams_[index].complete == streams_[index].sequence) return;
  if (settle_last(index, lock) && record(index, lock).ok()) settle_last(index, lock);
}

// False where the last record is known not to have run.
bool StreamClocks::settle_last(StreamIndex index, Lock& lock) {
  const State& state = streams_[index];
  if (state.last.event == Event::kNone || state.last.sequence <= state.complete) return true;
  const Record last = state.last;
  const bool is_done = [&] {
    const Unlocked unlocked(lock);
    const Result<bool> queried = driver_.query_event(last.event);
    return queried.ok() && queried.value();
  }();
  if (is_done) note_complete(index, last.sequence, last.clock);
  return is_done;
}

// What the stream did up to its `sequence`-th free has run, and what it had waited for by then.
void StreamClocks::note_complete(StreamIndex index, std::uint64_t sequence,
                                 const std::vector<std::uint64_t>& clock) {
  streams_[index].complete = std::max(streams_[index].complete, sequence);
  for (StreamIndex other = 0; other < clock.size(); ++other) {
    streams_[other].complete = std::max(streams_[other].complete, clock[other]);
  }
}

Status StreamClocks::forget(Stream stream, Lock& lock) {
  const auto entry = by_handle_.find(static_cast<std::uint64_t>(stream));
  if (entry == by_handle_.end()) return ok_status();
  const StreamIndex index = entry->second;
  // A new number, so that the event is recorded now and covers what live blocks are used for.
  stamp(index);
  // Recording lets the lock go: another thread may free on the stream meanwhile.
  do {
    if (const Status recorded = record(index, lock); !recorded.ok()) return recorded;
  } while (streams_[index].last.sequence != streams_[index].sequence);
  streams_[index].is_forgotten = true;
  by_handle_.erase(static_cast<std::uint64_t>(stream));
  recent_[slot_of(stream)] = {};
  return ok_status();
}

std::size_t StreamClocks::host_bytes() const {
  std::size_t bytes = streams_.capacity() * sizeof(State);
  for (const State& state : streams_) {
    bytes += (state.known.capacity() + state.last.clock.capacity()) * sizeof(std::uint64_t);
  }
  return bytes;
}

std::string StreamClocks::check(const TagSet& tags) const {
  for (std::size_t i = 0; i < tags.size(); ++i) {
    const Tag& tag = tags[i];
    if (tag.stream >= streams_.size() || tag.sequence > streams_[tag.stream].sequence) {
      return "clock 1: a tag of stream " + std::to_string(tag.stream) + " lies in the future";
    }
  }
  for (const State& state : streams_) {
    for (StreamIndex other = 0; other < state.known.size(); ++other) {
      if (state.known[other] > streams_[other].sequence) {
        return "clock 2: more is known of stream " + std::to_string(other) + " than it did";
      }
    }
  }
  return {};
}

}  // namespace vramx
