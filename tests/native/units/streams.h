// What the checks of StreamOrder share: a simulated device whose streams move when told, what a
// program knows of its streams, and frees as the allocator makes them.
//
// Single-threaded but for what a check starts itself.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "core/stream_order.h"
#include "core/surroundings.h"
#include "driver/sim_driver.h"
#include "units/interrupted.h"
#include "units/units.h"

namespace vramx::units {

// What a free is marked at, and more than enough for the small ones together.
constexpr Bytes kMarkedFree = 1_MiB;
constexpr Bytes kSmallFree = 512_B;

class KnownStreams final : public Surroundings {
 public:
  bool is_lasting(StreamName stream) const override {
    return std::find(lasting.begin(), lasting.end(), stream.handle) != lasting.end();
  }
  bool is_current(StreamName stream) const override { return stream.handle == current; }
  // While a graph is captured only the stream that the thread works on is left to it.
  bool begin_call(StreamName stream) const override {
    return count_call(!is_capturing || stream.handle == current);
  }
  bool begin_device_call(int) const override { return count_call(!is_capturing); }
  void end_call(int) const override { --calls; }

  std::vector<Stream> lasting;
  Stream current = Stream::kDefault;
  bool is_capturing = false;
  mutable int calls = 0;  // under way

 private:
  bool count_call(bool may_call) const {
    calls += may_call ? 1 : 0;
    return may_call;
  }
};

// Two streams that last, and the default one, which is the first.
struct StreamFixture {
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = kPage, .mode = SimMode::kAccounting, .journal_entries = 64});
  Interrupted driver{*sim};
  KnownStreams known;
  StreamOrder order{driver};
  AdaptiveMutex mutex;
  Lock lock{mutex};
  const Stream on_a = sim->create_stream(0);
  const Stream on_b = sim->create_stream(0);

  StreamFixture() {
    known.lasting = {on_a, on_b};
    order.set_surroundings(&known);
    order.note_askers(true);
  }

  StreamIndex enter(Stream stream) { return order.index_of(stream); }
  // Enters a stream that another library made, which the thread works on.
  StreamIndex enter_foreign(Stream stream) {
    known.current = stream;
    return order.index_of(stream);
  }
  // As the allocator does for one block of one stream.
  Tag free(StreamIndex index, Bytes size = kMarkedFree) {
    return order.wants_mark(index, size) ? order.mark(index, lock) : order.stamp(index);
  }
  // With an item of work before it.
  Tag work_and_free(StreamIndex index, Bytes size = kMarkedFree) {
    work = sim->submit(order.name_of(index)).value();
    return free(index, size);
  }
  // What another thread does in the middle of the next question.
  template <class Act>
  void when_asked(Act act) {
    driver.at_answer = [this, act]() mutable {
      lock.lock();
      act();
      lock.unlock();
    };
  }
  // Makes the reader wait for all of it, as the executor does.
  void wait(StreamIndex reader, const TagSet& tags) {
    std::vector<StreamWait> waits;
    order.add_waits(tags, reader, &waits);
    for (const StreamWait& each : waits) {
      EXPECT(sim->wait_event(order.name_of(reader), each.event).ok());
      order.note_waited(reader, each);
    }
  }
  std::uint64_t count(CallKind kind) const { return sim->call_count(kind); }
  std::uint64_t record_count() const { return count(CallKind::kRecordEvent); }

  StreamPoint work;  // the last
};

}  // namespace vramx::units
