#include "core/stitch_plan.h"

#include <algorithm>
#include <utility>

namespace vramx {
namespace {

// Most plans have no more.
constexpr std::size_t kPieces = 16;

struct Candidate {
  // The chunk boundaries are its first and its last one; they may be the same.
  Candidate(const Piece& extent, Address first_boundary, Address last_boundary)
      : begin(extent.begin),
        whole_begin(first_boundary),
        whole_end(last_boundary),
        whole(whole_end - whole_begin),
        as_first(whole_end - begin),
        as_last(extent.end() - whole_begin) {}

  Bytes head() const { return as_first - whole; }
  Bytes tail() const { return as_last - whole; }

  Address begin;
  Address whole_begin;
  Address whole_end;
  Bytes whole;
  Bytes as_first;  // bytes as the first piece, and as the last one
  Bytes as_last;
  bool is_used = false;
};

class Stitcher {
 public:
  Stitcher(const std::vector<Piece>& extents, const ChunkTable& chunks) : chunks_(chunks) {
    candidates_.reserve(extents.size());
    for (const Piece& extent : extents) {
      const Address first_boundary = chunks.round_up(extent.begin);
      // Inside one chunk, it gives nothing.
      if (first_boundary > extent.end()) continue;
      candidates_.emplace_back(extent, first_boundary, chunks.round_down(extent.end()));
    }
  }

  // `tail` is held back for the last piece, if it is not null.
  StitchPlan run(Bytes size, Candidate* tail) {
    for (Candidate& candidate : candidates_) candidate.is_used = false;
    plan_.pieces.reserve(std::min(candidates_.size(), kPieces));
    left_ = size;
    most_as_last_ = Bytes{UINT64_MAX};
    first_chunk_end_ = {};
    take_first(tail);
    std::size_t next = 0;
    while (left_) {
      if (take_last(tail)) return std::exchange(plan_, {});
      while (
          next < candidates_.size() &&
          (candidates_[next].is_used || &candidates_[next] == tail || !candidates_[next].whole)) {
        ++next;
      }
      if (next == candidates_.size()) break;
      add(candidates_[next], candidates_[next].whole_begin, candidates_[next].whole);
    }
    if (left_ && tail != nullptr) {
      add(*tail, tail->whole_begin, min(left_, tail->as_last));
      plan_.ends_in_tail = true;
    }
    plan_.missing = left_;
    return std::exchange(plan_, {});
  }

  Candidate* largest_tail() {
    const auto found = std::max_element(
        candidates_.begin(), candidates_.end(),
        [](const Candidate& a, const Candidate& b) { return a.tail() < b.tail(); });
    return found != candidates_.end() && found->tail() ? &*found : nullptr;
  }

 private:
  void add(Candidate& from, Address begin, Bytes size) {
    plan_.pieces.push_back({begin, size});
    from.is_used = true;
    left_ -= size;
  }

  void take_first(const Candidate* tail) {
    Candidate* best = nullptr;
    for (Candidate& candidate : candidates_) {
      if (&candidate == tail || candidate.as_first > left_ || !candidate.head()) continue;
      if (tail != nullptr && chunks_.round_down(candidate.begin) == tail->whole_end) continue;
      if (best == nullptr || candidate.head() > best->head()) best = &candidate;
    }
    if (best == nullptr) return;
    first_chunk_end_ = best->whole_begin;
    add(*best, best->begin, best->as_first);
  }

  // A chunk can have a free start and a free end, and no alias maps a chunk twice: the extent that
  // ends in the chunk where the first piece begins cannot be the last piece up to that chunk.
  bool shares_chunk_with_first(const Candidate& last) const {
    return first_chunk_end_ && last.tail() &&
           chunks_.round_up(last.whole_end + kBlockUnit) == first_chunk_end_;
  }

  bool may_be_last(const Candidate& candidate, const Candidate* tail) const {
    if (candidate.is_used || &candidate == tail) return false;
    return candidate.whole >= left_ || !shares_chunk_with_first(candidate);
  }

  // The smallest extent that can hold all that is left ends the block. As long as more is left than
  // any can hold, as found out the time before, nobody is asked.
  bool take_last(Candidate* tail) {
    Candidate* last = left_ <= most_as_last_ ? smallest_last(tail) : nullptr;
    if (last == nullptr && tail != nullptr && tail->as_last >= left_) last = tail;
    if (last == nullptr) return false;
    add(*last, last->whole_begin, left_);
    return true;
  }

  Candidate* smallest_last(const Candidate* tail) {
    Candidate* best = nullptr;
    most_as_last_ = {};
    for (Candidate& candidate : candidates_) {
      if (candidate.is_used) continue;
      const Bytes as_last = candidate.as_last;
      most_as_last_ = max(most_as_last_, as_last);
      if (as_last < left_ || (best != nullptr && best->as_last <= as_last)) continue;
      if (may_be_last(candidate, tail)) best = &candidate;
    }
    return best;
  }

  const ChunkTable& chunks_;
  std::vector<Candidate> candidates_;
  StitchPlan plan_;
  Bytes left_;
  Bytes most_as_last_;       // no unused candidate can hold more as the last piece
  Address first_chunk_end_;  // of the chunk in which the block begins, once it does mid-chunk
};

}  // namespace

StitchPlan plan_stitch(const std::vector<Piece>& extents, const ChunkTable& chunks, Bytes size) {
  Stitcher stitcher(extents, chunks);
  StitchPlan plain = stitcher.run(size, nullptr);
  if (!plain.missing) return plain;
  // Not enough: holding back the largest tail for the end gains just that tail.
  Candidate* const tail = stitcher.largest_tail();
  if (tail == nullptr) return plain;
  StitchPlan with_tail = stitcher.run(size, tail);
  return with_tail.missing < plain.missing ? with_tail : plain;
}

}  // namespace vramx
