// Arena::check(): the equations span 1-5 of types.h, recomputed from the span list alone.
#include <algorithm>
#include <string>

#include "core/arena.h"

namespace vramx {
namespace {

std::string at(const Span& span) {
  return " at offset " + std::to_string(span.begin.value) + ", " + std::to_string(span.size.count) +
         " bytes";
}

}  // namespace

bool Arena::is_found_by_its_pages(SpanId id) const {
  const Span& span = spans_[id];
  const std::size_t last = chunks_.page_from(span.end());
  for (std::size_t page = chunks_.page_from(span.begin); page < last; ++page) {
    if (page >= page_spans_.size() || page_spans_[page] != id) return false;
  }
  return span_at(span.begin) == id;
}

bool Arena::has_pages(const Span& span) const {
  const std::size_t last = std::min(chunks_.page_from(span.end()), page_spans_.size());
  for (std::size_t page = chunks_.page_from(span.begin); page < last; ++page) {
    if (page_spans_[page] != kNoId) return true;
  }
  return false;
}

std::string Arena::check_span(SpanId id, Address expected) const {
  const Span& span = spans_[id];
  if (span.begin != expected || !span.size) return "span 1: does not tile" + at(span);
  const bool is_mapped = span.state == SpanState::kUsed || span.state == SpanState::kFree;
  if (is_mapped && chunks_.find(span.begin) == kNoId) return "span 2: on no chunk" + at(span);
  if (is_mapped && !is_found_by_its_pages(id)) return "span 2: not found by its pages" + at(span);
  if (span.state == SpanState::kUnmapped && chunks_.find(span.begin) != kNoId) {
    return "span 2: unmapped, but on a chunk" + at(span);
  }
  if (span.state == SpanState::kUnmapped && has_pages(span)) {
    return "span 2: unmapped, but a page leads to a span" + at(span);
  }
  if (span.next == kNoId) return id == last_ ? "" : "span 1: another span is last" + at(span);
  const Span& next = spans_[span.next];
  if (next.previous != id) return "span 1: links disagree" + at(span);
  if (span.state != next.state) return {};
  if (span.state == SpanState::kUnmapped) return "span 3: unmapped neighbours" + at(span);
  if (span.state == SpanState::kFree && tags_.are_alike(span.free, next.free)) {
    return "span 3: free neighbours" + at(span);
  }
  return {};
}

std::string Arena::check_indexes() const {
  std::string broken;
  std::size_t counted = 0;
  indexes_.for_each(ExtentIndexes::kAnyStream, [&](const FreeIndex& index) {
    counted += index.count();
    if (broken.empty()) broken = index.check(spans_);
  });
  if (!broken.empty()) return broken;
  std::size_t free_spans = 0;
  Bytes free_sum{};
  for (SpanId id = first_; id != kNoId; id = spans_[id].next) {
    if (spans_[id].state != SpanState::kFree) continue;
    ++free_spans;
    free_sum += spans_[id].size;
  }
  if (free_spans != counted) return "span 5: extents in the indexes " + std::to_string(counted);
  if (free_sum != free_bytes_) return "span 5: free bytes " + std::to_string(free_bytes_.count);
  return {};
}

std::string Arena::check() const {
  Address expected = base_;
  Bytes mapped{};
  std::size_t seen = 0;
  for (SpanId id = first_; id != kNoId; id = spans_[id].next, ++seen) {
    if (std::string broken = check_span(id, expected); !broken.empty()) return broken;
    const Span& span = spans_[id];
    expected = span.end();
    const bool is_mapped = span.state == SpanState::kUsed || span.state == SpanState::kFree;
    if (is_mapped) mapped += span.size;
    if (span.state == SpanState::kBuilding && chunks_.find(span.begin) != kNoId)
      mapped += span.size;
  }
  if (expected != base_ + size_) return "span 1: the last span ends early";
  if (seen != spans_.live()) return "span 1: a span is in no list";
  if (mapped != chunks_.bytes()) return "span 4: mapped bytes " + std::to_string(mapped.count);
  if (std::string broken = chunks_.check(); !broken.empty()) return broken;
  return check_indexes();
}

}  // namespace vramx
