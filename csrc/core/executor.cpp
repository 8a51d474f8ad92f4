#include "core/executor.h"

#include <algorithm>
#include <utility>

namespace vramx {
namespace {

Status no_room() { return {StatusCode::kOutOfMemory, 0, "allocate"}; }

}  // namespace

Executor::Outcome Executor::carry_out(const Plan& plan, const Request& request, Lock& lock) {
  const InFlight in_flight(state_);
  Claim claim = this->claim(plan, request);
  Outcome outcome;
  const auto refuse = [&](Refused what, const Status& status) {
    abort(plan, request, claim);
    return Outcome{what, status, {}};
  };
  if (const Status waited = wait(plan, request, lock); !waited.ok()) {
    return refuse(Refused::kWait, waited);
  }
  if (plan.growth) {
    const Status grown = grow(plan, &claim, lock);
    if (!grown.ok()) return refuse(Refused::kGrowth, grown);
  }
  Placement placement;
  placement.alias = plan.alias;
  if (plan.makes_alias) {
    const Status mapped = map_alias(&claim, &placement, lock);
    if (!mapped.ok()) return refuse(Refused::kAlias, mapped);
  }
  return {Refused::kNothing, ok_status(), commit(plan, request, claim, placement)};
}

// --- claim --------------------------------------------------------------------------------------

Executor::Claim Executor::claim(const Plan& plan, const Request& request) {
  Claim claim;
  if (plan.alias != kNoId) state_.aliases.pin(plan.alias, request.size);
  for (std::size_t i = 0; i < plan.pieces.size(); ++i) {
    if (i == plan.growth_at) claim.growth_at = claim.parts.size();
    hold(plan.pieces[i], &claim.parts);
  }
  if (plan.growth_at >= plan.pieces.size()) claim.growth_at = claim.parts.size();
  if (plan.growth) {
    claim.building = state_.arena.begin_building(plan.growth.gap, plan.growth.bytes);
    claim.growth = {state_.arena.span(claim.building).begin, plan.growth.bytes};
    state_.building += plan.growth.bytes;
  }
  return claim;
}

// Extents of different tags may lie side by side under a piece.
void Executor::hold(const Piece& piece, std::vector<Claim::Part>* parts) {
  for (Address begin = piece.begin; begin < piece.end();) {
    const SpanId extent = state_.arena.span_at(begin);
    const Bytes size = min(piece.end() - begin, state_.arena.span(extent).end() - begin);
    Claim::Part& part = parts->emplace_back(Claim::Part{.tags = state_.arena.tags_of(extent)});
    part.span = state_.arena.take_at(extent, begin, size);
    begin = begin + size;
  }
}

// --- run ----------------------------------------------------------------------------------------

Status Executor::wait(const Plan& plan, const Request& request, Lock& lock) {
  if (plan.waits.empty()) return ok_status();
  const StreamName reader = state_.order.name_of(request.stream);
  state_.order.begin_waits();
  lock.unlock();
  Status status = ok_status();
  for (const StreamWait& each : plan.waits) {
    status = state_.driver.wait_event(reader, each.event);
    if (!status.ok()) break;
  }
  lock.lock();
  state_.order.end_waits();
  if (!status.ok()) return status;
  for (const StreamWait& each : plan.waits) state_.order.note_waited(request.stream, each);
  ++state_.stats.num_cross_stream;
  return status;
}

// A device that is full says so at the first chunk that it has no room for, and until then has made
// chunks for nothing. Where that may happen it is asked first: near its capacity, and ever since a
// growth failed. What it said before does not count, because others use it too.
Status Executor::grow(const Plan& plan, Claim* claim, Lock& lock) {
  constexpr std::uint64_t kNear = 8;
  const Bytes size = plan.growth.bytes;
  const Bytes taken = state_.arena.mapped_bytes() + state_.building;
  const bool is_in_doubt =
      state_.has_growth_failed || state_.grounds.capacity < taken + size * kNear;
  const std::uint64_t generation = state_.access_generation;
  lock.unlock();
  MapOutcome outcome{no_room()};
  if (!is_in_doubt || has_room(size)) {
    outcome = create_and_map(state_.driver, claim->growth.begin, plan.growth.chunks, claim->chunks);
  }
  lock.lock();
  if (outcome.status.ok()) {
    const Status covered = catch_up_access(claim->growth, generation, lock);
    if (!covered.ok()) {
      lock.unlock();
      outcome = undo_map(state_.driver, claim->growth.begin, claim->chunks, covered);
      lock.lock();
    }
  }
  state_.building -= size;
  state_.note_growth(taken, outcome.status.ok());
  const SpanId building = std::exchange(claim->building, kNoId);
  note_leftovers(outcome, claim->growth, building);
  if (!outcome.status.ok()) return outcome.status;
  claim->building = building;
  commit_growth(plan, claim, lock);
  return ok_status();
}

bool Executor::has_room(Bytes growth) const {
  const Result<MemoryInfo> device = state_.driver.memory_info();
  return !device.ok() || device.value().free >= growth;
}

// The new chunks are the arena's for good, whatever becomes of the block. The observer is told
// while they are nobody's.
void Executor::commit_growth(const Plan& plan, Claim* claim, Lock& lock) {
  state_.arena.finish_mapped(claim->building, claim->chunks);
  state_.note_held();
  AllocatorStats& stats = state_.stats;
  ++stats.num_growths;
  stats.num_device_alloc += static_cast<std::int64_t>(claim->chunks.size());
  stats.segment.increase(static_cast<std::int64_t>(claim->chunks.size()));
  stats.reserved_bytes.increase(static_cast<std::int64_t>(plan.growth.bytes.count));
  state_.trace.add(TraceKind::kGrow, claim->growth.begin, claim->growth.size, Stream::kDefault);
  if (state_.observer) {
    const HoldingObserver observer = state_.observer;
    lock.unlock();
    observer(Holding::kMapped, claim->growth);
    lock.lock();
  }
  const SpanId kept = state_.arena.give_back_end(claim->building, plan.of_growth);
  const auto at = claim->parts.begin() + static_cast<std::ptrdiff_t>(claim->growth_at);
  claim->parts.insert(at, {.span = kept});
  claim->building = kNoId;
}

std::vector<ChunkId> Executor::chunks_under(const Claim& claim) const {
  std::vector<ChunkId> chunks;
  for (const Claim::Part& part : claim.parts) {
    const Span& span = state_.arena.span(part.span);
    for (Address at = span.begin; at < span.end();) {
      const ChunkId chunk = state_.arena.chunks().at(at);
      // Two parts of one chunk, of different tags, are one piece of the block.
      if (chunks.empty() || chunks.back() != chunk) chunks.push_back(chunk);
      at = state_.arena.chunks()[chunk].end();
    }
  }
  return chunks;
}

// The driver may have less room for mappings than was thought: then the ceiling is where it is now.
Status Executor::map_alias(Claim* claim, Placement* placement, Lock& lock) {
  claim->mapped = chunks_under(*claim);
  std::vector<MappedChunk> chunks;
  Bytes size{};
  for (const ChunkId id : claim->mapped) {
    chunks.push_back({state_.arena.chunks()[id].size, state_.arena.chunks()[id].handle});
    size += chunks.back().size;
  }
  const Address base = state_.alias_addresses.take(size);
  if (!base) return no_room();
  const Piece range{base, size};
  state_.building_mappings += chunks.size();
  const std::uint64_t generation = state_.access_generation;
  lock.unlock();
  MapOutcome outcome = map_again(state_.driver, base, chunks);
  lock.lock();
  if (outcome.status.ok()) {
    outcome.status = catch_up_access(range, generation, lock);
    if (!outcome.status.ok()) {
      lock.unlock();
      if (!state_.driver.unmap(base, size).ok()) outcome.left_mapped = size;
      lock.lock();
    }
  }
  state_.building_mappings -= chunks.size();
  note_leftovers(outcome, range, kNoId);
  if (!outcome.status.ok()) return outcome.status;
  placement->alias = state_.aliases.add(base, claim->mapped, state_.arena);
  const Address first = state_.arena.span(claim->parts.front().span).begin;
  placement->address = base + (first - state_.arena.chunks()[claim->mapped.front()].begin);
  state_.trace.add(TraceKind::kStitch, base, size, Stream::kDefault);
  ++state_.stats.num_stitches;
  return ok_status();
}

Status Executor::catch_up_access(const Piece& range, std::uint64_t generation, Lock& lock) {
  while (generation != state_.access_generation) {
    generation = state_.access_generation;
    lock.unlock();
    const Status status = state_.driver.set_access(range.begin, range.size);
    lock.lock();
    if (!status.ok()) return status;
  }
  return ok_status();
}

// --- commit or abort ----------------------------------------------------------------------------

Placement Executor::commit(const Plan& plan, const Request& request, const Claim& claim,
                           Placement placement) {
  const auto& parts = claim.parts;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    state_.arena.used(parts[i - 1].span).next = parts[i].span;
  }
  placement.first_span = parts.front().span;
  if (plan.alias != kNoId) {
    placement.address = plan.address;
    ++state_.stats.num_alias_hits;
  } else if (plan.makes_alias) {
    state_.aliases.pin(placement.alias, request.size);
  } else {
    placement.address = state_.arena.span(placement.first_span).begin;
  }
  return placement;
}

