#include "core/arena.h"

#include <algorithm>
#include <cassert>

namespace vramx {
namespace {

// Up to this size a block goes to the high end of its extent when chunks don't decide, and above it
// to the low end: short-lived small blocks gather away from where large ones are freed whole.
constexpr Bytes kSmallBlock{1 << 20};

}  // namespace

Arena::Arena(Address base, Bytes size, Bytes granularity)
    : base_(base), size_(size), chunks_(base, granularity) {
  first_ = spans_.create();
  spans_[first_].begin = base;
  spans_[first_].size = size;
  gaps_.push_back(first_);
}

// --- find
// ------------------------------------------------------------------------------------------

SpanId Arena::best_fit(Bytes size, StreamIndex stream) const {
  SpanId best = kNoId;
  for_each_index(stream, [&](const FreeIndex& index) {
    if (index.count() == 0) return;
    const SpanId found = index.best_fit(spans_, size);
    if (found == kNoId) return;
    if (best == kNoId || spans_[found].size < spans_[best].size ||
        (spans_[found].size == spans_[best].size && spans_[found].begin < spans_[best].begin)) {
      best = found;
    }
  });
  return best;
}

SpanId Arena::best_fit_of_any(Bytes size) const { return best_fit(size, kAnyStream); }

std::vector<SpanId> Arena::largest(Bytes smallest, std::size_t count, StreamIndex stream) const {
  std::vector<SpanId> found;
  for_each_index(stream, [&](const FreeIndex& index) {
    std::size_t taken = 0;
    index.for_each_from_largest(spans_, smallest, [&](SpanId id) {
      found.push_back(id);
      return ++taken < count;
    });
  });
  std::sort(found.begin(), found.end(), [this](SpanId a, SpanId b) {
    const Span& left = spans_[a];
    const Span& right = spans_[b];
    return left.size != right.size ? left.size > right.size : left.begin < right.begin;
  });
  if (found.size() > count) found.resize(count);
  return found;
}

SpanId Arena::span_at(Address address) const {
  SpanId id = chunks_[chunks_.at(address)].span_at_begin;
  while (spans_[id].end() <= address) id = spans_[id].next;
  return id;
}

SpanId Arena::extent_over(Address begin, Bytes size) const {
  const SpanId id = span_at(begin);
  const Span& span = spans_[id];
  return span.state == SpanState::kFree && begin + size <= span.end() ? id : kNoId;
}

bool Arena::is_whole_free(ChunkId chunk) const {
  const Chunk& c = chunks_[chunk];
  const Span& span = spans_[c.span_at_begin];
  return span.state == SpanState::kFree && c.end() <= span.end();
}

Bytes Arena::free_prefix(ChunkId chunk) const {
  const Chunk& c = chunks_[chunk];
  const Span& span = spans_[c.span_at_begin];
  return span.state == SpanState::kFree ? min(span.end() - c.begin, c.size) : Bytes{};
}

Bytes Arena::free_suffix(ChunkId chunk) const {
  const Chunk& c = chunks_[chunk];
  SpanId id = kNoId;
  if (const ChunkId after = chunks_.find(c.end()); after != kNoId) {
    id = chunks_[after].span_at_begin;
    if (spans_[id].begin >= c.end()) id = spans_[id].previous;
  } else {
    id = span_at(c.end() - kBlockUnit);
  }
  const Span& span = spans_[id];
  return span.state == SpanState::kFree ? min(c.end() - span.begin, c.size) : Bytes{};
}

std::size_t Arena::host_bytes() const {
  std::size_t indexes = 0;
  for_each_index(kAnyStream, [&](const FreeIndex&) { indexes += sizeof(FreeIndex); });
  return spans_.host_bytes() + chunks_.host_bytes() + indexes +
         tag_sets_.capacity() * sizeof(TagSet);
}

// --- tags
// ------------------------------------------------------------------------------------------

FreeIndex& Arena::make_index_of(StreamIndex stream) {
  if (stream >= streams_.size()) streams_.resize(stream + 1);
  if (!streams_[stream]) streams_[stream] = std::make_unique<FreeIndex>();
  return *streams_[stream];
}

FreeIndex& Arena::index_of(const Span& span) {
  if (span.tag_set != kNoId) return mixed_;
  if (span.tag_stream == kNoId) return clean_;
  const bool is_known = span.tag_stream < streams_.size() && streams_[span.tag_stream];
  return is_known ? *streams_[span.tag_stream] : make_index_of(span.tag_stream);
}

TagSet Arena::tags_of(SpanId extent) const {
  const Span& span = spans_[extent];
  if (span.tag_set != kNoId) return tag_sets_[span.tag_set];
  return TagSet(Tag{span.tag_stream, span.tag_sequence});
}

void Arena::set_tags(Span& span, const TagSet& tags) {
  if (tags.size() == 1) {
    span.tag_stream = tags[0].stream;
    span.tag_sequence = tags[0].sequence;
  } else if (tags.size() > 1) {
    if (vacant_tag_sets_.empty()) {
      vacant_tag_sets_.push_back(static_cast<std::uint32_t>(tag_sets_.size()));
      tag_sets_.emplace_back();
    }
    span.tag_set = vacant_tag_sets_.back();
    vacant_tag_sets_.pop_back();
    tag_sets_[span.tag_set] = tags;
  }
}

void Arena::clear_tags(Span& span) {
  if (span.tag_set != kNoId) vacant_tag_sets_.push_back(span.tag_set);
  span.tag_set = kNoId;
  span.tag_stream = kNoId;
  span.tag_sequence = 0;
}

void Arena::copy_tags(const Span& from, Span& to) {
  if (from.tag_set != kNoId) {
    set_tags(to, TagSet(tag_sets_[from.tag_set]));
  } else {
    to.tag_stream = from.tag_stream;
    to.tag_sequence = from.tag_sequence;
  }
}

// The kept span gets the tags of both. With one stream or none on either side, as nearly always,
// that is a comparison.
void Arena::unite_tags(Span& kept, Span& gone) {
  if (kept.tag_set == kNoId && gone.tag_set == kNoId &&
      (kept.tag_stream == gone.tag_stream || kept.tag_stream == kNoId ||
       gone.tag_stream == kNoId)) {
    if (kept.tag_stream == kNoId) kept.tag_stream = gone.tag_stream;
    kept.tag_sequence = std::max(kept.tag_sequence, gone.tag_sequence);
    return;
  }
  const auto tags = [this](const Span& span) {
    return span.tag_set != kNoId ? tag_sets_[span.tag_set]
                                 : TagSet(Tag{span.tag_stream, span.tag_sequence});
  };
  TagSet united = tags(kept);
  united.add(tags(gone));
  clear_tags(kept);
  clear_tags(gone);
  set_tags(kept, united);
}

// Memory that waits for nothing merges with anything; else the streams must be the same.
bool Arena::may_merge(const Span& a, const Span& b) const {
  if (a.tag_set == kNoId && b.tag_set == kNoId) {
    return a.tag_stream == b.tag_stream || a.tag_stream == kNoId || b.tag_stream == kNoId;
  }
  if (a.tag_set == kNoId || b.tag_set == kNoId) {
    return (a.tag_set == kNoId ? a : b).tag_stream == kNoId;
  }
  return tag_sets_[a.tag_set].has_streams_of(tag_sets_[b.tag_set]);
}

// --- spans
// -----------------------------------------------------------------------------------------

void Arena::note_chunks(SpanId id) {
  const Span& span = spans_[id];
  chunks_.for_each_beginning_in(span.begin, span.end(),
                                [&](ChunkId chunk) { chunks_[chunk].span_at_begin = id; });
}

std::pair<SpanId, SpanId> Arena::split(SpanId id, Address where) {
  const SpanId made = spans_.create();
  Span& old = spans_[id];
  Span& part = spans_[made];
  const bool is_left_smaller = where - old.begin < old.end() - where;
  if (is_left_smaller) {
    part.begin = old.begin;
    part.size = where - old.begin;
    old.size -= part.size;
    old.begin = where;
    part.previous = old.previous;
    part.next = id;
    if (part.previous != kNoId) spans_[part.previous].next = made;
    if (first_ == id) first_ = made;
    old.previous = made;
  } else {
    part.begin = where;
    part.size = old.end() - where;
    old.size -= part.size;
    part.next = old.next;
    part.previous = id;
    if (part.next != kNoId) spans_[part.next].previous = made;
    old.next = made;
  }
  part.state = old.state;
  copy_tags(old, part);
  if (part.state == SpanState::kUsed || part.state == SpanState::kFree) note_chunks(made);
  return is_left_smaller ? std::pair{made, id} : std::pair{id, made};
}

SpanId Arena::join(SpanId left, SpanId right) {
  Span& low = spans_[left];
  Span& high = spans_[right];
  assert(low.next == right && low.state == high.state);
  const SpanId kept = low.size >= high.size ? left : right;
  const SpanId gone = kept == left ? right : left;
  unite_tags(spans_[kept], spans_[gone]);
  if (low.state == SpanState::kUsed || low.state == SpanState::kFree) {
    chunks_.for_each_beginning_in(spans_[gone].begin, spans_[gone].end(),
                                  [&](ChunkId chunk) { chunks_[chunk].span_at_begin = kept; });
  }
  if (kept == left) {
    low.next = high.next;
    if (low.next != kNoId) spans_[low.next].previous = left;
    low.size += high.size;
  } else {
    high.previous = low.previous;
    if (high.previous != kNoId) spans_[high.previous].next = right;
    if (first_ == left) first_ = right;
    high.begin = low.begin;
    high.size += low.size;
  }
  spans_.destroy(gone);
  return kept;
}

void Arena::make_free(SpanId id) {
  Span& span = spans_[id];
  span.state = SpanState::kFree;
  free_bytes_ += span.size;
  ++extent_count_;
  index_of(span).insert(spans_, id);
}

void Arena::unlist(SpanId id) {
  Span& span = spans_[id];
  index_of(span).erase(spans_, id);
  free_bytes_ -= span.size;
  --extent_count_;
  span.left = kNoId;
  span.right = kNoId;
}

// --- take and give back
// ----------------------------------------------------------------------------

// Which end to cut from: the one that leaves more whole free chunks, since only they can be
// stitched; where neither does better, small blocks go high and large ones low.
bool Arena::fits_low(const Span& extent, Bytes size) const {
  const Address cut_low = extent.begin + size;
  const Address cut_high = extent.end() - size;
  const Address first = chunks_.round_up(extent.begin);
  const Address last = chunks_.round_down(extent.end());
  const auto whole = [](Address from, Address to) { return from < to ? to - from : Bytes{}; };
  if (first < last) {
    const Bytes after_low = whole(chunks_.round_up(cut_low), last);
    const Bytes after_high = whole(first, chunks_.round_down(cut_high));
    if (after_low != after_high) return after_low > after_high;
  }
  return size > kSmallBlock;
}

SpanId Arena::take(SpanId extent, Bytes size) {
  const Span& span = spans_[extent];
  if (span.size == size || fits_low(span, size)) return take_at(extent, span.begin, size);
  return take_at(extent, span.end() - size, size);
}

SpanId Arena::take_at(SpanId extent, Address begin, Bytes size) {
  unlist(extent);
  SpanId used = extent;
  if (spans_[used].begin < begin) {
    const auto [rest, taken] = split(used, begin);
    make_free(rest);
    used = taken;
  }
  if (spans_[used].size > size) {
    const auto [taken, rest] = split(used, begin + size);
    make_free(rest);
    used = taken;
  }
  clear_tags(spans_[used]);
  spans_[used].state = SpanState::kUsed;
  return used;
}

// Takes a free neighbour in, unless their tags keep them apart. Returns what the span is called
// now.
SpanId Arena::absorb(SpanId id, SpanId neighbour) {
  if (neighbour == kNoId || spans_[neighbour].state != SpanState::kFree) return id;
  if (!may_merge(spans_[id], spans_[neighbour])) {
    has_separated_ = true;
    return id;
  }
  unlist(neighbour);
  const bool is_next = spans_[id].next == neighbour;
  return is_next ? join(id, neighbour) : join(neighbour, id);
}

void Arena::give_back(SpanId used, const TagSet& tags) {
  Span& span = spans_[used];
  set_tags(span, tags);
  span.state = SpanState::kFree;
  SpanId id = absorb(used, span.next);
  id = absorb(id, spans_[id].previous);
  make_free(id);
}

SpanId Arena::give_back_end(SpanId used, Bytes kept) {
  if (spans_[used].size == kept) return used;
  const auto [start, end] = split(used, spans_[used].begin + kept);
  give_back(end, TagSet{});
  return start;
}

bool Arena::merge_neighbours(Merging merging) {
  if (!has_separated_) return false;
  has_separated_ = false;
  has_dropped_tags_ = false;
  bool has_merged = false;
  std::vector<SpanId> extents = largest(kBlockUnit, SIZE_MAX, kAnyStream);
  std::sort(extents.begin(), extents.end(),
            [this](SpanId a, SpanId b) { return spans_[a].begin < spans_[b].begin; });
  SpanId left = kNoId;
  for (const SpanId right : extents) {
    if (left == kNoId || spans_[left].next != right) {
      left = right;
      continue;
    }
    TagSet united = tags_of(left);
    united.add(tags_of(right));
    const bool is_allowed = merging == Merging::kAll && united.size() <= kMergedStreams;
    if (!is_allowed && !may_merge(spans_[left], spans_[right])) {
      left = right;
      continue;
    }
    unlist(left);
    unlist(right);
    left = join(left, right);
    make_free(left);
    has_merged = true;
  }
  return has_merged;
}

// --- map and unmap
// ---------------------------------------------------------------------------------

SpanId Arena::gap_for(Bytes size) const {
  const auto found = std::find_if(gaps_.begin(), gaps_.end(),
                                  [&](SpanId gap) { return spans_[gap].size >= size; });
  return found == gaps_.end() ? kNoId : *found;
}

SpanId Arena::begin_building(SpanId gap, Bytes size) {
  const auto at = std::find(gaps_.begin(), gaps_.end(), gap);
  SpanId building = gap;
  if (spans_[gap].size > size) {
    const auto [first, rest] = split(gap, spans_[gap].begin + size);
    *at = rest;
    building = first;
  } else {
    gaps_.erase(at);
  }
  spans_[building].state = SpanState::kBuilding;
  return building;
}

SpanId Arena::begin_removing(ChunkId chunk) {
  const Chunk& c = chunks_[chunk];
  const SpanId span = take_at(c.span_at_begin, c.begin, c.size);
  spans_[span].state = SpanState::kBuilding;
  return span;
}

void Arena::finish_mapped(SpanId building, const std::vector<MappedChunk>& chunks) {
  Address at = spans_[building].begin;
  for (const MappedChunk& chunk : chunks) {
    chunks_.add(at, chunk.size, chunk.handle);
    at = at + chunk.size;
  }
  spans_[building].state = SpanState::kUsed;
  note_chunks(building);
}

void Arena::finish_unmapped(SpanId building) {
  const Span& span = spans_[building];
  std::vector<ChunkId> gone;
  if (chunks_.find(span.begin) != kNoId) {
    chunks_.for_each_beginning_in(span.begin, span.end(),
                                  [&](ChunkId chunk) { gone.push_back(chunk); });
  }
  for (const ChunkId chunk : gone) chunks_.remove(chunk);
  spans_[building].state = SpanState::kUnmapped;
  merge_unmapped(building);
}

void Arena::cancel_removing(SpanId building) {
  spans_[building].state = SpanState::kUsed;
  note_chunks(building);
  give_back(building, TagSet{});
}

void Arena::merge_unmapped(SpanId id) {
  const auto absorb = [&](SpanId neighbour) {
    if (neighbour == kNoId || spans_[neighbour].state != SpanState::kUnmapped) return;
    std::erase(gaps_, neighbour);
    id = spans_[id].next == neighbour ? join(id, neighbour) : join(neighbour, id);
  };
  absorb(spans_[id].next);
  absorb(spans_[id].previous);
  const auto after = std::find_if(gaps_.begin(), gaps_.end(),
                                  [&](SpanId gap) { return spans_[id].begin < spans_[gap].begin; });
  gaps_.insert(after, id);
}

}  // namespace vramx
