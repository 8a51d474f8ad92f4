// Order between streams without a CUDA call on the free path.
//
// A free on stream S costs a number: S's sequence counter, kept as the extent's tag. Only when the
// memory goes to another stream R is an event recorded on S (it covers everything queued there so
// far, hence every earlier free) and R made to wait for it, on the device. What R is known to be
// behind is a vector clock, so that a second theft costs nothing until S frees again:
//
//   known[R][S] = q     R's next work runs after everything S had queued at its q-th free
//
// The bookkeeping is guarded by the device allocator's lock; the driver calls of order() and
// settle() are made while that lock is let go.
#pragma once

#include <array>
#include <bit>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/adaptive_mutex.h"
#include "core/driver.h"
#include "core/fork_guard.h"
#include "core/types.h"

namespace vramx {

class StreamClocks {
 public:
  explicit StreamClocks(Driver& driver) : driver_(driver) {}
  ~StreamClocks();
  StreamClocks(const StreamClocks&) = delete;
  StreamClocks& operator=(const StreamClocks&) = delete;

  StreamIndex index_of(Stream stream) {
    const Recent& recent = recent_[slot_of(stream)];
    return recent.index != kNoId && recent.handle == stream ? recent.index : look_up(stream);
  }
  Stream stream_of(StreamIndex index) const { return streams_[index].handle; }
  std::size_t stream_count() const { return streams_.size(); }

  // A new tag: everything queued on the stream until now. For the stream of an allocation at its
  // free, and for every other stream that used it: without a number of their own, an event recorded
  // there before the last use would seem to cover it.
  // Nothing can be queued on a forgotten stream any more: its last event covers all there was.
  Tag stamp(StreamIndex index) {
    State& state = streams_[index];
    if (!state.is_forgotten) ++state.sequence;
    return Tag{index, state.sequence};
  }

  // Whether work that `reader` queues from now on runs after `tag`.
  bool is_ordered(const Tag& tag, StreamIndex reader) const;
  bool is_ordered(const TagSet& tags, StreamIndex reader) const;
  // Whether the work has run, as far as the host has seen.
  bool is_complete(const Tag& tag) const { return streams_[tag.stream].complete >= tag.sequence; }

  // Whether tags of the stream may be complete that were not at the last note_told(), or are so
  // from their beginning.
  bool has_completed(StreamIndex index) const {
    const State& state = streams_[index];
    return state.told != state.complete || state.is_forgotten;
  }
  void note_told() {
    for (State& state : streams_) state.told = state.complete;
  }

  // Makes `reader` wait for the tags, on the device. Fails, having ordered nothing that matters,
  // where a stream is capturing or gone. Lets `lock` go meanwhile and holds it again after.
  Status order(StreamIndex reader, const TagSet& tags, Lock& lock);

  enum class Settle : std::uint8_t { kQuery, kWait };
  // Learns which tags are complete: asks each stream without blocking, or waits for the device
  // first. Nothing waits while a stream captures. Lets `lock` go meanwhile.
  void settle(Settle how, Lock& lock);
  // The same without blocking, of the streams alone that keep `reader` from memory with these tags;
  // and whether none does now. `now` counts the caller's calls: a stream that was not done is left
  // alone for kPause of them.
  bool ask(const TagSet& tags, StreamIndex reader, std::uint64_t now, Lock& lock);
  // A question takes 0.3 us where it is asked over and over (measured, H200), a few microseconds
  // amid other work: at most as long as so many calls.
  static constexpr std::uint64_t kPause = 64;

  // The caller is about to destroy the stream: what it freed is recorded now, and its name means
  // another stream from here on. Fails, and forgets nothing, where no event can be recorded on it.
  Status forget(Stream stream, Lock& lock);

  std::size_t host_bytes() const;
  // Recomputes clock 1 and clock 2 of types.h.
  std::string check(const TagSet& tags) const;

 private:
  struct Recent {
    Stream handle = Stream::kDefault;
    StreamIndex index = kNoId;
  };
  // A program has a few streams, and torch gives it 32 of each priority at most.
  static constexpr std::size_t kRecent = 32;
  static std::size_t slot_of(Stream stream) {
    constexpr int kShift = 64 - std::countr_zero(kRecent);
    return static_cast<std::uint64_t>(stream) * 0x9E3779B97F4A7C15ull >> kShift;
  }
  StreamIndex look_up(Stream stream);

  struct Record {  // what the stream's event stands for
    Event event = Event::kNone;
    std::uint64_t sequence = 0;
    std::vector<std::uint64_t> clock{};  // known[stream] when it was recorded
  };
  struct State {
    Stream handle = Stream::kDefault;
    bool is_forgotten = false;
    std::uint64_t sequence = 0;
    std::uint64_t complete = 0;
    std::uint64_t told = 0;              // what was complete at the last note_told()
    std::uint64_t ask_from = 0;          // the call
    std::vector<std::uint64_t> known{};  // by stream
    Record last{};
  };

  // Records the stream's event so that it covers all of its sequence, unless it does already.
  Status record(StreamIndex index, Lock& lock);
  Status prepare_event(StreamIndex index, Lock& lock);
  void wait_for_device(Lock& lock);
  void settle_one(StreamIndex index, Lock& lock);
  bool settle_last(StreamIndex index, Lock& lock);
  void note_complete(StreamIndex index, std::uint64_t sequence,
                     const std::vector<std::uint64_t>& clock);
  static void raise(std::vector<std::uint64_t>& clock, const std::vector<std::uint64_t>& to);
  static void raise(std::vector<std::uint64_t>& clock, StreamIndex stream, std::uint64_t to);

  Driver& driver_;
  const ForkGuard fork_guard_;  // a child has no events to destroy
  std::vector<State> streams_;
  std::unordered_map<std::uint64_t, StreamIndex> by_handle_;
  std::array<Recent, kRecent> recent_{};  // the last that were looked up, by slot
};

}  // namespace vramx