// New chunks that are there already stay: they are free memory then.
void Executor::abort(const Plan& plan, const Request& request, const Claim& claim) {
  if (plan.alias != kNoId) state_.aliases.unpin(plan.alias, request.size, TagSet{});
  for (const Claim::Part& part : claim.parts) {
    TagSet tags = part.tags;
    tags.drop([&](const Tag& tag) { return state_.order.is_over(tag); });
    state_.arena.give_back(part.span, tags);
  }
  if (claim.building == kNoId) return;
  state_.building -= plan.growth.bytes;
  state_.arena.finish_unmapped(claim.building);
}

// --- aliases and leftovers ----------------------------------------------------------------------

std::size_t Executor::unmap(const std::vector<AliasId>& ids, Lock& lock, Bytes* addresses) {
  std::size_t count = 0;
  const InFlight in_flight(state_);
  for (const AliasId id : ids) state_.aliases.set_leaving(id, true);
  for (const AliasId id : ids) {
    const Piece range{state_.aliases[id].base, state_.aliases[id].size};
    lock.unlock();
    const Status unmapped = state_.driver.unmap(range.begin, range.size);
    lock.lock();
    state_.aliases.set_leaving(id, false);
    if (!unmapped.ok()) continue;
    ++count;
    state_.aliases.remove(id, state_.arena);
    state_.alias_addresses.give_back(range.begin, range.size);
    if (addresses != nullptr) *addresses += range.size;
  }
  return count;
}

