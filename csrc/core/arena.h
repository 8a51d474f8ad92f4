// The canonical address space of one device: spans in address order, the chunks under them, and
// the extents by size. Every byte of it is in exactly one span.
//
//   base                                                                        base + size
//   | used | free  |    used    | free |  building  |          unmapped           |
//
// Pure bookkeeping: it makes no driver call and knows neither blocks nor streams' order. Extents
// whose tags are not alike (core/tag_table) stay apart; whoever may take several neighbours at once
// finds them as a run. Not thread-safe: the device allocator holds the lock. Take and give back are
// O(log extents), plus a word for each page that begins inside the range.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "core/chunk_table.h"
#include "core/extent_indexes.h"
#include "core/span_pool.h"
#include "core/tag_table.h"
#include "core/types.h"

namespace vramx {

class Arena {
 public:
  // The first `small_zone` bytes are for small chunks; their last granule is never mapped, so that
  // no extent lies in both zones.
  Arena(Address base, Bytes size, Bytes granularity, Bytes small_zone = {});

  // --- find: kNoId where there is none ----------------------------------------------------------
  // Among the extents that carry no tag or one of `stream` alone.
  SpanId best_fit(Zone zone, Bytes size, StreamIndex stream) const {
    return indexes_.best_fit(spans_, zone, size, stream);
  }
  SpanId largest_extent(Zone zone, StreamIndex stream) const {
    return indexes_.largest(spans_, zone, stream);
  }
  // The smallest run of `size` bytes or more, and of equals the lowest, of extents for which
  // may_take(extent); of none where there is none. Looks at every extent or, as long as there was
  // only one stream, at those that are as large.
  template <class MayTake>
  Piece best_run(Bytes size, MayTake may_take) const;
  // What a stitch can be made of: the runs of at least `smallest` bytes in which a chunk begins or
  // ends, largest first, at most `count`.
  template <class MayTake>
  std::vector<Piece> stitchable(Bytes smallest, std::size_t count, MayTake may_take) const;
  // Calls visit(id) for every extent, in no order.
  template <class Visit>
  void for_each_extent(Visit visit) const;

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

  // --- tags -------------------------------------------------------------------------------------
  TagSet tags_of(SpanId extent) const { return tags_.get(spans_[extent].free); }
  // Whether it carries no tag or one of `stream` alone.
  bool is_own(SpanId extent, StreamIndex stream) const {
    const FreeSpan& free = spans_[extent].free;
    return free.tag_set == kNoId && (free.tag_stream == stream || free.tag_stream == kNoId);
  }
  void note_several_streams() { tags_.note_several(); }
  bool has_several_streams() const { return tags_.has_several(); }
  // Newer memory of a stream stays apart from older while several streams ask for memory.
  bool tells_apart() const { return tags_.is_apart(); }
  void tell_apart() { tags_.tell_apart(); }
  void let_mix();
  // Drops from the extents the tags for which `is_over(tag)`, of which there are none but of the
  // streams for which `has_news(stream)`, and merges neighbours that are alike then.
  template <class HasNews, class IsOver>
  void drop_tags(HasNews has_news, IsOver is_over);

  // --- map and unmap ----------------------------------------------------------------------------
  // Where growth by `size` bytes could go: the lowest unmapped span of the zone with room for them.
  SpanId gap_for(Zone zone, Bytes size) const;
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
  // The extent that holds the address; kNoId also where that would be long to find, behind many
  // small spans of one page. It need not be mapped.
  SpanId extent_at(Address address) const;
  // The extent that holds all of [begin, begin + size), likewise.
  SpanId extent_over(Address begin, Bytes size) const {
    const SpanId id = extent_at(begin);
    return id != kNoId && begin + size <= spans_[id].end() ? id : kNoId;
  }
  // Whether [begin, begin + size) is free and may_take(extent) for each extent in it.
  template <class MayTake>
  bool is_run(Address begin, Bytes size, MayTake may_take) const;
  bool is_extent(SpanId id) const { return id != kNoId && spans_[id].state == SpanState::kFree; }
  // Whether the first byte of a chunk is free.
  bool is_free_at(Address chunk_begin) const {
    return spans_[span_of_page(chunk_begin)].state == SpanState::kFree;
  }
  bool is_whole_free(ChunkId chunk) const;
  // Free bytes at a chunk's start, and at its end, whatever they wait for.
  Bytes free_prefix(ChunkId chunk) const;
  Bytes free_suffix(ChunkId chunk) const;

  ChunkTable& chunks() { return chunks_; }
  const ChunkTable& chunks() const { return chunks_; }

  Zone zone_of(Address address) const { return indexes_.zone_of(address); }
  Bytes mapped_bytes() const { return chunks_.bytes(); }
  Bytes free_bytes() const { return free_bytes_; }
  std::size_t extent_count() const { return extent_count_; }
  std::size_t span_count() const { return spans_.live(); }
  bool contains(Address address) const { return address >= base_ && address < base_ + size_; }
  std::size_t host_bytes() const;

  // Recomputes span 1-5 of types.h and names the first equation that does not hold.
  std::string check() const;

