// The last events of one allocator, in a ring of fixed size.
//
// Off unless the ring has room. Not thread-safe: written under the allocator's lock. An entry costs
// one copy of 40 bytes; time is the host's steady clock.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "core/units.h"

namespace vramx {

enum class TraceKind : std::uint8_t {
  kAllocate,
  kFree,
  kRecordStream,
  kGrow,  // address and size of the new chunks in the arena
  kShrink,
  kStitch,  // address and size of the alias
  kOutOfMemory,
};

struct TraceEvent {
  TraceKind kind = TraceKind::kAllocate;
  Address address;
  Bytes size;
  Stream stream = Stream::kDefault;
  std::int64_t time_ns = 0;
};

class EventTrace {
 public:
  explicit EventTrace(std::size_t capacity) : capacity_(capacity) {}

  void add(TraceKind kind, Address address, Bytes size, Stream stream) {
    if (capacity_ != 0) [[unlikely]] {
      keep(kind, address, size, stream);
    }
  }

  // Oldest first.
  std::vector<TraceEvent> events() const {
    const std::size_t oldest = ring_.size() < capacity_ || capacity_ == 0
                                   ? 0
                                   : static_cast<std::size_t>(added_ % capacity_);
    std::vector<TraceEvent> ordered(ring_.begin() + static_cast<std::ptrdiff_t>(oldest),
                                    ring_.end());
    ordered.insert(ordered.end(), ring_.begin(),
                   ring_.begin() + static_cast<std::ptrdiff_t>(oldest));
    return ordered;
  }

  std::uint64_t added() const { return added_; }  // ever; those beyond the ring are lost

 private:
  void keep(TraceKind kind, Address address, Bytes size, Stream stream) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const TraceEvent event{kind, address, size, stream,
                           std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()};
    if (ring_.size() < capacity_) {
      ring_.push_back(event);
    } else {
      ring_[static_cast<std::size_t>(added_ % capacity_)] = event;
    }
    ++added_;
  }

  const std::size_t capacity_;
  std::vector<TraceEvent> ring_;
  std::uint64_t added_ = 0;
};

}  // namespace vramx
