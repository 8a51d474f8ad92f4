#include "core/extent_indexes.h"

namespace vramx {

ExtentIndexes::Pair& ExtentIndexes::make(StreamIndex stream) {
  if (stream >= streams_.size()) streams_.resize(stream + 1);
  streams_[stream] = std::make_unique<Pair>();
  return *streams_[stream];
}

SpanId ExtentIndexes::largest(const SpanPool& spans, Zone zone, StreamIndex stream) const {
  const SpanId clean = clean_[static_cast<std::size_t>(zone)].largest(spans);
  const bool has_own = stream < streams_.size() && streams_[stream];
  const SpanId own =
      has_own ? (*streams_[stream])[static_cast<std::size_t>(zone)].largest(spans) : kNoId;
  if (clean == kNoId || own == kNoId) return clean != kNoId ? clean : own;
  if (spans[clean].size == spans[own].size) return smaller(spans, clean, own);
  return spans[clean].size > spans[own].size ? clean : own;
}

}  // namespace vramx