 private:
  bool fits_low(const Span& extent, Bytes size) const;
  // Into the index that its tags lead to, and out of it.
  void list(SpanId id);
  void unlist(SpanId id);
  void list_rest(SpanId id, const Tag& tag, std::uint32_t tag_set, FreeIndex& index);
  void merge_and_list(SpanId id);
  SpanId absorb(SpanId id, SpanId neighbour, Bytes* spare);
  SpanId join_extents(SpanId left, SpanId right);
  template <class IsOver>
  bool drop_tags_of(SpanId id, IsOver is_over);
  void merge_around(std::vector<SpanId> extents);
  // Cuts a span that is in no index in two; the smaller part gets a new id, and of what the span
  // has by state nothing. Returns {left, right}.
  std::pair<SpanId, SpanId> split(SpanId id, Address where);
  // Joins two neighbours of one state that are in no index; the larger keeps its id.
  SpanId join(SpanId left, SpanId right);
  // Where it says which span comes behind this one, and before; kNoId is the end of the addresses.
  SpanId* link_behind(SpanId id) { return id != kNoId ? &spans_[id].next : &first_; }
  SpanId* link_before(SpanId id) { return id != kNoId ? &spans_[id].previous : &last_; }
  SpanId span_of_page(Address address) const { return page_spans_[chunks_.page_of(address)]; }
  void note_pages(SpanId id, Address begin, Address end);
  void note_pages(SpanId id) { note_pages(id, spans_[id].begin, spans_[id].end()); }
  static constexpr int kMostSteps = 32;
  // What a free may tie to itself that was over: a buffer of this size is wanted by another stream.
  static constexpr Bytes kMostTied{16 << 20};
  void merge_unmapped(SpanId id);
  template <class MayTake, class Visit>
  void for_each_run(MayTake may_take, Visit visit) const;
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
  SpanId last_ = kNoId;
  std::vector<SpanId> gaps_;  // the unmapped spans, upwards

  ExtentIndexes indexes_;
  TagTable tags_;
  std::size_t extent_count_ = 0;
  Bytes free_bytes_{};
};

template <class Visit>
void Arena::for_each_extent(Visit visit) const {
  indexes_.for_each(ExtentIndexes::kAnyStream, [&](const FreeIndex& index) {
    index.for_each_from_largest(spans_, kBlockUnit, [&](SpanId id) {
      visit(id);
      return true;
    });
  });
}

// A run is visited once, at its first extent.
template <class MayTake, class Visit>
void Arena::for_each_run(MayTake may_take, Visit visit) const {
  for_each_extent([&](SpanId id) {
    if (!may_take(id)) return;
    const SpanId before = spans_[id].previous;
    if (is_extent(before) && may_take(before)) return;
    Address end = spans_[id].end();
    for (SpanId next = spans_[id].next; is_extent(next) && may_take(next);) {
      end = spans_[next].end();
      next = spans_[next].next;
    }
    visit(Piece{spans_[id].begin, end - spans_[id].begin});
  });
}

template <class MayTake>
Piece Arena::best_run(Bytes size, MayTake may_take) const {
  Piece best{};
  const auto look_at = [&](const Piece& run) {
    if (run.size < size) return;
    const bool is_better =
        !best.size || run.size < best.size || (run.size == best.size && run.begin < best.begin);
    if (is_better) best = run;
  };
  if (tags_.has_several()) {
    for_each_run(may_take, look_at);
    return best;
  }
  indexes_.for_each(ExtentIndexes::kAnyStream, [&](const FreeIndex& index) {
    index.for_each_from_largest(spans_, size, [&](SpanId id) {
      if (may_take(id)) look_at({spans_[id].begin, spans_[id].size});
      return true;
    });
  });
  return best;
}

// As long as there was only one stream a run is one extent, and the largest come first by
// themselves. The first request of another stream, which has no block yet, may not have them all.
template <class MayTake>
std::vector<Piece> Arena::stitchable(Bytes smallest, std::size_t count, MayTake may_take) const {
  std::vector<Piece> found;
  found.reserve(std::min(count, extent_count_));
  if (tags_.has_several()) {
    for_each_run(may_take, [&](const Piece& run) {
      if (run.size >= smallest && chunks_.has_bound_in(run.begin, run.end())) found.push_back(run);
    });
  } else {
    indexes_.for_each(ExtentIndexes::kAnyStream, [&](const FreeIndex& index) {
      const std::size_t had = found.size();
      index.for_each_from_largest(spans_, smallest, [&](SpanId id) {
        const Span& span = spans_[id];
        const bool has_bound = chunks_.has_bound_in(span.begin, span.end());
        if (has_bound && may_take(id)) found.push_back({span.begin, span.size});
        return found.size() - had < count;
      });
    });
  }
  std::sort(found.begin(), found.end(), [](const Piece& a, const Piece& b) {
    return a.size != b.size ? a.size > b.size : a.begin < b.begin;
  });
  if (found.size() > count) found.resize(count);
  return found;
}

template <class MayTake>
bool Arena::is_run(Address begin, Bytes size, MayTake may_take) const {
  SpanId id = extent_at(begin);
  for (int steps = 0; id != kNoId && steps <= kMostSteps; id = spans_[id].next, ++steps) {
    if (!is_extent(id) || !may_take(id)) return false;
    if (begin + size <= spans_[id].end()) return true;
  }
  return false;
}

template <class HasNews, class IsOver>
void Arena::drop_tags(HasNews has_news, IsOver is_over) {
  std::vector<SpanId> dropped;
  indexes_.for_each_waiting(spans_, has_news, [&](SpanId id) { dropped.push_back(id); });
  std::erase_if(dropped, [&](SpanId id) { return !drop_tags_of(id, is_over); });
  merge_around(std::move(dropped));
}

// False where it keeps them all.
template <class IsOver>
bool Arena::drop_tags_of(SpanId id, IsOver is_over) {
  Span& extent = spans_[id];
  TagSet tags = tags_.get(extent.free);
  if (!tags.drop(is_over)) return false;
  unlist(id);
  tags_.clear(extent.free);
  tags_.set(extent.free, tags);
  list(id);
  return true;
}

}  // namespace vramx
