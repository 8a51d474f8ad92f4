#include "core/free_index.h"

#include <algorithm>

namespace vramx {
namespace {

// Fibonacci hashing: neighbouring addresses get unrelated priorities.
std::uint64_t priority(const Span& span) { return span.begin.value * 0x9E3779B97F4A7C15ull; }

bool precedes(const Span& a, const Span& b) {
  return a.size < b.size || (a.size == b.size && a.begin < b.begin);
}

// Divides the tree at the span `pivot`, which gets what precedes it as its left child and the rest
// as its right one.
void split(SpanPool& spans, SpanId tree, SpanId pivot) {
  SpanId* low = &spans[pivot].free.left;
  SpanId* high = &spans[pivot].free.right;
  SpanId low_parent = pivot;
  SpanId high_parent = pivot;
  while (tree != kNoId) {
    Span& span = spans[tree];
    const bool is_low = precedes(span, spans[pivot]);
    *(is_low ? low : high) = tree;
    span.free.parent = is_low ? low_parent : high_parent;
    (is_low ? low_parent : high_parent) = tree;
    (is_low ? low : high) = is_low ? &span.free.right : &span.free.left;
    tree = is_low ? span.free.right : span.free.left;
  }
  *low = kNoId;
  *high = kNoId;
}

// Joins two trees under `parent`, every entry of `low` preceding every entry of `high`.
SpanId join(SpanPool& spans, SpanId low, SpanId high, SpanId parent) {
  SpanId root = kNoId;
  SpanId* link = &root;
  while (low != kNoId && high != kNoId) {
    const bool is_low = priority(spans[low]) > priority(spans[high]);
    const SpanId upper = is_low ? low : high;
    Span& span = spans[upper];
    *link = upper;
    span.free.parent = parent;
    parent = upper;
    link = is_low ? &span.free.right : &span.free.left;
    (is_low ? low : high) = *link;
  }
  *link = low != kNoId ? low : high;
  if (*link != kNoId) spans[*link].free.parent = parent;
  return root;
}

}  // namespace

void FreeIndex::insert_into_tree(SpanPool& spans, SpanId id, std::uint32_t bin) {
  Span& span = spans[id];
  SpanId parent = kNoId;
  SpanId* link = &roots_[bin];
  while (*link != kNoId && priority(spans[*link]) >= priority(span)) {
    parent = *link;
    link = precedes(spans[parent], span) ? &spans[parent].free.right : &spans[parent].free.left;
  }
  split(spans, *link, id);
  span.free.parent = parent;
  *link = id;
}

// The bin keeps at least one entry.
void FreeIndex::erase_from_tree(SpanPool& spans, SpanId id, std::uint32_t bin) {
  const Span& span = spans[id];
  SpanId* link = &roots_[bin];
  if (span.free.parent != kNoId) {
    Span& parent = spans[span.free.parent];
    link = parent.free.left == id ? &parent.free.left : &parent.free.right;
  }
  *link = join(spans, span.free.left, span.free.right, span.free.parent);
}

SpanId FreeIndex::largest(const SpanPool& spans) const {
  if (count_ == 0) return kNoId;
  const auto word = static_cast<std::uint32_t>(63 - std::countl_zero(occupied_words_));
  const auto bit = static_cast<std::uint32_t>(63 - std::countl_zero(occupied_[word]));
  const SpanId root = roots_[word * 64 + bit];
  SpanId last = root;
  while (spans[last].free.right != kNoId) last = spans[last].free.right;
  return lower_bound(spans, root, spans[last].size);
}

std::string FreeIndex::check(const SpanPool& spans) const {
  std::size_t seen = 0;
  for (std::uint32_t word = 0; word < kWords; ++word) {
    const bool bit = (occupied_words_ >> word) & 1;
    if (bit != (occupied_[word] != 0)) return "free index: bit of word " + std::to_string(word);
    const auto first = roots_.begin() + word * 64;
    const auto last = roots_.begin() + std::min(word * 64 + 64, kBins);
    if (!bit && std::count(first, last, kNoId) == last - first) continue;
    for (auto root = first; root != last; ++root) {
      const auto bin = static_cast<std::uint32_t>(root - roots_.begin());
      if (std::string broken = check_bin(spans, bin, &seen); !broken.empty()) return broken;
    }
  }
  if (seen != count_) return "free index: count says " + std::to_string(count_);
  return {};
}

// Adds its entries to `seen`.
std::string FreeIndex::check_bin(const SpanPool& spans, std::uint32_t bin,
                                 std::size_t* seen) const {
  const bool bit = (occupied_[bin / 64] >> (bin % 64)) & 1;
  if (bit != (roots_[bin] != kNoId)) return "free index: bit of bin " + std::to_string(bin);
  const Span* above = nullptr;
  bool is_sound = true;
  auto visit = [&](SpanId id) {
    const Span& span = spans[id];
    const bool is_linked = span.free.parent == kNoId ? roots_[bin] == id
                                                     : spans[span.free.parent].free.left == id ||
                                                           spans[span.free.parent].free.right == id;
    is_sound = is_sound && is_linked && span.state == SpanState::kFree &&
               bin_of(span.size) == bin && span.free.bin == bin &&
               (above == nullptr || precedes(span, *above));
    above = &span;
    ++*seen;
    return is_sound;
  };
  visit_tree(spans, roots_[bin], Bytes{}, visit);
  return is_sound ? "" : "free index: an entry of bin " + std::to_string(bin) + " is misplaced";
}

}  // namespace vramx