void Executor::note_leftovers(const MapOutcome& outcome, const Piece& range, SpanId building) {
  state_.unreleased.insert(state_.unreleased.end(), outcome.unreleased.begin(),
                           outcome.unreleased.end());
  if (outcome.status.ok()) return;
  if (!outcome.left_mapped) return give_up_range(range, building);
  state_.leftovers.push_back({range, outcome.left_mapped, building});
}

void Executor::give_up_range(const Piece& range, SpanId building) {
  if (building != kNoId) return state_.arena.finish_unmapped(building);
  state_.alias_addresses.give_back(range.begin, range.size);
}

void Executor::retry_leftovers(Lock& lock) {
  const std::vector<Leftover> ranges = std::exchange(state_.leftovers, {});
  const std::vector<ChunkHandle> chunks = std::exchange(state_.unreleased, {});
  for (const Leftover& leftover : ranges) {
    lock.unlock();
    const Status unmapped = state_.driver.unmap(leftover.range.begin, leftover.mapped);
    lock.lock();
    if (unmapped.ok()) {
      give_up_range(leftover.range, leftover.building);
    } else {
      state_.leftovers.push_back(leftover);
    }
  }
  for (const ChunkHandle chunk : chunks) {
    lock.unlock();
    const Status released = state_.driver.release_chunk(chunk);
    lock.lock();
    if (!released.ok()) state_.unreleased.push_back(chunk);
  }
}

}  // namespace vramx
