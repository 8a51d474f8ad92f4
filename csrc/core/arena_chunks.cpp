// The part of Arena that deals in chunks: how much of one is free, and how a range of addresses
// gets memory behind it or loses it again.
#include <algorithm>

#include "core/arena.h"
#include "core/make_room.h"

namespace vramx {

bool Arena::is_whole_free(ChunkId chunk) const { return free_prefix(chunk) == chunks_[chunk].size; }

Bytes Arena::free_prefix(ChunkId chunk) const {
  const Chunk& c = chunks_[chunk];
  Address end = c.begin;
  for (SpanId id = span_of_page(c.begin); end < c.end() && is_extent(id); id = spans_[id].next) {
    end = spans_[id].end();
  }
  return min(end - c.begin, c.size);
}

Bytes Arena::free_suffix(ChunkId chunk) const {
  const Chunk& c = chunks_[chunk];
  SpanId id = kNoId;
  if (chunks_.find(c.end()) != kNoId) {
    id = span_of_page(c.end());
    if (spans_[id].begin >= c.end()) id = spans_[id].previous;
  } else {
    id = span_at(c.end() - kBlockUnit);
  }
  Address begin = c.end();
  for (; c.begin < begin && is_extent(id); id = spans_[id].previous) begin = spans_[id].begin;
  return min(c.end() - begin, c.size);
}

SpanId Arena::gap_for(Zone zone, Bytes size) const {
  const auto found = std::find_if(gaps_.begin(), gaps_.end(), [&](SpanId gap) {
    return spans_[gap].size >= size && zone_of(spans_[gap].begin) == zone;
  });
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

// What lies side by side in the chunk, all of it over, becomes one span.
SpanId Arena::begin_removing(ChunkId chunk) {
  const Chunk& c = chunks_[chunk];
  SpanId whole = kNoId;
  for (Address at = c.begin; at < c.end();) {
    const SpanId extent = span_at(at);
    const Address end = std::min(c.end(), spans_[extent].end());
    const SpanId part = take_at(extent, at, end - at);
    whole = whole == kNoId ? part : join(whole, part);
    at = end;
  }
  spans_[whole].state = SpanState::kBuilding;
  return whole;
}

void Arena::finish_mapped(SpanId building, const std::vector<MappedChunk>& chunks) {
  Address at = spans_[building].begin;
  for (const MappedChunk& chunk : chunks) {
    chunks_.add(at, chunk.size, chunk.handle);
    at = at + chunk.size;
  }
  const std::size_t pages = chunks_.page_from(at);
  make_room(page_spans_, pages);
  if (page_spans_.size() < pages) page_spans_.resize(pages, kNoId);
  std::construct_at(&spans_[building].used);
  spans_[building].state = SpanState::kUsed;
  note_pages(building);
}

void Arena::finish_unmapped(SpanId building) {
  const Span& span = spans_[building];
  std::vector<ChunkId> gone;
  if (chunks_.find(span.begin) != kNoId) {
    chunks_.for_each_beginning_in(span.begin, span.end(),
                                  [&](ChunkId chunk) { gone.push_back(chunk); });
  }
  for (const ChunkId chunk : gone) chunks_.remove(chunk);
  if (!gone.empty()) note_pages(kNoId, span.begin, span.end());
  spans_[building].state = SpanState::kUnmapped;
  merge_unmapped(building);
}

void Arena::cancel_removing(SpanId building) {
  spans_[building].state = SpanState::kUsed;
  note_pages(building);
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
