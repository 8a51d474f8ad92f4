// The canonical address space of one device: spans in address order, the chunks under them, and
// the extents by size. Every byte of it is in exactly one span.
//
//   base                                                                        base + size
//   | used | free  |    used    | free |  building  |          unmapped           |
//
// Pure bookkeeping: it makes no driver call and knows neither blocks nor streams' order; what an
// extent must wait for is an opaque TagSet to it. Extents whose tags name different streams stay
// apart until merge_neighbours(), so that a stream's own memory is not tied to another's for
// nothing. Not thread-safe: the device allocator holds the lock. Take and give back are
// O(log extents), plus a word for each page that begins inside the range.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/chunk_table.h"
#include "core/free_index.h"
#include "core/span_pool.h"
#include "core/types.h"

namespace vramx {

class Arena {
 public:
  Arena(Address base, Bytes size, Bytes granularity);

  // --- find: kNoId where there is none ----------------------------------------------------------
  // The best fit among extents that carry no tag or tags of `stream` alone.
  SpanId best_fit(Bytes size, StreamIndex stream) const;
  // The largest of those, and of equals the lowest.
  SpanId largest_extent(StreamIndex stream) const;
  // The best fit among all extents.
  SpanId best_fit_of_any(Bytes size) const;
  // What a stitch can be made of: the extents of at least `smallest` bytes in which a chunk begins
  // or ends, largest first, at most `count`; of every stream, or of the one and of none.
  std::vector<Piece> stitchable(Bytes smallest, std::size_t count, StreamIndex stream) const;
  // Calls visit(id) for every extent of every stream, or of the one and of none, in no order.
  template <class Visit>
  void for_each_extent(StreamIndex stream, Visit visit) const;
  static constexpr StreamIndex kAnyStream = kNoId - 1;

  // --- take and give back -----------------------------------------------------------------------
  // Cuts `size` bytes off the extent, at the end where whole chunks are spared, and returns them as
  // a used span.
  SpanId take(SpanId extent, Bytes size);
  // The same for the bytes from `begin` on, anywhere inside the extent.
  SpanId take_at(SpanId extent, Address begin, Bytes size);
  // Frees a used span and merges it with its neighbours.
  void give_back(SpanId used, const TagSet& tags);
  void give_back(SpanId used, Tag tag);
  // Frees what a used span that waits for nothing has beyond its first `kept` bytes, and returns
  // the span of those.
  SpanId give_back_end(SpanId used, Bytes kept);
  TagSet tags_of(SpanId extent) const { return tags_of(spans_[extent].free); }
  // Whether it carries no tag or one of `stream` alone.
  bool is_own(SpanId extent, StreamIndex stream) const {
    const FreeSpan& free = spans_[extent].free;
    return free.tag_set == kNoId && (free.tag_stream == stream || free.tag_stream == kNoId);
  }
  // Merges neighbours that were kept apart: all of them, or those whose tags no longer differ
  // (memory that waits for two streams is nobody's own). False where there were none.
  enum class Merging : std::uint8_t { kAlike, kAll };
  bool merge_neighbours(Merging merging);
  // Drops from every extent the tags for which `is_done(tag)`; there are none but of the streams
  // for which `has_done(stream)`.
  template <class HasDone, class IsDone>
  void drop_tags(HasDone has_done, IsDone is_done);
  // The same, and merges neighbours whose tags no longer differ: looks at no others, unless tags
  // were dropped without a merge before.
  template <class HasDone, class IsDone>
  void drop_tags_and_merge(HasDone has_done, IsDone is_done);

  // --- map and unmap ----------------------------------------------------------------------------
  // Where growth by `size` bytes could go: the lowest unmapped span that has room for them.
  SpanId gap_for(Bytes size) const;
  // Turns the first `size` bytes of a gap, or a wholly free chunk, into a span that is being built.
  SpanId begin_building(SpanId gap, Bytes size);
  SpanId begin_removing(ChunkId chunk);
  // The span now lies on these chunks, in order, and is used; or it lies on nothing again.
  void finish_mapped(SpanId building, const std::vector<MappedChunk>& chunks);
  void finish_unmapped(SpanId building);
  // The chunk stays after all: its span is free again.
  void cancel_removing(SpanId building);

