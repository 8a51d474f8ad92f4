#include "core/quick_placement.h"

namespace vramx {
namespace {

// An extent of so many times a block's size, or more, is no good fit: what is left of it would be a
// hole for other sizes.
constexpr std::uint64_t kLoose = 5;

}  // namespace

// Whether the request's counterpart went where memory is free, but not known to be over for this
// stream: it would take the place of another, and so on, until one needs a stitch.
bool QuickPlacement::is_kept_waiting(Bytes size, StreamIndex stream) const {
  if (!state_.arena.tells_apart()) return false;
  const Address place = recurrence_.expect(size, stream);
  const auto is_free = [](SpanId) { return true; };
  return place && state_.arena.is_run(place, size, is_free);
}

// Where the request's counterpart went; no address where that is not to be had at once.
Placement QuickPlacement::take_as_before(Bytes size, StreamIndex stream) {
  const Address place = recurrence_.expect(size, stream);
  if (!place) return {};
  if (place >= state_.grounds.aliases.begin) return take_alias(place, size, stream);
  if (!may_take({place, size}, stream)) return {};
  SpanId last = kNoId;
  return {place, take_run({place, size}, &last), kNoId};
}

Placement QuickPlacement::take_alias(Address place, Bytes size, StreamIndex stream) {
  const AliasFit fit = state_.aliases.at(state_.arena, {place, size});
  if (fit.alias == kNoId) return {};
  for (const Piece& piece : fit.pieces) {
    if (!may_take(piece, stream)) return {};
  }
  state_.aliases.pin(fit.alias, size);
  ++state_.stats.num_alias_hits;
  SpanId last = kNoId;
  const SpanId first = take_run(fit.pieces.front(), &last);
  for (std::size_t i = 1; i < fit.pieces.size(); ++i) take_run(fit.pieces[i], &last);
  return {place, first, fit.alias};
}

bool QuickPlacement::may_take(const Piece& run, StreamIndex stream) const {
  const auto may_take = [&](SpanId id) { return is_at_once(id, stream); };
  return state_.arena.is_run(run.begin, run.size, may_take);
}

// The run's parts, as a chain behind `last`, if there is one. From one extent to the next, for a
// search by address may give up.
SpanId QuickPlacement::take_run(const Piece& run, SpanId* last) {
  SpanId first = kNoId;
  SpanId extent = state_.arena.extent_at(run.begin);
  for (Address at = run.begin; at < run.end();) {
    const Bytes size = min(run.end() - at, state_.arena.span(extent).end() - at);
    const SpanId part = state_.arena.take_at(extent, at, size);
    if (first == kNoId) first = part;
    if (*last != kNoId) state_.arena.used(*last).next = part;
    *last = part;
    at = at + size;
    extent = state_.arena.span(part).next;
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
