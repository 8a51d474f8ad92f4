#include "core/planner.h"

#include <algorithm>
#include <limits>

#include "core/chunk_policy.h"

namespace vramx {
namespace {

// Extents below this have no part in a stitch.
constexpr Bytes kSmallestPiece{64 << 10};
// Holes below a unit of growth are few while they are less than this part of memory.
constexpr std::uint64_t kFewHoles = 256;
// A stitch takes what is largest, which is not always best: one that lacks less than this part of
// the block says nothing of what is free in an alias.
constexpr std::uint64_t kNearly = 8;
// Most blocks are put together from the few largest extents. Only where those are not enough are
// many looked at.
constexpr std::size_t kFewExtents = 64;
constexpr std::size_t kManyExtents = 4096;
// Aliases are collected in batches, so that a program that stitches anew for ever searches for them
// now and then.
constexpr std::size_t kBatches = 128;

}  // namespace

bool Planner::may_take(const TagSet& tags, const Request& request) const {
  const bool is_ordered = state_.order.is_ordered(tags, request.stream);
  if (request.reach == Reach::kOwn) {
    return is_ordered && (tags.empty() || tags[0].stream == request.stream);
  }
  if (is_ordered) return true;
  return request.reach == Reach::kBehindWaits && state_.order.has_marks(tags, request.stream);
}

Plan Planner::find(const Request& request) const {
  Plan plan = run(request);
  if (!plan) plan = stitch(request);
  if (!plan) plan = growth(request, Zone::kLarge);
  if (!plan) plan = growth(request, Zone::kSmall);
  add_waits(&plan, request);
  return plan;
}

// --- A ------------------------------------------------------------------------------------------

// A block that its zone would take in a chunk of its own does not go among the large ones.
Plan Planner::run(const Request& request) const {
  const auto may_take = [&](SpanId id) {
    return this->may_take(state_.arena.tags_of(id), request);
  };
  if (request.size <= tiny_size(state_.granularity)) {
    if (Plan plan = tiny(request)) return plan;
  }
  const Piece found = state_.arena.best_run(request.size, may_take);
  if (!found.size) return {};
  return {.pieces = {{found.begin, request.size}}};
}

Plan Planner::tiny(const Request& request) const {
  const auto may_take = [&](SpanId id) {
    return state_.arena.zone_of(state_.arena.span(id).begin) == Zone::kSmall &&
           this->may_take(state_.arena.tags_of(id), request);
  };
  const Piece found = state_.arena.best_run(request.size, may_take);
  if (found.size) return {.pieces = {{found.begin, request.size}}};
  return growth(request, Zone::kSmall);
}

// --- B ------------------------------------------------------------------------------------------

template <class Visit>
void Planner::for_each_extent_in(const Piece& piece, Visit visit) const {
  for (SpanId id = state_.arena.span_at(piece.begin); id != kNoId;
       id = state_.arena.span(id).next) {
    if (state_.arena.span(id).begin >= piece.end()) return;
    visit(id);
  }
}

Plan Planner::alias(const Request& request) const {
  if (state_.arena.free_bytes() < request.size) return {};
  const auto may_take = [&](const std::vector<Piece>& pieces) {
    return std::all_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
      bool is_allowed = true;
      for_each_extent_in(piece, [&](SpanId id) {
        is_allowed = is_allowed && this->may_take(state_.arena.tags_of(id), request);
      });
      return is_allowed;
    });
  };
  AliasFit fit = state_.aliases.find(state_.arena, request.size, may_take);
  if (fit.alias == kNoId) return {};
  return {.pieces = std::move(fit.pieces), .alias = fit.alias, .address = fit.address};
}

// --- C ------------------------------------------------------------------------------------------

// While memory may grow, the rest of a chunk of small blocks stays theirs: else the next of them
// needs a chunk of its own, and the next large block takes the rest of that.
StitchPlan Planner::pieces_for(const Request& request) const {
  const bool may_grow = min(state_.room(), request.most_growth) >= request.size;
  const auto may_take = [&](SpanId id) {
    const Span& extent = state_.arena.span(id);
    const bool is_kept = may_grow && extent.size < state_.granularity &&
                         state_.arena.zone_of(extent.begin) == Zone::kSmall;
    return !is_kept && this->may_take(state_.arena.tags_of(id), request);
  };
  StitchPlan plan;
  for (const std::size_t most : {kFewExtents, kManyExtents}) {
    const std::vector<Piece> runs = state_.arena.stitchable(kSmallestPiece, most, may_take);
    plan = plan_stitch(runs, state_.arena.chunks(), request.size);
    if (!plan.missing || runs.size() < most) break;
  }
  return plan;
}

Bytes Planner::largest_stitch(const Request& request) const {
  return request.size - pieces_for(request).missing;
}

Plan Planner::stitch(const Request& request) const {
  const StitchPlan pieces = pieces_for(request);
  // What is free in an alias is a plan too: where the one that was found lacks much nobody looks.
  if (pieces.missing * kNearly <= request.size) {
    if (Plan plan = alias(request)) return plan;
  }
  if (pieces.missing) {
    // Where a stitch spares nothing, growth alone makes half the mappings.
    Plan alone = growth(request, Zone::kLarge);
    const Bytes missing = round_up(pieces.missing, state_.granularity);
    if (alone && alone.growth.bytes <= missing) return alone;
  }
  return request.may_stitch ? stitch_of(pieces, request) : Plan{};
}

