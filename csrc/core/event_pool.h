// Events that are used again: each belongs to the context of a device and is recorded many times.
//
// While a thread has yet to queue a wait for one, none is used again: the wait would be for
// whatever it stands for by then. Guarded by the allocator's lock; create() is called without it.
// Destroyed in the process that made it alone.
#pragma once

#include <utility>
#include <vector>

#include "core/driver.h"
#include "core/fork_guard.h"

namespace vramx {

class EventPool {
 public:
  explicit EventPool(Driver& driver) : driver_(driver) {}
  ~EventPool() {
    if (fork_guard_.is_in_child()) return;
    for (const auto* events : {&idle_, &resting_}) {
      for (const Owned& owned : *events) driver_.destroy_event(owned.event).ignore();
    }
  }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // kNone where there is none: then create() makes one.
  Event take(int device) {
    for (std::size_t i = idle_.size(); i-- > 0;) {
      if (idle_[i].device != device) continue;
      std::swap(idle_[i], idle_.back());
      const Event event = idle_.back().event;
      idle_.pop_back();
      return event;
    }
    return Event::kNone;
  }
  Event create(int device) const {
    const Result<Event> made = driver_.create_event(device);
    return made.ok() ? made.value() : Event::kNone;
  }
  void give_back(Event event, int device) {
    if (event != Event::kNone) (pins_ == 0 ? idle_ : resting_).push_back({event, device});
  }

  void pin() { ++pins_; }
  void unpin() {
    if (--pins_ != 0) return;
    idle_.insert(idle_.end(), resting_.begin(), resting_.end());
    resting_.clear();
  }

  std::size_t host_bytes() const {
    return (idle_.capacity() + resting_.capacity()) * sizeof(Owned);
  }

 private:
  struct Owned {
    Event event = Event::kNone;
    int device = 0;
  };

  Driver& driver_;
  const ForkGuard fork_guard_;
  std::vector<Owned> idle_;
  std::vector<Owned> resting_;  // that came back while a wait was under way
  std::size_t pins_ = 0;
};

}  // namespace vramx
