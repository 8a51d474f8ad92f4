// Finds the best-fitting extent: the smallest that is large enough and, of equals, the lowest.
//
// Sizes fall into bins, 16 to an octave; a bitmap says which bins hold something. Each bin is a
// treap ordered by (size, address), whose priorities are a hash of the address, so that the shape,
// and with it every placement, depends on nothing but the requests. Insert, erase and find are
// O(log extents), and close to O(1) because most bins hold a handful. Not thread-safe; the arena
// owns the spans and their lock.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>

#include "core/span_pool.h"
#include "core/types.h"

namespace vramx {

class FreeIndex {
 public:
  FreeIndex() { roots_.fill(kNoId); }

  void insert(SpanPool& spans, SpanId id);
  void erase(SpanPool& spans, SpanId id);
  // kNoId where no extent has `size` bytes.
  SpanId best_fit(const SpanPool& spans, Bytes size) const;

  std::size_t count() const { return count_; }

  // Calls visit(id) for extents of `smallest` bytes or more, largest bins first; a visit that
  // returns false ends it. Within a bin the order is that of the tree.
  template <class Visit>
  void for_each_from_largest(const SpanPool& spans, Bytes smallest, Visit visit) const;

  // The first broken rule (an entry in the wrong bin, out of order, or a bit that lies), or empty.
  std::string check(const SpanPool& spans) const;

 private:
  static constexpr std::uint32_t kStepsBits = 4;
  static constexpr std::uint32_t kSteps = 1u << kStepsBits;
  static constexpr std::uint32_t kBins = (64 - 9) * kSteps;
  static constexpr std::uint32_t kWords = (kBins + 63) / 64;

  static std::uint32_t bin_of(Bytes size);
  std::uint32_t next_bin(std::uint32_t bin) const;  // the first non-empty one from `bin` on
  bool visit_tree(const SpanPool& spans, SpanId id, Bytes smallest, auto& visit) const;

  std::array<SpanId, kBins> roots_;
  std::array<std::uint64_t, kWords> occupied_{};
  std::uint64_t occupied_words_ = 0;  // bit w: occupied_[w] is not zero
  std::size_t count_ = 0;
};

template <class Visit>
void FreeIndex::for_each_from_largest(const SpanPool& spans, Bytes smallest, Visit visit) const {
  const std::uint32_t last = bin_of(smallest);
  for (std::uint32_t word = kWords; word-- > last / 64;) {
    std::uint64_t bits = occupied_[word];
    while (bits != 0) {
      const auto bit = static_cast<std::uint32_t>(63 - std::countl_zero(bits));
      bits &= ~(std::uint64_t{1} << bit);
      const std::uint32_t bin = word * 64 + bit;
      if (bin < last || !visit_tree(spans, roots_[bin], smallest, visit)) return;
    }
  }
}

bool FreeIndex::visit_tree(const SpanPool& spans, SpanId id, Bytes smallest, auto& visit) const {
  if (id == kNoId) return true;
  const Span& span = spans[id];
  if (!visit_tree(spans, span.right, smallest, visit)) return false;
  if (span.size >= smallest && !visit(id)) return false;
  return visit_tree(spans, span.left, smallest, visit);
}

}  // namespace vramx
