// The part of Arena that knows what extents wait for: their tags, the index that each tag leads to,
// and which neighbours may be one.
#include <algorithm>

#include "core/arena.h"

namespace vramx {

FreeIndex& Arena::make_index_of(StreamIndex stream) {
  if (stream >= streams_.size()) streams_.resize(stream + 1);
  if (!streams_[stream]) streams_[stream] = std::make_unique<FreeIndex>();
  return *streams_[stream];
}

TagSet Arena::tags_of(const FreeSpan& extent) const {
  if (extent.tag_set != kNoId) return tag_sets_[extent.tag_set];
  return TagSet(Tag{extent.tag_stream, extent.tag_sequence});
}

bool Arena::add_tags_over(Address begin, Bytes size, TagSet* tags) const {
  SpanId id = extent_at(begin);
  for (int steps = 0; id != kNoId && steps <= kMostSteps; id = spans_[id].next, ++steps) {
    if (spans_[id].state != SpanState::kFree) return false;
    tags->add(tags_of(id));
    if (begin + size <= spans_[id].end()) return true;
  }
  return false;
}

void Arena::set_tags(FreeSpan& extent, const TagSet& tags) {
  if (tags.size() == 1) {
    extent.tag_stream = tags[0].stream;
    extent.tag_sequence = tags[0].sequence;
  } else if (tags.size() > 1) {
    if (vacant_tag_sets_.empty()) {
      vacant_tag_sets_.push_back(static_cast<std::uint32_t>(tag_sets_.size()));
      tag_sets_.emplace_back();
    }
    extent.tag_set = vacant_tag_sets_.back();
    vacant_tag_sets_.pop_back();
    tag_sets_[extent.tag_set] = tags;
  }
}

void Arena::unite_tag_sets(FreeSpan& kept, const FreeSpan& gone) {
  TagSet united = tags_of(kept);
  united.add(tags_of(gone));
  drop_tag_set(kept);
  drop_tag_set(gone);
  kept = FreeSpan{};
  set_tags(kept, united);
}

bool Arena::differ_in_streams(const FreeSpan& a, const FreeSpan& b) const {
  if (a.tag_set == kNoId || b.tag_set == kNoId) {
    return (a.tag_set == kNoId ? a : b).tag_stream != kNoId;
  }
  return !tag_sets_[a.tag_set].has_streams_of(tag_sets_[b.tag_set]);
}

// The runs of neighbouring extents have nothing to do with each other, so their order is no matter.
bool Arena::merge_neighbours(Merging merging) {
  const bool is_all = merging == Merging::kAll;
  if (!has_dropped_tags_ && !(is_all && has_separated_)) return false;
  has_dropped_tags_ = false;
  if (is_all) has_separated_ = false;
  std::vector<SpanId> starts;
  for_each_extent(kAnyStream, [&](SpanId id) {
    if (!is_extent(spans_[id].previous) && is_extent(spans_[id].next)) starts.push_back(id);
  });
  bool has_merged = false;
  for (const SpanId start : starts) has_merged = merge_run(start, merging) || has_merged;
  return has_merged;
}

// Only what lost tags may have come to be like its neighbours.
void Arena::merge_around_dropped() {
  has_dropped_tags_ = false;
  std::erase_if(dropped_, [this](SpanId id) {
    return !is_extent(spans_[id].previous) && !is_extent(spans_[id].next);
  });
  for (SpanId& start : dropped_) {
    while (is_extent(spans_[start].previous)) start = spans_[start].previous;
  }
  std::sort(dropped_.begin(), dropped_.end());
  dropped_.erase(std::unique(dropped_.begin(), dropped_.end()), dropped_.end());
  for (const SpanId start : dropped_) merge_run(start, Merging::kAlike);
}

// Merges what may be of the extents from this one on, up to the first span that is no extent.
bool Arena::merge_run(SpanId left, Merging merging) {
  bool has_merged = false;
  for (SpanId right = spans_[left].next; is_extent(right); right = spans_[left].next) {
    if (!may_merge(spans_[left].free, spans_[right].free) &&
        (merging == Merging::kAlike || !may_unite(left, right))) {
      left = right;
      continue;
    }
    unlist(left);
    unlist(right);
    left = join_extents(left, right);
    list(left);
    has_merged = true;
  }
  return has_merged;
}

bool Arena::may_unite(SpanId a, SpanId b) const {
  TagSet united = tags_of(a);
  united.add(tags_of(b));
  return united.size() <= kMergedStreams;
}

}  // namespace vramx
