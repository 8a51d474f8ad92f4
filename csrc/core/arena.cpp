#include "core/arena.h"

#include <algorithm>
#include <cassert>

namespace vramx {
namespace {

// Up to this size a block goes to the high end of its extent when chunks don't decide, and above it
// to the low end: short-lived small blocks gather away from where large ones are freed whole.
constexpr Bytes kSmallBlock{1 << 20};

}  // namespace

Arena::Arena(Address base, Bytes size, Bytes granularity, Bytes small_zone)
    : base_(base),
      size_(size),
      chunks_(base, granularity),
      indexes_(base + (small_zone > granularity ? small_zone : Bytes{})) {
  first_ = last_ = spans_.create();
  spans_[first_].begin = base;
  spans_[first_].size = size;
  gaps_.push_back(first_);
  if (small_zone <= granularity) return;
  const auto [small, rest] = split(first_, base + (small_zone - granularity));
  const auto [border, large] = split(rest, base + small_zone);
  spans_[border].state = SpanState::kBorder;
  gaps_ = {small, large};
}

// --- find ---

SpanId Arena::span_at(Address address) const {
  SpanId id = span_of_page(address);
  while (spans_[id].end() <= address) id = spans_[id].next;
  return id;
}

SpanId Arena::extent_at(Address address) const {
  const std::size_t page = chunks_.page_of(address);  // below the base it is beyond every page
  SpanId id = page < page_spans_.size() ? page_spans_[page] : kNoId;
  if (id == kNoId) return kNoId;
  for (int steps = 0; spans_[id].end() <= address; id = spans_[id].next) {
    if (++steps > kMostSteps) return kNoId;
  }
  return spans_[id].state == SpanState::kFree ? id : kNoId;
}

std::size_t Arena::host_bytes() const {
  return spans_.host_bytes() + chunks_.host_bytes() + indexes_.host_bytes() + tags_.host_bytes() +
         page_spans_.capacity() * sizeof(SpanId);
}

// --- spans ---

// Several words at a time, the last of them over again: how many there are cannot be foreseen, and
// so fewer guesses fail.
void Arena::note_pages(SpanId id, Address begin, Address end) {
  constexpr std::size_t kFew = 4;
  constexpr std::size_t kMany = 16;
  const std::size_t first = chunks_.page_from(begin);
  const std::size_t count = chunks_.page_from(end) - first;
  SpanId* const pages = page_spans_.data() + first;
  if (count > kMany) {
    for (std::size_t i = 0; i + kMany < count; i += kMany) std::fill_n(pages + i, kMany, id);
    std::fill_n(pages + count - kMany, kMany, id);
  } else if (count >= kFew) {
    const std::size_t last = count - kFew;
    for (std::size_t i = 0; i < kMany; i += kFew) std::fill_n(pages + std::min(i, last), kFew, id);
  } else if (count != 0) {
    pages[0] = pages[count / 2] = pages[count - 1] = id;
  }
}

// Which part is the smaller cannot be foreseen either, so nothing branches on it.
std::pair<SpanId, SpanId> Arena::split(SpanId id, Address where) {
  const SpanId made = spans_.create();
  Span& old = spans_[id];
  Span& part = spans_[made];
  const Bytes left = where - old.begin;
  const Bytes right = old.size - left;
  const bool is_left_smaller = left < right;
  part.state = old.state;
  part.begin = is_left_smaller ? old.begin : where;
  part.size = is_left_smaller ? left : right;
  old.begin = is_left_smaller ? where : old.begin;
  old.size = is_left_smaller ? right : left;
  part.previous = is_left_smaller ? old.previous : id;
  part.next = is_left_smaller ? id : old.next;
  *(is_left_smaller ? link_behind(old.previous) : link_before(old.next)) = made;
  (is_left_smaller ? old.previous : old.next) = made;
  if (part.state == SpanState::kUsed || part.state == SpanState::kFree) note_pages(made);
  return is_left_smaller ? std::pair{made, id} : std::pair{id, made};
}

SpanId Arena::join(SpanId left, SpanId right) {
  Span& low = spans_[left];
  Span& high = spans_[right];
  assert(low.next == right && low.state == high.state);
  const bool is_left_kept = low.size >= high.size;
  const SpanId id = is_left_kept ? left : right;
  const SpanId gone = is_left_kept ? right : left;
  Span& kept = spans_[id];
  const Span& other = spans_[gone];
  if (kept.state == SpanState::kUsed || kept.state == SpanState::kFree) {
    note_pages(id, other.begin, other.end());
  }
  const SpanId before = low.previous;
  const SpanId after = high.next;
  kept.begin = low.begin;
  kept.size += other.size;
  kept.previous = before;
  kept.next = after;
  *(is_left_kept ? link_before(after) : link_behind(before)) = id;
  spans_.destroy(gone);
  return id;
}

// The one that is kept has the tags of both.
SpanId Arena::join_extents(SpanId left, SpanId right) {
  const bool is_left_kept = spans_[left].size >= spans_[right].size;
  FreeSpan& kept = spans_[is_left_kept ? left : right].free;
  tags_.unite(kept, spans_[is_left_kept ? right : left].free);
  return join(left, right);
}

void Arena::list(SpanId id) {
  ++extent_count_;
  indexes_.of(spans_[id]).insert(spans_, id);
}

void Arena::unlist(SpanId id) {
  --extent_count_;
  indexes_.of(spans_[id]).erase(spans_, id);
}

// --- take and give back ---

// Which end to cut from: the one that leaves more whole free chunks, or a rest that a chunk bound
// touches, since only they can be stitched; where neither does better, small blocks go high and
// large ones low.
bool Arena::fits_low(const Span& extent, Bytes size) const {
  if (chunks_.is_inside_page(extent.begin, extent.end())) return size > kSmallBlock;
  const Address cut_low = extent.begin + size;
  const Address cut_high = extent.end() - size;
  const Address first = chunks_.round_up(extent.begin);
  const Address last = chunks_.round_down(extent.end());
  if (first < last) {
    const auto whole = [](Address from, Address to) { return from < to ? to - from : Bytes{}; };
    const Bytes after_low = whole(chunks_.round_up(cut_low), last);
    const Bytes after_high = whole(first, chunks_.round_down(cut_high));
    if (after_low != after_high) return after_low > after_high;
  }
  // Of an extent inside one chunk `last` comes before `first`, and neither end is touched.
  const bool touches_after_low = first <= last && cut_low <= last;
  const bool touches_after_high = first <= last && cut_high >= first;
  if (touches_after_low != touches_after_high) return touches_after_low;
  return size > kSmallBlock;
}

SpanId Arena::take(SpanId extent, Bytes size) {
  const Span& span = spans_[extent];
  if (span.size == size || fits_low(span, size)) return take_at(extent, span.begin, size);
  return take_at(extent, span.end() - size, size);
}

SpanId Arena::take_at(SpanId extent, Address begin, Bytes size) {
  // Field by field: a copy of the whole would have to wait for fields that were just written.
  const FreeSpan& had = spans_[extent].free;
  const Tag tag{had.tag_stream, had.tag_number};
  const std::uint32_t tag_set = had.tag_set;
  FreeIndex& index = indexes_.of(spans_[extent]);
  --extent_count_;
  index.erase(spans_, extent);
  free_bytes_ -= size;
  SpanId used = extent;
  if (spans_[used].begin < begin) {
    const auto [rest, taken] = split(used, begin);
    list_rest(rest, tag, tag_set, index);
    used = taken;
  }
  if (spans_[used].size > size) {
    const auto [taken, rest] = split(used, begin + size);
    list_rest(rest, tag, tag_set, index);
    used = taken;
  }
  tags_.drop(tag_set);
  std::construct_at(&spans_[used].used);
  spans_[used].state = SpanState::kUsed;
  return used;
}

// A part of an extent that had this tag, or this set of them, and was in this index.
inline void Arena::list_rest(SpanId id, const Tag& tag, std::uint32_t tag_set, FreeIndex& index) {
  tags_.copy(spans_[id].free, tag, tag_set);
  ++extent_count_;
  index.insert(spans_, id);
}

// Takes a free neighbour in, unless their tags keep them apart: kNoId then, else what the span is
// called now. What is tied may be `spare` bytes.
SpanId Arena::absorb(SpanId id, SpanId neighbour, Bytes* spare) {
  if (!is_extent(neighbour)) return kNoId;
  const Span& other = spans_[neighbour];
  if (!tags_.are_alike(spans_[id].free, other.free)) {
    if (other.size > *spare || !tags_.may_tie(spans_[id].free, other.free)) return kNoId;
    *spare -= other.size;
  }
  unlist(neighbour);
  const bool is_next = spans_[id].next == neighbour;
  return is_next ? join_extents(id, neighbour) : join_extents(neighbour, id);
}

void Arena::give_back(SpanId used, const TagSet& tags) {
  tags_.set(*std::construct_at(&spans_[used].free), tags);
  merge_and_list(used);
}

void Arena::give_back(SpanId used, Tag tag) {
  std::construct_at(&spans_[used].free,
                    FreeSpan{.tag_stream = tag.stream, .tag_number = tag.number});
  merge_and_list(used);
}

// Behind a neighbour that was tied another one may be that is alike.
void Arena::merge_and_list(SpanId id) {
  Bytes spare = min(spans_[id].size, kMostTied);
  spans_[id].state = SpanState::kFree;
  free_bytes_ += spans_[id].size;
  for (SpanId with = id; with != kNoId; with = absorb(id, spans_[id].next, &spare)) id = with;
  for (SpanId with = id; with != kNoId; with = absorb(id, spans_[id].previous, &spare)) id = with;
  list(id);
}

void Arena::let_mix() {
  tags_.let_mix();
  std::vector<SpanId> extents;
  for_each_extent([&](SpanId id) { extents.push_back(id); });
  merge_around(std::move(extents));
}

// Only what lost tags may have come to be like its neighbours. The runs of neighbouring extents
// have nothing to do with each other, so their order is no matter.
void Arena::merge_around(std::vector<SpanId> extents) {
  for (SpanId& start : extents) {
    while (is_extent(spans_[start].previous)) start = spans_[start].previous;
  }
  std::sort(extents.begin(), extents.end());
  extents.erase(std::unique(extents.begin(), extents.end()), extents.end());
  for (SpanId left : extents) {
    for (SpanId right = spans_[left].next; is_extent(right); right = spans_[left].next) {
      if (!tags_.are_alike(spans_[left].free, spans_[right].free)) {
        left = right;
        continue;
      }
      unlist(left);
      unlist(right);
      left = join_extents(left, right);
      list(left);
    }
  }
}

SpanId Arena::give_back_end(SpanId used, Bytes kept) {
  if (spans_[used].size == kept) return used;
  const auto [start, end] = split(used, spans_[used].begin + kept);
  std::construct_at(&spans_[start].used);
  give_back(end, TagSet{});
  return start;
}

}  // namespace vramx
