// Streams, frees and questions; stream_order_learning.cpp has what becomes known.
#include "core/stream_order.h"

#include <algorithm>

namespace vramx {

StreamOrder::~StreamOrder() {
  for (const State& state : streams_) {
    for (const Mark& mark : state.marks) events_.give_back(mark.event, state.name.device);
  }
  for (const DeviceMark& mark : device_marks_) events_.give_back(mark.event, mark.device);
}

// --- streams ------------------------------------------------------------------------------------

StreamIndex StreamOrder::index_of(Stream stream) {
  if (const StreamIndex recent = recent_index_of(stream); recent != kNoId) return recent;
  const StreamName name{stream, device_};
  const bool is_lasting = stream == Stream::kDefault || stream == Stream::kLegacy ||
                          (surroundings_ != nullptr && surroundings_->is_lasting(name));
  return index_of(name, is_lasting);
}

StreamIndex StreamOrder::index_of(StreamName name, bool is_lasting) {
  if (name.handle == Stream::kLegacy) name.handle = Stream::kDefault;
  const bool is_known_to_last = by_handle_.contains(key_of(name));
  const StreamIndex index = is_lasting || is_known_to_last || name.handle == Stream::kDefault
                                ? find_lasting(name)
                                : find_passing(name);
  if (streams_[index].is_lasting && name.device == device_) {
    recent_[slot_of(name.handle)] = {name.handle, index};
  }
  return index;
}

StreamIndex StreamOrder::find_lasting(StreamName name) {
  const auto found = by_handle_.find(key_of(name));
  if (found != by_handle_.end()) return found->second;
  const StreamIndex index = enter(name, true);
  by_handle_[key_of(name)] = index;
  return index;
}

// It is in use by this thread now, so it may be asked, and what was freed on it before may be
// covered.
StreamIndex StreamOrder::find_passing(StreamName name) {
  const Result<std::uint64_t> id = driver_.stream_id(name);
  if (!id.ok()) return find_captured(name);
  std::erase_if(captured_, [&](const Captured& each) {
    return each.name == name && each.thread == std::this_thread::get_id();
  });
  const auto found = by_id_.find(id.value());
  if (found == by_id_.end()) {
    const StreamIndex index = enter(name, false);
    streams_[index].id = id.value();
    by_id_[id.value()] = index;
    return index;
  }
  if (!is_single() && streams_[found->second].has_uncovered) cover_now(found->second);
  return found->second;
}

// The driver answers no question about a stream that is captured. Which one it was is not known, so
// until the handle can be asked about again it has an entry of its own.
StreamIndex StreamOrder::find_captured(StreamName name) {
  const std::thread::id thread = std::this_thread::get_id();
  for (const Captured& each : captured_) {
    if (each.name == name && each.thread == thread) return each.index;
  }
  const StreamIndex index = enter(name, false);
  streams_[index].id = 0;  // no stream's
  captured_.push_back({name, thread, index});
  return index;
}

bool StreamOrder::is_captured(StreamIndex index) const {
  return std::any_of(captured_.begin(), captured_.end(),
                     [&](const Captured& each) { return each.index == index; });
}

// When the second stream comes, what was freed on the first before has no mark yet.
StreamIndex StreamOrder::enter(StreamName name, bool is_lasting) {
  if (streams_.size() == 1 && may_record(streams_.front())) cover_now(0);
  const StreamIndex index = is_lasting ? static_cast<StreamIndex>(streams_.size()) : vacant_entry();
  if (index == streams_.size()) {
    streams_.emplace_back();
  } else {
    by_id_.erase(streams_[index].id);
  }
  State& state = streams_[index];
  state.name = name;
  state.is_lasting = is_lasting;
  state.known.clear();
  note_askers(do_several_ask_);
  return index;
}

// An entry that nothing depends on any more: its numbers go on, so that no tag is taken for a newer
// one. Else a new one. The first stream keeps its own.
StreamIndex StreamOrder::vacant_entry() const {
  for (StreamIndex index = 1; index < streams_.size(); ++index) {
    const State& state = streams_[index];
    const bool is_needed = state.is_lasting || state.blocks != 0 || is_captured(index);
    if (!is_needed && state.is_quiet() && state.told == state.over) return index;
  }
  return static_cast<StreamIndex>(streams_.size());
}

// With the lock held: where it cannot be let go.
void StreamOrder::cover_now(StreamIndex index) {
  Pending pending = begin_mark(index);
  record(pending);
  finish_mark(pending);
}

// --- frees --------------------------------------------------------------------------------------

// Its handle is good: it lasts, or the thread works on it and it is still the one that was seen.
bool StreamOrder::may_record(const State& state) const {
  if (state.is_lasting) return true;
  const bool is_there = state.name.handle == Stream::kPerThread ||
                        (surroundings_ != nullptr && surroundings_->is_current(state.name));
  if (!is_there) return false;
  const Result<std::uint64_t> id = driver_.stream_id(state.name);
  return id.ok() && id.value() == state.id;
}

void StreamOrder::note_askers(bool are_several) {
  do_several_ask_ = are_several;
  const auto may_end = [](const State& state) { return !state.is_lasting; };
  counts_frees_ =
      !is_single() && (are_several || std::any_of(streams_.begin(), streams_.end(), may_end));
}

StreamOrder::Pending StreamOrder::begin_mark(StreamIndex index) {
  State& state = streams_[index];
  const bool is_large = !counts_frees_ || state.uncovered >= kOwnGroup;
  if (is_large) begin_group(state);
  state.last = state.next++;
  if (is_large) begin_group(state);
  state.has_uncovered = false;
  state.uncovered = {};
  return {index, state.name, {state.last, events_.take(state.name.device)}, false};
}

// Without the lock, or with it where it cannot be let go.
void StreamOrder::record(Pending& pending) {
  const OutsideCapture outside(surroundings_, pending.name);
  if (!outside.may_call()) return;
  Event& event = pending.mark.event;
  if (event == Event::kNone) event = events_.create(pending.name.device);
  pending.is_recorded = event != Event::kNone && driver_.record_event(event, pending.name).ok();
}

// Threads may come back in another order than they went; a mark covers all lower numbers, whenever
// it was recorded. One that could not be leaves its number to the next.
void StreamOrder::finish_mark(const Pending& pending) {
  State& state = streams_[pending.stream];
  const Mark& mark = pending.mark;
  if (!pending.is_recorded) state.has_uncovered = true;
  if (!pending.is_recorded || mark.number <= state.over) {
    return events_.give_back(mark.event, state.name.device);
  }
  auto at = state.marks.end();
  while (at != state.marks.begin() && std::prev(at)->number > mark.number) --at;
  state.marks.insert(at, mark);
  if (state.marks.size() > kMostMarks) thin_out(state);
}

void StreamOrder::thin_out(State& state) {
  std::deque<Mark> kept;
  for (std::size_t i = 0; i < state.marks.size(); ++i) {
    const bool is_kept = i % 2 == 1 || i + 1 == state.marks.size();
    if (is_kept)
      kept.push_back(state.marks[i]);
    else
      events_.give_back(state.marks[i].event, state.name.device);
  }
  state.marks.swap(kept);
}

Tag StreamOrder::mark(StreamIndex stream, Lock& lock) {
  if (!may_record(streams_[stream])) return stamp(stream);
  Pending pending = begin_mark(stream);
  ++under_way_;
  lock.unlock();
  record(pending);
  lock.lock();
  --under_way_;
  finish_mark(pending);
  return {stream, pending.mark.number};
}

// --- questions ----------------------------------------------------------------------------------

bool StreamOrder::is_ordered(const Tag& tag, StreamIndex reader) const {
  if (tag.stream == reader || is_over(tag)) return true;
  const std::vector<std::uint64_t>& known = streams_[reader].known;
  return tag.stream < known.size() && known[tag.stream] >= tag.number;
}

bool StreamOrder::is_ordered(const TagSet& tags, StreamIndex reader) const {
  for (std::size_t i = 0; i < tags.size(); ++i) {
    if (!is_ordered(tags[i], reader)) return false;
  }
  return true;
}

bool StreamOrder::is_over(const TagSet& tags) const {
  for (std::size_t i = 0; i < tags.size(); ++i) {
    if (!is_over(tags[i])) return false;
  }
  return true;
}

// The first mark that covers the tag, of its stream or, where that has none, of its device.
StreamOrder::Mark StreamOrder::mark_for(const Tag& tag) const {
  const std::deque<Mark>& marks = streams_[tag.stream].marks;
  const auto found = std::partition_point(
      marks.begin(), marks.end(), [&](const Mark& mark) { return mark.number < tag.number; });
  if (found != marks.end()) return *found;
  for (const DeviceMark& mark : device_marks_) {
    const bool is_known = tag.stream < mark.numbers.size();
    if (is_known && mark.numbers[tag.stream] >= tag.number) {
      return {mark.numbers[tag.stream], mark.event};
    }
  }
  return {};
}

bool StreamOrder::has_marks(const TagSet& tags, StreamIndex reader) const {
  for (std::size_t i = 0; i < tags.size(); ++i) {
    if (!is_ordered(tags[i], reader) && mark_for(tags[i]).event == Event::kNone) return false;
  }
  return true;
}

void StreamOrder::add_waits(const TagSet& tags, StreamIndex reader,
                            std::vector<StreamWait>* waits) const {
  for (std::size_t i = 0; i < tags.size(); ++i) {
    if (is_ordered(tags[i], reader)) continue;
    const Mark mark = mark_for(tags[i]);
    const StreamWait wait{tags[i].stream, mark.number, mark.event};
    const auto same = std::find_if(waits->begin(), waits->end(), [&](const StreamWait& each) {
      return each.donor == wait.donor;
    });
    if (same == waits->end()) {
      waits->push_back(wait);
    } else if (same->number < wait.number) {
      *same = wait;
    }
  }
}

}  // namespace vramx
