// A driver that says when it is called without the allocator's lock, before the call is carried out
// and after: what other threads may come between.
//
// Whether the lock is held is tried: a step runs in one thread at a time, so nobody else has it.
// Until it is told of an allocator it passes every call on and says nothing.
#pragma once

#include <type_traits>

#include "core/adaptive_mutex.h"
#include "driver/sim_calls.h"
#include "stress/layered_driver.h"

namespace vramx::stress {

class InterruptedDriver final : public ForwardingDriver {
 public:
  enum class Moment : std::uint8_t { kBefore, kAfter };
  class Listener {
   public:
    virtual void on_call_without_lock(CallKind call, Moment moment) = 0;

   protected:
    ~Listener() = default;
  };

  InterruptedDriver(Driver& inner, Listener& listener)
      : ForwardingDriver(inner), listener_(listener) {}

  // The allocator's; null for none.
  void set_lock(AdaptiveMutex* mutex) { mutex_ = mutex; }

  Result<MemoryInfo> memory_info() override {
    return tell(CallKind::kMemoryInfo, [&] { return inner_.memory_info(); });
  }
  Result<ChunkHandle> create_chunk(Bytes size) override {
    return tell(CallKind::kCreateChunk, [&] { return inner_.create_chunk(size); });
  }
  Status release_chunk(ChunkHandle chunk) override {
    return tell(CallKind::kReleaseChunk, [&] { return inner_.release_chunk(chunk); });
  }
  Status map(Address at, Bytes size, ChunkHandle chunk) override {
    return tell(CallKind::kMap, [&] { return inner_.map(at, size, chunk); });
  }
  Status unmap(Address at, Bytes size) override {
    return tell(CallKind::kUnmap, [&] { return inner_.unmap(at, size); });
  }
  Status set_access(Address at, Bytes size) override {
    return tell(CallKind::kSetAccess, [&] { return inner_.set_access(at, size); });
  }
  Result<Event> create_event(int device) override {
    return tell(CallKind::kCreateEvent, [&] { return inner_.create_event(device); });
  }
  Status record_event(Event event, StreamName stream) override {
    return tell(CallKind::kRecordEvent, [&] { return inner_.record_event(event, stream); });
  }
  Status record_device(Event event, int device) override {
    return tell(CallKind::kRecordDevice, [&] { return inner_.record_device(event, device); });
  }
  Result<bool> query_event(Event event) override {
    return tell(CallKind::kQueryEvent, [&] { return inner_.query_event(event); });
  }
  Status wait_event(StreamName stream, Event event) override {
    return tell(CallKind::kWaitEvent, [&] { return inner_.wait_event(stream, event); });
  }
  Status synchronize(int device) override {
    return tell(CallKind::kSynchronize, [&] { return inner_.synchronize(device); });
  }

 private:
  template <class Call>
  std::invoke_result_t<Call> tell(CallKind kind, Call call) {
    tell_moment(kind, Moment::kBefore);
    const auto result = call();
    tell_moment(kind, Moment::kAfter);
    return result;
  }
  void tell_moment(CallKind kind, Moment moment) {
    if (mutex_ == nullptr || !mutex_->try_lock()) return;
    mutex_->unlock();
    listener_.on_call_without_lock(kind, moment);
  }

  Listener& listener_;
  AdaptiveMutex* mutex_ = nullptr;
};

}  // namespace vramx::stress
