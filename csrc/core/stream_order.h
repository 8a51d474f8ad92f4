// Whose memory is over: streams and their identity, the marks that frees leave on them, and what
// is known of both.
//
// A free is ordered by what its stream had queued *at the free*. So it leaves a mark there, an
// event with a number, and the memory's tag names it. An event recorded later, when somebody wants
// the memory, would cover all that the stream has queued since, and one stream would run behind
// another for nothing.
//
//   free n   large: records mark n                 tag (S, n): over once mark n is
//   free     small: none, up to mark_at_ together  tag (S, n + 1): over once the next mark is
//   mark     recorded without a free               right as "over", too late to be waited for
//
// A program of one stream has no marks at all: its stream's own order is enough. And a stream waits
// only where growth fails: the more room there is, the fewer frees need a mark of their own.
//
// A handle is not a stream: handles of other libraries are destroyed, and lent to new streams, and
// kPerThread is another stream in each thread. Streams that last are found by their handle; all
// others by the number that the driver has for them, asked for while they are in use and hence
// exist. On a free they are recorded on only where the thread works on them at that moment. What
// they leave uncovered is over when the device is, as a whole (`device_marks_`).
//
// Guarded by the allocator's lock, which the methods that take it let go for driver calls. An entry
// of a stream that may be destroyed is given to another once nothing depends on it.
#pragma once

#include <array>
#include <bit>
#include <deque>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/adaptive_mutex.h"
#include "core/driver.h"
#include "core/event_pool.h"
#include "core/fork_guard.h"
#include "core/surroundings.h"
#include "core/types.h"

namespace vramx {

// Work queued on the reader from now on has to run behind the donor's mark.
struct StreamWait {
  StreamIndex donor = kNoId;
  std::uint64_t number = 0;
  Event event = Event::kNone;
};

class StreamOrder {
 public:
  explicit StreamOrder(Driver& driver)
      : driver_(driver), device_(driver.ordinal()), events_(driver) {}
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  void set_surroundings(const Surroundings* surroundings) { surroundings_ = surroundings; }

  // --- streams ----------------------------------------------------------------------------------
  // Of a stream of this device that the calling thread is about to use.
  StreamIndex index_of(Stream stream);
  StreamIndex index_of(StreamName name, bool is_lasting);
  // The same of a stream that was looked up lately and lasts; kNoId of any other.
  StreamIndex recent_index_of(Stream stream) const {
    const Recent& recent = recent_[slot_of(stream)];
    return recent.handle == stream ? recent.index : kNoId;
  }
  Stream handle_of(StreamIndex index) const { return streams_[index].name.handle; }
  StreamName name_of(StreamIndex index) const { return streams_[index].name; }
  // Whether all memory was used on one stream so far: then nothing is ever waited for.
  bool is_single() const { return streams_.size() <= 1; }
  std::size_t count() const { return streams_.size(); }
  // A block depends on the entry of a stream that may end, which is not given to another stream.
  // Each free of such a stream is marked, but where it is the only one and keeps its entry.
  void hold(StreamIndex index) { streams_[index].blocks += streams_[index].is_lasting ? 0 : 1; }
  void let_go(StreamIndex index) { streams_[index].blocks -= streams_[index].is_lasting ? 0 : 1; }

  // --- frees ------------------------------------------------------------------------------------
  // The tag of memory of `size` bytes that is freed without a mark: what may be.
  Tag stamp(StreamIndex index) {
    streams_[index].has_uncovered = true;
    return {index, streams_[index].next};
  }
  // Whether this free is to be marked; counts it. In a program of one stream none is, and while no
  // other stream asks for memory only those of streams that may end: ask() marks the others.
  bool wants_mark(StreamIndex index, Bytes size) {
    if (!counts_frees_) [[likely]] {
      return false;
    }
    State& state = streams_[index];
    state.uncovered += max(size, kSmallest);
    return (do_several_ask_ && state.uncovered >= mark_at_) || !state.is_lasting;
  }
  // Whether several streams ask for memory from now on.
  void note_askers(bool are_several);
  // How much may still be grown, as of the last request that asked.
  void note_room(Bytes room) {
    mark_at_ = min(max(Bytes{room.count / kShareOfRoom}, kMarked), kMostUnmarked);
  }
  // Counts such a free for another stream that the memory was used on.
  void count_free(StreamIndex user, Bytes size) { streams_[user].uncovered += size; }
  // Records a mark on the stream where that can be, and returns the tag of what is freed now.
  Tag mark(StreamIndex stream, Lock& lock);

