// Where spans live: slabs that never move, handed out by number.
//
// A span is named by a 32-bit id rather than a pointer, which halves the links. Slabs are kept
// until the pool goes; ids of destroyed spans are reused, the last one first, while its line is
// warm in the cache. Not thread-safe. Create and destroy are O(1); 56 bytes a span.
#pragma once

#include <memory>
#include <vector>

#include "core/types.h"

namespace vramx {

class SpanPool {
 public:
  Span& operator[](SpanId id) { return slabs_[id / kSlabSpans][id % kSlabSpans]; }
  const Span& operator[](SpanId id) const { return slabs_[id / kSlabSpans][id % kSlabSpans]; }

  SpanId create() {
    if (free_ == kNoId) add_slab();
    const SpanId id = free_;
    Span& span = (*this)[id];
    free_ = span.next;
    span = Span{};
    ++live_;
    return id;
  }

  void destroy(SpanId id) {
    (*this)[id].next = free_;
    free_ = id;
    --live_;
  }

  std::size_t live() const { return live_; }
  std::size_t host_bytes() const { return slabs_.size() * kSlabSpans * sizeof(Span); }

 private:
  static constexpr std::uint32_t kSlabSpans = 256;

  void add_slab() {
    const auto first = static_cast<SpanId>(slabs_.size() * kSlabSpans);
    slabs_.push_back(std::make_unique<Span[]>(kSlabSpans));
    for (std::uint32_t i = kSlabSpans; i-- > 0;) {
      slabs_.back()[i].next = free_;
      free_ = first + i;
    }
  }

  std::vector<std::unique_ptr<Span[]>> slabs_;
  SpanId free_ = kNoId;
  std::size_t live_ = 0;
};

}  // namespace vramx