  // --- look -------------------------------------------------------------------------------------
  const Span& span(SpanId id) const { return spans_[id]; }
  // What the owner of a used span keeps there; blank when it was taken.
  UsedSpan& used(SpanId id) { return spans_[id].used; }
  const UsedSpan& used(SpanId id) const { return spans_[id].used; }
  SpanId first() const { return first_; }
  // The span that holds a mapped address.
  SpanId span_at(Address address) const;
  // The extent that holds all of [begin, begin + size), or kNoId; also where that would be long to
  // find, behind many small spans of one page. `begin` need not be mapped.
  SpanId extent_over(Address begin, Bytes size) const {
    const SpanId id = extent_at(begin);
    return id != kNoId && begin + size <= spans_[id].end() ? id : kNoId;
  }
  // Adds the tags of the extents that hold [begin, begin + size) together. False, with some of them
  // added, where a part is not free, or where that would be long to find.
  bool add_tags_over(Address begin, Bytes size, TagSet* tags) const;
  // Whether the first byte of a chunk is free.
  bool is_free_at(Address chunk_begin) const {
    return spans_[span_of_page(chunk_begin)].state == SpanState::kFree;
  }
  bool is_whole_free(ChunkId chunk) const;
  // Free bytes at a chunk's start, and at its end.
  Bytes free_prefix(ChunkId chunk) const;
  Bytes free_suffix(ChunkId chunk) const;

  ChunkTable& chunks() { return chunks_; }
  const ChunkTable& chunks() const { return chunks_; }

  Bytes mapped_bytes() const { return chunks_.bytes(); }
  Bytes free_bytes() const { return free_bytes_; }
  std::size_t extent_count() const { return extent_count_; }
  std::size_t span_count() const { return spans_.live(); }
  bool contains(Address address) const { return address >= base_ && address < base_ + size_; }
  std::size_t host_bytes() const;

  // Recomputes span 1-5 of types.h and names the first equation that does not hold.
  std::string check() const;

 private:
  FreeIndex& index_of(const FreeSpan& extent);
  FreeIndex& index_with(const FreeSpan& extent);
  FreeIndex& make_index_of(StreamIndex stream);
  TagSet tags_of(const FreeSpan& extent) const;
  // Of an extent that has no tag; the second, of one that loses them all.
  void set_tags(FreeSpan& extent, const TagSet& tags);
  void drop_tag_set(const FreeSpan& extent);
  void unite_tags(FreeSpan& kept, const FreeSpan& gone);
  // Merging ties the memory of one stream to others': at most to this many.
  static constexpr std::size_t kMergedStreams = 4;
  bool may_merge(const FreeSpan& a, const FreeSpan& b) const;
  bool may_unite(SpanId a, SpanId b) const;
  bool merge_run(SpanId left, Merging merging);
  bool is_extent(SpanId id) const { return id != kNoId && spans_[id].state == SpanState::kFree; }

  template <class IsDone>
  bool drop_tags_of(SpanId id, IsDone is_done);
  void merge_around_dropped();
  bool differ_in_streams(const FreeSpan& a, const FreeSpan& b) const;
  void unite_tag_sets(FreeSpan& kept, const FreeSpan& gone);
  SpanId smaller(SpanId a, SpanId b) const;

  // Into the index that its tags lead to, and out of it.
  void list(SpanId id);
  void unlist(SpanId id);
  void list_rest(SpanId id, const Tag& tag, std::uint32_t tag_set, FreeIndex& index);
  void merge_and_list(SpanId id);
  SpanId absorb(SpanId id, SpanId neighbour);
  SpanId join_extents(SpanId left, SpanId right);
  // Cuts a span that is in no index in two; the smaller part gets a new id, and of what the span
  // has by state nothing. Returns {left, right}.
  std::pair<SpanId, SpanId> split(SpanId id, Address where);
  // Joins two neighbours of one state that are in no index; the larger keeps its id.
  SpanId join(SpanId left, SpanId right);
  void link(SpanId left, SpanId right);
  SpanId extent_at(Address address) const;
  SpanId span_of_page(Address address) const { return page_spans_[chunks_.page_of(address)]; }
  void note_pages(SpanId id, Address begin, Address end);
  void note_pages(SpanId id) { note_pages(id, spans_[id].begin, spans_[id].end()); }
  static constexpr int kMostSteps = 32;
  bool fits_low(const Span& extent, Bytes size) const;
  void merge_unmapped(SpanId id);
  template <class Visit>
  void for_each_index(StreamIndex stream, Visit visit) const;
  bool is_found_by_its_pages(SpanId id) const;
  bool has_pages(const Span& span) const;
  std::string check_span(SpanId id, Address expected) const;
  std::string check_indexes() const;

  const Address base_;
  const Bytes size_;
  SpanPool spans_;
  ChunkTable chunks_;
  std::vector<SpanId> page_spans_;  // by page: the span that holds its first byte, if any is mapped
  SpanId first_ = kNoId;
  std::vector<SpanId> gaps_;  // the unmapped spans, in address order; one or a few

