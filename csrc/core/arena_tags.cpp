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

// The extents that wait for something.
std::vector<SpanId> Arena::tagged() const {
  std::vector<SpanId> found;
  for_each_index(kAnyStream, [&](const FreeIndex& index) {
    if (&index == &clean_) return;
    index.for_each_from_largest(spans_, kBlockUnit, [&](SpanId id) {
      found.push_back(id);
      return true;
    });
  });
  return found;
}

bool Arena::differ_in_streams(const FreeSpan& a, const FreeSpan& b) const {
  if (a.tag_set == kNoId || b.tag_set == kNoId) {
    return (a.tag_set == kNoId ? a : b).tag_stream != kNoId;
  }
  return !tag_sets_[a.tag_set].has_streams_of(tag_sets_[b.tag_set]);
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
    if (!is_allowed && !may_merge(spans_[left].free, spans_[right].free)) {
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

}  // namespace vramx