  // --- questions without a driver call ----------------------------------------------------------
  // Whether work that `reader` queues from now on runs after `tag`.
  bool is_ordered(const Tag& tag, StreamIndex reader) const;
  bool is_ordered(const TagSet& tags, StreamIndex reader) const;
  // Whether the work has run, as far as the host has seen.
  bool is_over(const Tag& tag) const { return streams_[tag.stream].over >= tag.number; }
  bool is_over(const TagSet& tags) const;
  // Whether tags of the stream may be over that were not at the last note_told().
  bool has_news(StreamIndex index) const { return streams_[index].told != streams_[index].over; }
  void note_told();
  // Whether the reader can be made to wait for all of them.
  bool has_marks(const TagSet& tags, StreamIndex reader) const;
  // Adds what the reader has to wait for.
  void add_waits(const TagSet& tags, StreamIndex reader, std::vector<StreamWait>* waits) const;

  // Whether some memory waits for a mark, or will once that is recorded; how many marks were found
  // to be over so far.
  bool has_unfinished() const;
  std::size_t finished() const { return finished_; }

  // --- learning ---------------------------------------------------------------------------------
  // Asks the marks, without blocking, which are over, and marks what none covers on streams that
  // last.
  void ask(Lock& lock);
  // Marks what no mark covers yet.
  void cover(Lock& lock);
  // Devices on which other libraries' captures were met may be marked again. Says whether there
  // were any.
  bool forget_captures() { return !std::exchange(captured_, {}).empty(); }
  // Blocks the host until everything freed so far is over. Only for what the user asks for; where
  // a graph is being captured it asks only.
  void settle(Lock& lock);
  // Between the two no event of a wait that is under way stands for anything else.
  void begin_waits() { events_.pin(); }
  void end_waits() { events_.unpin(); }
  void note_waited(StreamIndex reader, const StreamWait& wait);

  std::size_t host_bytes() const;
  // Recomputes order 1 of these tags, or order 2 and 3 of types.h.
  std::string check(const TagSet& tags) const;
  std::string check() const;

 private:
  struct Mark {
    std::uint64_t number = 0;
    Event event = Event::kNone;
  };
  struct State {
    StreamName name;
    std::uint64_t id = 0;  // the driver's number for it; of one that may end
    bool is_lasting = false;
    bool has_uncovered = false;          // some tag has the number of the next mark
    Bytes uncovered{};                   // about as many bytes of them
    std::uint64_t blocks = 0;            // that depend on the entry
    std::uint64_t next = 1;              // number of the next mark
    std::uint64_t last = 0;              // of the last one
    std::uint64_t over = 0;              // up to this number all is over
    std::uint64_t told = 0;              // what was over at the last note_told()
    std::deque<Mark> marks{};            // recorded and not known to be over, upwards
    std::vector<std::uint64_t> known{};  // by stream: the mark that its work comes behind

