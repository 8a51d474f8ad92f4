// A driver that calls back once in the middle of a call, which is made without the lock: what
// another thread does meanwhile.
//
// Single-threaded.
#pragma once

#include <functional>
#include <utility>

#include "stress/layered_driver.h"

namespace vramx::units {

class Interrupted final : public stress::ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;

  Result<ChunkHandle> create_chunk(Bytes size) override {
    interrupt(at_growth);
    return inner_.create_chunk(size);
  }
  Status record_event(Event event, StreamName stream) override {
    interrupt(at_mark);
    return inner_.record_event(event, stream);
  }
  Result<bool> query_event(Event event) override {
    const Result<bool> answer = inner_.query_event(event);
    interrupt(at_answer);
    return answer;
  }

  Status unmap(Address at, Bytes size) override {
    interrupt(at_unmap);
    return inner_.unmap(at, size);
  }

  // Before growth, a mark and an unmapping, and after an event was asked.
  std::function<void()> at_growth, at_mark, at_unmap, at_answer;

 private:
  static void interrupt(std::function<void()>& once) {
    if (once) std::exchange(once, {})();
  }
};

}  // namespace vramx::units
