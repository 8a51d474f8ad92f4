// The simulated process's streams and events, of all its devices: queues that move only when a test
// says so, and the order between them, kept exactly.
//
// Each stream has a queue of numbered items. A *clock* says, for each stream, up to which item its
// work is finished; a stream's clock is what is guaranteed before its next item starts, and an
// event holds the clock of its last record. So "is A's work up to p finished before new work on B"
// is a look into B's clock, whatever the device has run so far. Not thread-safe: sim_driver holds
// its lock. Record and wait cost O(streams).
//
//   A  --1--2--record e(A:2)--3-->
//   B  --1--wait e--2-->             item 2 of B starts after A:2; clock of B is {A:2, B:2}
//
// A stream name that is destroyed and created again is a new stream: the old one's items are not
// before it. No stream synchronises with the default stream, as torch's do not. Where CUDA leaves
// open what becomes of a call on a destroyed stream, the process ends here, with one line that says
// why, so that no test passes by luck.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "core/units.h"

namespace vramx {

// One item of one stream's queue: which life of which stream, and which item (the first is 1).
struct StreamPoint {
  std::uint32_t queue = 0;
  std::uint64_t position = 0;
};

class SimStreams {
 public:
  // Handles and ids are apart from those of the process's other simulated devices.
  explicit SimStreams(int ordinal);

  Stream create_stream(int device);
  Status destroy_stream(Stream stream);
  // Gives a destroyed stream's name to a new stream of its device, as CUDA may.
  Status revive_stream(Stream stream);

  Result<Event> create_event(int device);
  Status destroy_event(Event event);
  Status record_event(Event event, StreamName stream);
  Status record_device(Event event, int device);
  Result<bool> query_event(Event event) const;
  Status wait_event(StreamName stream, Event event);
  Status synchronize(int device);  // runs everything that is queued there, and what that waits for
  Result<std::uint64_t> stream_id(StreamName stream);

  Status begin_capture(StreamName stream);
  // Fails where something between the two had no place in a capture.
  Status end_capture(StreamName stream);
  Result<bool> is_capturing(StreamName stream);

  // Queues `items` and names the last of them. On a capturing stream nothing is queued.
  Result<StreamPoint> submit(StreamName stream, std::uint64_t items);
  // Runs up to `items`, fewer where the queue ends or waits for another stream; says how many.
  std::uint64_t advance(StreamName stream, std::uint64_t items);
  void advance_all();
  // Runs everything that is queued on `stream`, and what that waits for.
  Status drain(StreamName stream);

  // Whether `point` is finished before anything queued on `stream` from now on can start: because
  // of the waits that were queued, or because it has run already.
  bool happens_before(StreamPoint point, StreamName stream) const;

  std::size_t live_events() const { return events_.size(); }

  // Recomputes; the first equation that does not hold, or an empty string:
  //   1. completed <= submitted, for each queue
  //   2. a clock names no item that is not submitted
  //   3. waits are in order and lie between completed and submitted
  //   4. each name belongs to a queue, and no two to the same
  std::string check() const;

 private:
  // By queue, the item up to which work is finished; queues beyond the end have none.
  using Clock = std::vector<std::uint64_t>;
  struct Wait {
    std::uint64_t after = 0;  // holds back the items beyond this one
    Clock until;
  };
  enum class Capture : std::uint8_t { kNone, kActive, kInvalidated };
  // One life of one stream. It outlives the name, since queued work still runs.
  struct Queue {
    int device = 0;
    bool is_alive = true;
    std::uint64_t submitted = 0;
    std::uint64_t completed = 0;
    std::deque<Wait> waits{};
    Clock clock{};  // of waits only; the queue's own entry is `submitted`
    Capture capture = Capture::kNone;
  };
  struct SimEvent {
    int device = 0;
    Clock clock{};
  };
  // What a name comes to: CUDA's own two depend on the device, and one of them on the thread. A
  // handle says its device itself.
  struct Key {
    Stream handle = Stream::kDefault;
    std::int32_t device = 0;
    std::uint64_t thread = 0;
    auto operator<=>(const Key&) const = default;
  };
  static Key key_of(StreamName stream);

  std::uint32_t open_queue(const Key& key, int device);
  // The queue of a live name, opened at first use: torch's streams are made elsewhere.
  Result<std::uint32_t> queue_of(StreamName stream, const char* call);
  // The same for a call of the driver, which must not meet a destroyed stream and leaves captures
  // alone.
  Result<std::uint32_t> open_to_calls(StreamName stream, const char* call);
  bool spoil_captures(int device);  // says whether there was one
  bool is_reached(const Clock& clock) const;
  bool is_within_submitted(const Clock& clock) const;
  // Drops the waits at the head of the queue that hold nothing back; false where one still does.
  bool pass_waits(Queue& queue);
  // What is finished when everything now on the queue, or on the device, is: closed under waits.
  Clock clock_of(std::uint32_t index) const;
  Clock clock_of_device(int device) const;
  void complete(const Clock& clock);
  static void merge(Clock& into, const Clock& from);
  std::string check_queue(std::size_t index) const;

  const std::uint64_t base_;  // of handles and ids
  std::vector<Queue> queues_;
  std::map<Key, std::uint32_t> names_;  // to the queue of the name's latest life
  std::unordered_map<std::uint64_t, SimEvent> events_;
  std::uint64_t streams_made_ = 0;
  std::uint64_t events_made_ = 0;
};

}  // namespace vramx