    // All that was freed on it is over.
    bool is_quiet() const { return !has_uncovered && over >= last; }
  };
  // Everything that streams of one device had queued.
  struct DeviceMark {
    std::uint64_t id = 0;  // no other one's
    int device = 0;
    Event event = Event::kNone;
    std::vector<std::uint64_t> numbers;  // by stream
  };
  // A mark that is about to be recorded, or asked about, without the lock.
  struct Pending {
    StreamIndex stream = kNoId;
    StreamName name;
    Mark mark;
    bool is_recorded = false;
  };
  // A stream that the driver would not number: a graph is being captured on it.
  struct Captured {
    StreamName name;
    std::thread::id thread;  // kPerThread is another stream in each
    StreamIndex index = kNoId;
  };
  struct Recent {
    Stream handle = Stream::kDefault;
    StreamIndex index = kNoId;
  };
  // A program has a few streams, and torch gives it 32 of each priority at most.
  static constexpr std::size_t kRecent = 32;
  // A mark costs a fifth of a microsecond or more. Small frees count for as many bytes as bring
  // one mark to some hundred of them. What no mark covers may be grown once more before it is known
  // to be over: at most these bytes for each stream.
  static constexpr Bytes kMarked{1 << 20};
  static constexpr Bytes kMostUnmarked{32 << 20};
  static constexpr std::uint64_t kShareOfRoom = 4096;
  static constexpr Bytes kSmallest{4 << 10};
  // What is freed in one mark and has as many bytes is a group of tags by itself: a buffer of that
  // size is wanted by others as soon as it is over, and not when what lies beside it is.
  static constexpr Bytes kOwnGroup{64 << 20};
  // A stream that has more is far behind: every second of them is enough then.
  static constexpr std::size_t kMostMarks = 1024;
  // Of streams that may have been destroyed. Where there are more of them, or they left more memory
  // without a mark, the device is marked; not for less, because a mark of the device spoils a
  // capture of another library that is not known here.
  static constexpr std::size_t kMostPassing = 64;
  static constexpr Bytes kMostUncovered{32 << 20};

  static std::size_t slot_of(Stream stream) {
    constexpr int kShift = 64 - std::countr_zero(kRecent);
    return static_cast<std::uint64_t>(stream) * 0x9E3779B97F4A7C15ull >> kShift;
  }
  static std::uint64_t key_of(StreamName name) {
    return static_cast<std::uint64_t>(name.handle) ^ std::uint64_t(unsigned(name.device)) << 56;
  }
  StreamIndex find_lasting(StreamName name);
  StreamIndex find_passing(StreamName name);
  StreamIndex find_captured(StreamName name);
  bool is_captured(StreamIndex index) const;
  StreamIndex enter(StreamName name, bool is_lasting);
  StreamIndex vacant_entry() const;
  void cover_now(StreamIndex index);
  static void begin_group(State& state) {
    state.next = (state.next + kTagGroup - 1) / kTagGroup * kTagGroup;
  }
  bool may_record(const State& state) const;
  Pending begin_mark(StreamIndex index);
  void record(Pending& pending);
  void finish_mark(const Pending& pending);
  void thin_out(State& state);
  bool is_waited_for(StreamIndex index, std::uint64_t number) const;
  void note_over(StreamIndex index, std::uint64_t number);
  std::vector<std::uint64_t> close_numbers(int device);
  template <class Is>
  std::vector<int> devices_where(Is is) const;
  void cover_streams(Lock& lock);
  void cover_devices(Lock& lock);
  Bytes uncovered_by_passing() const;
  void cover_device(int device, Lock& lock);
  void ask_device_marks(Lock& lock);
  Mark mark_for(const Tag& tag) const;

  Driver& driver_;
  const int device_;
  const ForkGuard fork_guard_;
  const Surroundings* surroundings_ = nullptr;
  EventPool events_;
  std::vector<State> streams_;
  bool do_several_ask_ = false;
  bool counts_frees_ = false;  // for there are several streams, and some frees are to be marked
  std::unordered_map<std::uint64_t, StreamIndex> by_handle_;  // those that last
  std::unordered_map<std::uint64_t, StreamIndex> by_id_;      // the others
  std::vector<Captured> captured_;
  std::vector<DeviceMark> device_marks_;  // oldest first
  std::uint64_t device_marks_made_ = 0;
  std::array<Recent, kRecent> recent_{};  // the last that were looked up, by slot
  Bytes mark_at_ = kMarked;               // what is freed on a stream between two marks
  std::size_t finished_ = 0;
  std::size_t under_way_ = 0;  // marks, or waits for a device, of threads that have let the lock go
};

}  // namespace vramx
