#include "core/quick_placement.h"

#include <algorithm>

namespace vramx {
namespace {

// An extent of so many times a block's size, or more, is no good fit: what is left of it would be a
// hole for other sizes.
constexpr std::uint64_t kLoose = 5;

}  // namespace

bool QuickPlacement::is_kept_waiting(Bytes size, StreamIndex stream) const {
  if (state_.order.is_single() || !recurrence_.is_running()) return false;
  const Recurrence::Place place = recurrence_.expect(size, stream);
  const auto is_free = [](SpanId) { return true; };
  const auto may_take = [&](SpanId id) { return is_at_once(id, stream); };
  std::vector<Piece> pieces{{place.address, size}};
  if (place.alias != kNoId) pieces = state_.aliases.fit_in(place.alias, state_.arena, size).pieces;
  bool is_waiting = false;
  for (const Piece& piece : pieces) {
    if (!state_.arena.is_run(piece.begin, piece.size, is_free)) return false;
    is_waiting = is_waiting || !state_.arena.is_run(piece.begin, piece.size, may_take);
  }
  return is_waiting;
}

// Where the request's counterpart went; no address where that is not to be had at once.
Placement QuickPlacement::take_as_before(Bytes size, StreamIndex stream) {
  const Recurrence::Place place = recurrence_.expect(size, stream);
  if (place.alias != kNoId) return take_alias(place.alias, size, stream);
  if (!place.address) return {};
  const auto may_take = [&](SpanId id) { return is_at_once(id, stream); };
  if (!state_.arena.is_run(place.address, size, may_take)) return {};
  return {place.address, take_run({place.address, size}), kNoId};
}

// Among many aliases that would do a search may never come to the one that the other requests leave
// free.
Placement QuickPlacement::take_alias(AliasId alias, Bytes size, StreamIndex stream) {
  const AliasFit fit = state_.aliases.fit_in(alias, state_.arena, size);
  if (fit.alias == kNoId) return {};
  const auto may_take = [&](SpanId id) { return is_at_once(id, stream); };
  const bool is_free = std::all_of(fit.pieces.begin(), fit.pieces.end(), [&](const Piece& piece) {
    return state_.arena.is_run(piece.begin, piece.size, may_take);
  });
  if (!is_free) return {};
  state_.aliases.pin(alias, size);
  ++state_.stats.num_alias_hits;
  SpanId first = kNoId;
  SpanId last = kNoId;
  for (const Piece& piece : fit.pieces) {
    const SpanId begin = take_run(piece);
    (first == kNoId ? first : state_.arena.used(last).next) = begin;
    for (last = begin; state_.arena.used(last).next != kNoId;) last = state_.arena.used(last).next;
  }
  return {fit.address, first, alias};
}

// The run's parts, as a chain.
SpanId QuickPlacement::take_run(const Piece& run) {
  SpanId first = kNoId;
  SpanId last = kNoId;
  for (Address at = run.begin; at < run.end();) {
    const SpanId extent = state_.arena.extent_at(at);
    const Bytes size = min(run.end() - at, state_.arena.span(extent).end() - at);
    const SpanId part = state_.arena.take_at(extent, at, size);
    (first == kNoId ? first : state_.arena.used(last).next) = part;
    last = part;
    at = at + size;
  }
  return first;
}

// A large block that stays splits what it is put into for as long as it lives. Where it fits badly
// it goes beside its kin, blocks that live about as long: what comes together mostly goes together,
// and leaves an extent as large as it found. Where its kin have no room, the largest extent takes
// them up.
SpanId QuickPlacement::take_large(SpanId best, Bytes size, StreamIndex stream) {
  if (state_.arena.span(best).size < size * kLoose) return state_.arena.take(best, size);
  const std::uint32_t kin = lifetimes_.kin_of(size);
  if (Lifetimes::is_brief(kin)) return state_.arena.take(best, size);
  SpanId extent = state_.arena.extent_over(kin_ends_[kin], size);
  if (extent == kNoId || !is_at_once(extent, stream)) {
    extent = state_.arena.largest_extent(Zone::kLarge, stream);
  }
  const Address at = state_.arena.span(extent).begin;
  kin_ends_[kin] = at + size;
  return state_.arena.take_at(extent, at, size);
}

}  // namespace vramx
