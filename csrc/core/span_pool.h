// Where spans live: one array, handed out by number.
//
// A span is named by a 32-bit id rather than a pointer, which halves the links and lets the array
// move when it grows: a Span& is good until the next create(). Ids of destroyed spans are reused,
// the last one first, while its line is warm in the cache. Not thread-safe. Create and destroy are
// O(1), but for growth; 64 bytes a span.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "core/types.h"

namespace vramx {

class SpanPool {
 public:
  Span& operator[](SpanId id) { return spans_[id]; }
  const Span& operator[](SpanId id) const { return spans_[id]; }

  SpanId create() {
    if (free_ == kNoId) [[unlikely]] {
      grow();
    }
    const SpanId id = free_;
    free_ = spans_[id].next;
    std::construct_at(&spans_[id]);  // in place: a copy would wait for what was just written
    ++live_;
    return id;
  }

  void destroy(SpanId id) {
    spans_[id].next = free_;
    free_ = id;
    --live_;
  }

  std::size_t live() const { return live_; }
  std::size_t host_bytes() const { return spans_.capacity() * sizeof(Span); }

 private:
  // It grows by little: what is kept in reserve counts, and most programs are done with growing
  // after a step.
  static constexpr std::size_t kGrowth = 32;  // of this many spans, one more
  static constexpr std::size_t kFewSpans = 128;

  void grow() {
    const std::size_t had = spans_.size();
    const std::size_t size = had + std::max(kFewSpans, had / kGrowth);
    spans_.reserve(size);  // no more than that
    spans_.resize(size);
    for (std::size_t i = size; i-- > had;) {
      spans_[i].next = free_;
      free_ = static_cast<SpanId>(i);
    }
  }

  std::vector<Span> spans_;
  SpanId free_ = kNoId;
  std::size_t live_ = 0;
};

}  // namespace vramx
