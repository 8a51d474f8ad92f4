// The last resort of DeviceAllocator::allocate before relief: a block put together from free
// pieces, made contiguous by a second mapping of their chunks, with growth for what they lack.
#include <algorithm>

#include "core/device_allocator.h"
#include "core/mapper.h"
#include "core/stitch_plan.h"

namespace vramx {
namespace {

// Extents below this have no part in a plan.
constexpr Bytes kSmallestPiece{64 << 10};
// A stitch spares more than this part of the block.
constexpr std::uint64_t kWorth = 128;
// A plan takes what is largest, which is not always best: one that lacks less than this part of the
// block says nothing of what is free in an alias.
constexpr std::uint64_t kNearly = 8;
constexpr std::size_t kFewExtents = 64;
// Of most aliases.
constexpr std::size_t kChunks = 32;
constexpr std::size_t kManyExtents = 4096;

}  // namespace

// Most blocks are put together from the few largest extents. Only where those are not enough does a
// plan look at many.
StitchPlan DeviceAllocator::plan(const Request& request) const {
  StitchPlan plan;
  for (const std::size_t most : {kFewExtents, kManyExtents}) {
    const StreamIndex of = request.is_alone ? request.stream : Arena::kAnyStream;
    const std::vector<Piece> extents = arena_.stitchable(kSmallestPiece, most, of);
    plan = plan_stitch(extents, arena_.chunks(), request.size);
    if (!plan.missing || extents.size() < most) break;
  }
  return plan;
}

// Growing alone makes half the mappings: a stitch that spares next to nothing of what it maps is
// not worth the others.
bool DeviceAllocator::is_growth_as_good(const Request& request, Bytes missing) const {
  const Growth alone = growth_for(request);
  if (alone.gap == kNoId || !is_within_limit(alone.bytes)) return false;
  const Bytes spared{request.size.count / kWorth};
  return alone.bytes <= round_up(missing, driver_.granularity()) + spared;
}

Result<DeviceAllocator::Placement> DeviceAllocator::stitch(Request& request, Lock& lock) {
  const InFlight in_flight(*this);
  StitchPlan plan = this->plan(request);
  // What is free in an alias is a plan too: where the one that was found lacks much nobody looks. A
  // request that waits for nobody may find more there, for a plan is of its own stream's memory.
  if (plan.missing * kNearly <= request.size || request.is_alone) {
    if (const AliasFit fit = find_alias(request); fit.alias != kNoId) {
      Result<Placement> placed = move_in(fit, request, lock);
      if (placed.ok()) return placed;
      plan = this->plan(request);
    }
  }
  if (plan.missing && is_growth_as_good(request, plan.missing)) {
    Result<Placement> grown = grow(request, lock);
    if (grown.ok()) return grown;
    plan = this->plan(request);
  }
  Result<Held> held = plan.missing ? hold_with_growth(plan, request.size, lock) : hold(plan.pieces);
  if (!held.ok()) return held.status();
  if (const Status ordered = order(request, held.value(), lock); !ordered.ok()) return ordered;
  Placement placement;
  if (const Status mapped = map_alias(held.value(), lock, &placement); !mapped.ok()) {
    give_back(held.value());
    return mapped;
  }
  aliases_.pin(placement.alias, request.size);
  placement.first_span = chain(held.value());
  ++stats_.num_stitches;
  return placement;
}

// New chunks fill what the plan lacks. They come before a last piece that ends mid-chunk, which
// then gives up what their rounding brings in surplus.
Result<DeviceAllocator::Held> DeviceAllocator::hold_with_growth(StitchPlan& plan, Bytes request,
                                                                Lock& lock) {
  const Bytes missing = round_up(plan.missing, driver_.granularity());
  Bytes of_new = plan.missing;
  Piece last{};
  if (plan.ends_in_tail) {
    last = plan.pieces.back();
    plan.pieces.pop_back();
    of_new = min(missing, plan.missing + last.size);
    last.size = plan.missing + last.size - of_new;
  }
  Held held = hold(plan.pieces);
  const Held held_last = last.size ? hold({last}) : Held{};
  const Growth growth{.bytes = missing, .gap = arena_.gap_for(missing)};
  const Result<SpanId> added = add_chunks(growth, request, lock);
  if (!added.ok()) {
    give_back(held);
    give_back(held_last);
    return added.status();
  }
  held.push_back({arena_.give_back_end(added.value(), of_new), TagSet{}});
  held.insert(held.end(), held_last.begin(), held_last.end());
  return held;
}

std::vector<ChunkId> DeviceAllocator::chunks_under(const Held& held) const {
  std::vector<ChunkId> chunks;
  chunks.reserve(kChunks);
  for (const HeldSpan& each : held) {
    const Span& span = arena_.span(each.id);
    for (Address at = span.begin; at < span.end(); at = arena_.chunks()[chunks.back()].end()) {
      chunks.push_back(arena_.chunks().at(at));
    }
  }
  return chunks;
}

Status DeviceAllocator::map_alias(const Held& held, Lock& lock, Placement* placement) {
  const std::vector<ChunkId> ids = chunks_under(held);
  std::vector<MappedChunk> chunks;
  chunks.reserve(ids.size());
  Bytes size{};
  for (const ChunkId id : ids) {
    chunks.push_back({arena_.chunks()[id].size, arena_.chunks()[id].handle});
    size += chunks.back().size;
  }
  const auto is_too_many = [&] {
    return aliases_.mappings() + building_mappings_ + ids.size() > config_.alias_mappings;
  };
  if (is_too_many()) {
    // A batch, so that a program that stitches anew for ever pays for the search now and then.
    collect_aliases(std::max(ids.size(), config_.alias_mappings / 128), lock);
  }
  if (is_too_many()) return nothing_here();
  building_mappings_ += ids.size();
  const Address base = take_alias_addresses(size, lock);
  const MapOutcome outcome = base ? map_unlocked(base, chunks, lock) : MapOutcome{nothing_here()};
  building_mappings_ -= ids.size();
  if (!outcome.status.ok()) return outcome.status;
  placement->alias = aliases_.add(base, ids, arena_);
  const Address first = arena_.span(held[0].id).begin;
  placement->address = base + (first - arena_.chunks()[ids[0]].begin);
  trace_.add(TraceKind::kStitch, base, size, Stream::kDefault);
  return ok_status();
}

Address DeviceAllocator::take_alias_addresses(Bytes size, Lock& lock) {
  const Address base = alias_addresses_.take(size);
  if (base || !collect_aliases(SIZE_MAX, lock)) return base;
  return alias_addresses_.take(size);
}

// The driver may have less room for mappings than was thought: then idle aliases make some.
MapOutcome DeviceAllocator::map_unlocked(Address base, const std::vector<MappedChunk>& chunks,
                                         Lock& lock) {
  Bytes size{};
  for (const MappedChunk& chunk : chunks) size += chunk.size;
  const auto attempt = [&] {
    const std::uint64_t generation = access_generation_;
    lock.unlock();
    MapOutcome outcome = map_again(driver_, base, chunks);
    lock.lock();
    if (!outcome.status.ok()) return outcome;
    outcome.status = catch_up_access({base, size}, generation, lock);
    if (outcome.status.ok()) return outcome;
    lock.unlock();
    if (!driver_.unmap(base, size).ok()) outcome.left_mapped = size;
    lock.lock();
    return outcome;
  };
  MapOutcome outcome = attempt();
  if (outcome.status.code == StatusCode::kOutOfMemory && !outcome.left_mapped &&
      collect_aliases(chunks.size(), lock)) {
    outcome = attempt();
  }
  note_leftovers(outcome, {base, size}, kNoId);
  return outcome;
}

}  // namespace vramx
