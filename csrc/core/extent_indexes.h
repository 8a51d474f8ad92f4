// The extents by size: one index for each zone of the arena and each stream that extents wait for,
// one of each zone for those that wait for nothing, and one for those that wait for several.
//
// Zones keep small blocks from pinning large chunks:
//
//   base                boundary                                             end
//   |  small chunks, small blocks first  |  large chunks, all other blocks    |
//
// It is no wall: where a zone has no room a request looks in the other. Not thread-safe: the arena
// owns the spans. Find, insert and erase are O(log extents).
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "core/free_index.h"
#include "core/span_pool.h"
#include "core/types.h"

namespace vramx {

enum class Zone : std::uint8_t { kSmall, kLarge };
constexpr std::size_t kZones = 2;

class ExtentIndexes {
 public:
  explicit ExtentIndexes(Address boundary) : boundary_(boundary) {}

  Zone zone_of(Address address) const { return address < boundary_ ? Zone::kSmall : Zone::kLarge; }

  // The index that the extent belongs into, or, where it is in one, that it is in.
  FreeIndex& of(const Span& extent) {
    if (extent.free.tag_set != kNoId) return mixed_;
    const std::size_t zone = static_cast<std::size_t>(zone_of(extent.begin));
    if (extent.free.tag_stream == kNoId) return clean_[zone];
    const StreamIndex stream = extent.free.tag_stream;
    const bool is_known = stream < streams_.size() && streams_[stream];
    return (is_known ? *streams_[stream] : make(stream))[zone];
  }

  // Of the extents that wait for nothing or for `stream` alone: the best fit, and the largest; of
  // equals the lowest.
  SpanId best_fit(const SpanPool& spans, Zone zone, Bytes size, StreamIndex stream) const {
    const FreeIndex& clean = clean_[static_cast<std::size_t>(zone)];
    const SpanId fit = clean.count() != 0 ? clean.best_fit(spans, size) : kNoId;
    if (stream >= streams_.size() || !streams_[stream]) return fit;
    const FreeIndex& own = (*streams_[stream])[static_cast<std::size_t>(zone)];
    return own.count() != 0 ? smaller(spans, fit, own.best_fit(spans, size)) : fit;
  }
  SpanId largest(const SpanPool& spans, Zone zone, StreamIndex stream) const;

  // The better fit of two: the smaller or, of equals, the lower; kNoId is none.
  static SpanId smaller(const SpanPool& spans, SpanId a, SpanId b) {
    if (a == kNoId || b == kNoId) return a == kNoId ? b : a;
    const Span& left = spans[a];
    const Span& right = spans[b];
    if (left.size != right.size) return left.size < right.size ? a : b;
    return left.begin < right.begin ? a : b;
  }

  static constexpr StreamIndex kAnyStream = kNoId - 1;
  // Calls visit(index) for all, or those of one stream and of none.
  template <class Visit>
  void for_each(StreamIndex stream, Visit visit) const {
    for (const FreeIndex& index : clean_) visit(index);
    for (StreamIndex each = 0; each < streams_.size(); ++each) {
      if (!streams_[each] || (stream != kAnyStream && stream != each)) continue;
      for (const FreeIndex& index : *streams_[each]) visit(index);
    }
    if (stream == kAnyStream) visit(mixed_);
  }
  // Calls visit(id) for each extent that waits for a stream of which has_news(stream).
  template <class HasNews, class Visit>
  void for_each_waiting(const SpanPool& spans, HasNews has_news, Visit visit) const {
    const auto all = [&](SpanId id) {
      visit(id);
      return true;
    };
    for (StreamIndex stream = 0; stream < streams_.size(); ++stream) {
      if (!streams_[stream] || !has_news(stream)) continue;
      for (const FreeIndex& index : *streams_[stream]) {
        index.for_each_from_largest(spans, kBlockUnit, all);
      }
    }
    mixed_.for_each_from_largest(spans, kBlockUnit, all);
  }

  std::size_t host_bytes() const {
    std::size_t count = 0;
    for_each(kAnyStream, [&](const FreeIndex&) { ++count; });
    return count * sizeof(FreeIndex);
  }

 private:
  using Pair = std::array<FreeIndex, kZones>;
  Pair& make(StreamIndex stream);

  const Address boundary_;
  Pair clean_;
  FreeIndex mixed_;
  std::vector<std::unique_ptr<Pair>> streams_;
};

}  // namespace vramx