// New chunks fill what the pieces lack. They come before a last one that ends mid-chunk, which then
// gives up what their rounding brings in surplus.
Plan Planner::stitch_of(const StitchPlan& found, const Request& request) const {
  Plan plan;
  plan.pieces = found.pieces;
  plan.makes_alias = true;
  plan.growth_at = plan.pieces.size();
  if (!found.missing) return with_alias_room(std::move(plan));
  const Bytes bytes = round_up(found.missing, state_.granularity);
  plan.growth = growth_by(Zone::kLarge, bytes, request);
  if (!plan.growth) return {};
  plan.of_growth = found.missing;
  if (found.ends_in_tail) {
    Piece& last = plan.pieces.back();
    plan.growth_at -= 1;
    plan.of_growth = min(bytes, found.missing + last.size);
    last.size = found.missing + last.size - plan.of_growth;
    if (!last.size) plan.pieces.pop_back();
  }
  return with_alias_room(std::move(plan));
}

// One mapping for each chunk under the block. Where there is no room for them idle aliases go
// first.
Plan Planner::with_alias_room(Plan plan) const {
  std::size_t mappings = plan.growth.chunks.size();
  Bytes addresses = plan.growth.bytes;
  for (const Piece& piece : plan.pieces) {
    const ChunkTable& chunks = state_.arena.chunks();
    for (Address at = piece.begin; at < piece.end(); at = chunks[chunks.at(at)].end()) {
      ++mappings;
      addresses += chunks[chunks.at(at)].size;
    }
  }
  const std::size_t taken = state_.aliases.mappings() + state_.building_mappings;
  const std::size_t ceiling = state_.config.alias_mappings;
  const bool has_mappings = taken + mappings <= ceiling;
  const bool has_addresses = state_.alias_addresses.has(addresses);
  if (has_mappings && has_addresses) return plan;
  return {.collected = idle_aliases(has_addresses ? std::max(mappings, ceiling / kBatches)
                                                  : std::numeric_limits<std::size_t>::max())};
}

// Least recently used first, and only those whose last block's work is known to be over.
std::vector<AliasId> Planner::idle_aliases(std::size_t mappings) const {
  std::vector<AliasId> chosen;
  std::size_t found = 0;
  for (const AliasId id : state_.aliases.idle()) {
    if (found >= mappings) break;
    if (!state_.order.is_over(state_.aliases[id].last_tags)) continue;
    found += state_.aliases[id].chunks.size();
    chosen.push_back(id);
  }
  return chosen;
}

// --- D ------------------------------------------------------------------------------------------

Growth Planner::growth_by(Zone zone, Bytes bytes, const Request& request) const {
  const SpanId gap = state_.arena.gap_for(zone, bytes);
  const Bytes held = state_.arena.mapped_bytes() + state_.building;
  if (gap == kNoId || bytes > min(state_.room(), request.most_growth)) return {};
  // The small zone grows by its own measure.
  const Bytes wanted = zone == Zone::kSmall ? Bytes{} : request.size;
  const ChunkTable& chunks = state_.arena.chunks();
  const std::uint64_t mapped_again =
      chunks.times_aliased() / std::max<std::size_t>(chunks.count(), 1);
  const ChunkDemand demand{bytes, wanted, held, state_.room(), mapped_again};
  return {gap, chunk_sizes(demand, state_.granularity), bytes};
}

bool Planner::has_few_holes() const {
  Bytes holes{};
  state_.arena.for_each_extent([&](SpanId id) {
    const Bytes size = state_.arena.span(id).size;
    if (size < state_.granularity) holes += size;
  });
  return holes * kFewHoles <= state_.arena.mapped_bytes();
}

// Growth for a contiguous block: what the run before the gap, if the stream may have it, lacks. One
// that would not spare a unit of growth is left alone, so that the block begins with a chunk:
// otherwise one odd size would shift every later block across the bounds of its chunks, and a chunk
// that two blocks share is whole for neither. But a hole of less than a unit serves small blocks
// alone, and weights of an odd size, one after the other, leave one each: where there are more than
// a few the block begins in the hole. A small block always does: no stitch wants its chunk whole.
Plan Planner::growth(const Request& request, Zone zone) const {
  if (!request.most_growth) return {};
  const Bytes alone = round_up(request.size, state_.granularity);
  Plan plan{.growth = growth_by(zone, alone, request), .of_growth = request.size};
  if (!plan.growth) {
    // Under a limit the run before the gap may be what is missing.
    plan.growth.gap = state_.arena.gap_for(zone, state_.granularity);
    if (plan.growth.gap == kNoId) return {};
  }
  Address begin = state_.arena.span(plan.growth.gap).begin;
  const Address end = begin;
  for (SpanId id = state_.arena.span(plan.growth.gap).previous; state_.arena.is_extent(id);
       id = state_.arena.span(id).previous) {
    if (!may_take(state_.arena.tags_of(id), request)) break;
    begin = state_.arena.span(id).begin;
    if (end - begin >= request.size) break;
  }
  const Bytes before = end - begin;
  if (before && before < request.size) {
    const Bytes rest = round_up(request.size - before, state_.granularity);
    const bool is_taken = rest < alone || zone == Zone::kSmall || !has_few_holes();
    Growth growth = is_taken ? growth_by(zone, rest, request) : Growth{};
    if (growth && growth.gap == plan.growth.gap) {
      return {.growth = std::move(growth),
              .of_growth = request.size - before,
              .growth_at = 1,
              .pieces = {{begin, before}}};
    }
  }
  return plan.growth ? plan : Plan{};
}

// What the stream has to wait for, for the pieces together.
void Planner::add_waits(Plan* plan, const Request& request) const {
  if (request.reach != Reach::kBehindWaits) return;
  for (const Piece& piece : plan->pieces) {
    for_each_extent_in(piece, [&](SpanId id) {
      state_.order.add_waits(state_.arena.tags_of(id), request.stream, &plan->waits);
    });
  }
}

}  // namespace vramx
