// Finds the best-fitting extent: the smallest that is large enough and, of equals, the lowest.
//
// Sizes fall into bins, 16 to an octave; a bitmap says which bins hold something. Each bin is a
// treap ordered by (size, address), whose priorities are a hash of the address, so that the shape,
// and with it every placement, depends on nothing but the requests. Insert, erase and find are
// O(log extents), and close to O(1) because most bins hold one extent or none, which is what the
// inline parts are for. Not thread-safe; the arena owns the spans and their lock.
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

  // Of equals the lowest; kNoId where there is none.
  SpanId largest(const SpanPool& spans) const;

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

  // Bin = octave and the four bits below the leading one, in units of 512 bytes. Sizes below 16
  // units have bins of their own, which keeps the exact small sizes apart.
  static std::uint32_t bin_of(Bytes size) {
    const std::uint64_t units = size / kBlockUnit;
    if (units < kSteps) return static_cast<std::uint32_t>(units);
    const auto octave = static_cast<std::uint32_t>(std::bit_width(units) - 1);
    const auto step = static_cast<std::uint32_t>(units >> (octave - kStepsBits)) - kSteps;
    return (octave - kStepsBits + 1) * kSteps + step;
  }
  void insert_into_tree(SpanPool& spans, SpanId id, std::uint32_t bin);
  void erase_from_tree(SpanPool& spans, SpanId id, std::uint32_t bin);
  static SpanId lower_bound(const SpanPool& spans, SpanId tree, Bytes size);
  std::uint32_t next_bin(std::uint32_t bin) const;  // the first non-empty one from `bin` on
  // The number of the highest bit that is set, which no longer is.
  static std::uint32_t take_highest(std::uint64_t& bits) {
    const auto bit = static_cast<std::uint32_t>(63 - std::countl_zero(bits));
    bits &= ~(std::uint64_t{1} << bit);
    return bit;
  }
  bool visit_tree(const SpanPool& spans, SpanId id, Bytes smallest, auto& visit) const;
  std::string check_bin(const SpanPool& spans, std::uint32_t bin, std::size_t* seen) const;

  std::array<SpanId, kBins> roots_;
  std::array<std::uint64_t, kWords> occupied_{};
  std::uint64_t occupied_words_ = 0;  // bit w: occupied_[w] is not zero
  std::size_t count_ = 0;
};

inline void FreeIndex::insert(SpanPool& spans, SpanId id) {
  Span& span = spans[id];
  const std::uint32_t bin = bin_of(span.size);
  span.free.bin = bin;
  ++count_;
  if (roots_[bin] != kNoId) return insert_into_tree(spans, id, bin);
  span.free.left = span.free.right = span.free.parent = kNoId;
  roots_[bin] = id;
  occupied_[bin / 64] |= std::uint64_t{1} << (bin % 64);
  occupied_words_ |= std::uint64_t{1} << (bin / 64);
}

inline void FreeIndex::erase(SpanPool& spans, SpanId id) {
  const Span& span = spans[id];
  const std::uint32_t bin = span.free.bin;
  --count_;
  // All three are kNoId.
  const bool is_alone = (span.free.left & span.free.right & span.free.parent) == kNoId;
  if (!is_alone) return erase_from_tree(spans, id, bin);
  roots_[bin] = kNoId;
  occupied_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
  const bool is_last = occupied_[bin / 64] == 0;
  occupied_words_ &= ~(std::uint64_t{is_last} << (bin / 64));
}

inline SpanId FreeIndex::lower_bound(const SpanPool& spans, SpanId tree, Bytes size) {
  SpanId found = kNoId;
  while (tree != kNoId) {
    const Span& span = spans[tree];
    const bool is_enough = span.size >= size;
    if (is_enough) found = tree;
    tree = is_enough ? span.free.left : span.free.right;
  }
  return found;
}

inline SpanId FreeIndex::best_fit(const SpanPool& spans, Bytes size) const {
  const std::uint32_t bin = bin_of(size);
  const SpanId here = lower_bound(spans, roots_[bin], size);
  if (here != kNoId) return here;
  const std::uint32_t later = next_bin(bin + 1);
  return later < kBins ? lower_bound(spans, roots_[later], size) : kNoId;
}

inline std::uint32_t FreeIndex::next_bin(std::uint32_t bin) const {
  const std::uint32_t word = bin / 64;
  if (word >= kWords) return kBins;
  if (const std::uint64_t here = occupied_[word] >> (bin % 64)) {
    return bin + static_cast<std::uint32_t>(std::countr_zero(here));
  }
  if (word + 1 >= kWords) return kBins;
  const std::uint64_t later = occupied_words_ >> (word + 1);
  if (later == 0) return kBins;
  const std::uint32_t found = word + 1 + static_cast<std::uint32_t>(std::countr_zero(later));
  return found * 64 + static_cast<std::uint32_t>(std::countr_zero(occupied_[found]));
}

template <class Visit>
void FreeIndex::for_each_from_largest(const SpanPool& spans, Bytes smallest, Visit visit) const {
  const std::uint32_t last = bin_of(smallest);
  std::uint64_t words = occupied_words_;
  while (words != 0) {
    const std::uint32_t word = take_highest(words);
    std::uint64_t bits = occupied_[word];
    while (bits != 0) {
      const std::uint32_t bin = word * 64 + take_highest(bits);
      if (bin < last || !visit_tree(spans, roots_[bin], smallest, visit)) return;
    }
  }
}

bool FreeIndex::visit_tree(const SpanPool& spans, SpanId id, Bytes smallest, auto& visit) const {
  for (; id != kNoId; id = spans[id].free.left) {
    const SpanId right = spans[id].free.right;
    if (right != kNoId && !visit_tree(spans, right, smallest, visit)) return false;
    if (spans[id].size >= smallest && !visit(id)) return false;
  }
  return true;
}

}  // namespace vramx