  FreeIndex clean_;                                  // extents without a tag
  FreeIndex mixed_;                                  // with tags of several streams
  std::vector<std::unique_ptr<FreeIndex>> streams_;  // with a tag of one stream
  std::vector<TagSet> tag_sets_;                     // of the extents in mixed_
  std::vector<std::uint32_t> vacant_tag_sets_;
  std::size_t extent_count_ = 0;
  Bytes free_bytes_{};
  std::vector<SpanId> dropped_;  // the extents that lost tags at the last drop_tags()
  // Since all were merged some neighbours were kept apart; and some, by losing tags, no longer need
  // be.
  bool has_separated_ = false;
  bool has_dropped_tags_ = false;
};

// Inline: what every take and give back goes through. Nearly always there is one tag or none; all
// bits of two numbers and-ed are set only where both are kNoId.

inline FreeIndex& Arena::index_of(const FreeSpan& extent) {
  if (extent.tag_set != kNoId) return mixed_;
  if (extent.tag_stream == kNoId) return clean_;
  const bool is_known = extent.tag_stream < streams_.size() && streams_[extent.tag_stream];
  return is_known ? *streams_[extent.tag_stream] : make_index_of(extent.tag_stream);
}

// The one that it is in.
inline FreeIndex& Arena::index_with(const FreeSpan& extent) {
  if (extent.tag_set != kNoId) return mixed_;
  return extent.tag_stream == kNoId ? clean_ : *streams_[extent.tag_stream];
}

inline void Arena::drop_tag_set(const FreeSpan& extent) {
  if (extent.tag_set != kNoId) vacant_tag_sets_.push_back(extent.tag_set);
}

// Memory that waits for nothing merges with anything; else the streams must be the same.
inline bool Arena::may_merge(const FreeSpan& a, const FreeSpan& b) const {
  if ((a.tag_set & b.tag_set) != kNoId) return !differ_in_streams(a, b);
  return a.tag_stream == b.tag_stream || a.tag_stream == kNoId || b.tag_stream == kNoId;
}

// The kept span gets the tags of both.
inline void Arena::unite_tags(FreeSpan& kept, const FreeSpan& gone) {
  const bool is_one =
      kept.tag_stream == gone.tag_stream || kept.tag_stream == kNoId || gone.tag_stream == kNoId;
  if ((kept.tag_set & gone.tag_set) != kNoId || !is_one) return unite_tag_sets(kept, gone);
  if (kept.tag_stream == kNoId) kept.tag_stream = gone.tag_stream;
  if (kept.tag_sequence < gone.tag_sequence) kept.tag_sequence = gone.tag_sequence;
}

template <class Visit>
void Arena::for_each_index(StreamIndex stream, Visit visit) const {
  visit(clean_);
  if (stream != kAnyStream) {
    if (stream < streams_.size() && streams_[stream]) visit(*streams_[stream]);
    return;
  }
  for (const auto& index : streams_) {
    if (index) visit(*index);
  }
  visit(mixed_);
}

template <class Visit>
void Arena::for_each_extent(StreamIndex stream, Visit visit) const {
  for_each_index(stream, [&](const FreeIndex& index) {
    index.for_each_from_largest(spans_, kBlockUnit, [&](SpanId id) {
      visit(id);
      return true;
    });
  });
}

template <class HasDone, class IsDone>
void Arena::drop_tags(HasDone has_done, IsDone is_done) {
  dropped_.clear();
  const auto note = [this](SpanId id) {
    dropped_.push_back(id);
    return true;
  };
  for (StreamIndex stream = 0; stream < streams_.size(); ++stream) {
    if (!streams_[stream] || !has_done(stream)) continue;
    streams_[stream]->for_each_from_largest(spans_, kBlockUnit, note);
  }
  mixed_.for_each_from_largest(spans_, kBlockUnit, note);
  std::erase_if(dropped_, [&](SpanId id) { return !drop_tags_of(id, is_done); });
  has_dropped_tags_ = has_dropped_tags_ || !dropped_.empty();
}

// False where it keeps them all.
template <class IsDone>
bool Arena::drop_tags_of(SpanId id, IsDone is_done) {
  FreeSpan& extent = spans_[id].free;
  if (extent.tag_set == kNoId) {
    if (!is_done(Tag{extent.tag_stream, extent.tag_sequence})) return false;
    index_with(extent).erase(spans_, id);
    extent.tag_stream = kNoId;
    extent.tag_sequence = 0;
    clean_.insert(spans_, id);
    return true;
  }
  TagSet tags = tag_sets_[extent.tag_set];
  if (!tags.drop(is_done)) return false;
  unlist(id);
  drop_tag_set(extent);
  extent = FreeSpan{};
  set_tags(extent, tags);
  list(id);
  return true;
}

template <class HasDone, class IsDone>
void Arena::drop_tags_and_merge(HasDone has_done, IsDone is_done) {
  const bool are_others_merged = !has_dropped_tags_;
  drop_tags(has_done, is_done);
  if (are_others_merged) {
    merge_around_dropped();
  } else {
    merge_neighbours(Merging::kAlike);
  }
}

}  // namespace vramx
