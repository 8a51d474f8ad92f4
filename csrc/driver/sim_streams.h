// The simulated device's streams and events: queues that move only when a test says so, and the
// order between them, kept exactly.
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
// before it. Differs from CUDA where a capture is concerned: recording on a capturing stream is
// refused, because no caller of the Driver may do it; CUDA would make the event a node of the
// graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
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
  Result<Stream> create_stream();
  Status destroy_stream(Stream stream);
  // Gives a destroyed stream's name to a new stream, as cudaStreamCreate may.
  Status revive_stream(Stream stream);

  Result<Event> create_event();
  Status destroy_event(Event event);
  Status record_event(Event event, Stream stream);
  Result<bool> query_event(Event event) const;
  Status synchronize_event(Event event);  // runs what the event stands for
  Status wait_event(Stream stream, Event event);

  Status begin_capture(Stream stream);
  // Fails where something between the two had no place in a capture.
  Status end_capture(Stream stream);
  Result<bool> is_idle(Stream stream);
  Result<bool> is_capturing(Stream stream);

  // Queues `items` and names the last of them. On a capturing stream nothing is queued.
  Result<StreamPoint> submit(Stream stream, std::uint64_t items);
  // Runs up to `items`, fewer where the queue ends or waits for another stream; says how many.
  std::uint64_t advance(Stream stream, std::uint64_t items);
  void advance_all();
  // Runs everything that is queued on `stream`, and what that waits for.
  Status drain(Stream stream);

  // Whether `point` is finished before anything queued on `stream` from now on can start: because
  // of the waits that were queued, or because it has run already.
  bool happens_before(StreamPoint point, Stream stream) const;

  std::size_t live_events() const { return events_.size(); }

  // Recomputes; the first equation that does not hold, or an empty string:
  //   1. completed <= submitted, for each queue
  //   2. a clock names no item that is not submitted
  //   3. waits are in order and lie between completed and submitted
  //   4. each name belongs to the queue that it is filed under
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
    std::uint64_t submitted = 0;
    std::uint64_t completed = 0;
    std::deque<Wait> waits;
    Clock clock;  // of waits only; the queue's own entry is `submitted`
    Capture capture = Capture::kNone;
  };
  static constexpr std::uint32_t kDestroyed = ~std::uint32_t{0};

  // The queue of a live name, opened at first use: torch's streams are made elsewhere.
  Result<std::uint32_t> queue_of(Stream stream, const char* call);
  std::uint32_t open_queue(Stream stream);
  bool is_reached(const Clock& clock) const;
  bool is_within_submitted(const Clock& clock) const;
  // Drops the waits at the head of the queue that hold nothing back; false where one still does.
  bool pass_waits(Queue& queue);
  // What is finished when everything now on the queue is: closed under waits.
  Clock clock_of(std::uint32_t index) const;
  void complete(const Clock& clock);
  static void merge(Clock& into, const Clock& from);

  std::vector<Queue> queues_;
  std::unordered_map<std::uint64_t, std::uint32_t> names_;  // stream to queue, or kDestroyed
  std::unordered_map<std::uint64_t, Clock> events_;
  std::uint64_t next_stream_ = 1ULL << 32;  // apart from the small numbers that tests make up
  std::uint64_t next_event_ = 1;
};

}  // namespace vramx
