// The slow path of DeviceAllocator::allocate: what happens when no extent of the stream's own fits.
//
// Every step sets the memory that it wants aside under the lock, lets the lock go for its driver
// calls, and either hands over a placement or gives everything back as it was.
#include <algorithm>

#include "core/chunk_policy.h"
#include "core/device_allocator.h"
#include "core/mapper.h"
#include "core/stitch_plan.h"

namespace vramx {
namespace {

// Below this a block is not worth an alias while the arena may grow: the chunk that it would open
// takes many more like it.
constexpr Bytes kSmallestStitched{1 << 20};
// Extents below this have no part in a plan, and no plan looks at more extents than this.
constexpr Bytes kSmallestPiece{64 << 10};
constexpr std::size_t kMostExtents = 4096;

Status nothing_here() { return Status{StatusCode::kOutOfMemory, 0, "allocate"}; }

// Neighbouring pieces become one.
std::vector<Piece> joined(const std::vector<Piece>& pieces) {
  std::vector<Piece> result;
  for (const Piece& piece : pieces) {
    if (!result.empty() && result.back().end() == piece.begin) {
      result.back().size += piece.size;
    } else {
      result.push_back(piece);
    }
  }
  return result;
}

}  // namespace

Result<DeviceAllocator::Placement> DeviceAllocator::place_slowly(Bytes size, StreamIndex stream,
                                                                 Lock& lock) {
  const Result<Placement> placed = try_all(size, stream, lock);
  if (placed.ok()) return placed;
  relieve(lock);
  const Result<Placement> again = try_all(size, stream, lock);
  if (again.ok()) ++stats_.num_alloc_retries;
  return again;
}

Result<DeviceAllocator::Placement> DeviceAllocator::try_all(Bytes size, StreamIndex stream,
                                                            Lock& lock) {
  using Step = Result<Placement> (DeviceAllocator::*)(Bytes, StreamIndex, Lock&);
  SpanId gap = kNoId;
  SpanId before = kNoId;
  const Bytes growth = growth_needed(size, stream, &gap, &before);
  const bool may_grow = size < kSmallestStitched || may_grow_to(growth, size);
  Status last = nothing_here();
  for (const Step step : {&DeviceAllocator::take_extent, &DeviceAllocator::reuse_alias,
                          may_grow ? &DeviceAllocator::grow : &DeviceAllocator::stitch,
                          may_grow ? &DeviceAllocator::stitch : &DeviceAllocator::grow}) {
    Result<Placement> placed = (this->*step)(size, stream, lock);
    if (placed.ok()) return placed;
    // The driver's own word is worth more to the caller than "nothing fits".
    if (placed.status().driver_code != 0 || last.driver_code == 0) last = placed.status();
  }
  return last;
}

// --- memory that is mapped
// -------------------------------------------------------------------------

// While the lock was let go an extent of the stream's own may have appeared; and where the
// alternative is growth, so does memory that waits for other streams.
Result<DeviceAllocator::Placement> DeviceAllocator::take_extent(Bytes size, StreamIndex stream,
                                                                Lock& lock) {
  SpanId extent = arena_.best_fit(size, stream);
  if (extent == kNoId && config_.cross_stream != CrossStream::kNever) {
    extent = arena_.best_fit_of_any(size);
    if (extent == kNoId && arena_.merge_neighbours()) extent = arena_.best_fit_of_any(size);
  }
  if (extent == kNoId) return nothing_here();
  Held held;
  held.tags.push_back(arena_.tags_of(extent));
  held.spans.push_back(arena_.take(extent, size));
  if (const Status ordered = order(stream, held, lock); !ordered.ok()) return ordered;
  return Placement{arena_.span(held.spans[0]).begin, held.spans[0], kNoId};
}

Result<DeviceAllocator::Placement> DeviceAllocator::reuse_alias(Bytes size, StreamIndex stream,
                                                                Lock& lock) {
  const AliasFit fit = aliases_.find(arena_, size, [&](const std::vector<Piece>& pieces) {
    return std::all_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
      return may_take(arena_.tags_of(arena_.span_at(piece.begin)), stream);
    });
  });
  if (fit.alias == kNoId) return nothing_here();
  aliases_.pin(fit.alias);
  const Held held = hold(fit.pieces);
  if (const Status ordered = order(stream, held, lock); !ordered.ok()) {
    aliases_.unpin(fit.alias, TagSet{});
    return ordered;
  }
  ++stats_.num_alias_hits;
  return Placement{fit.address, chain(held), fit.alias};
}

// --- growth
// ----------------------------------------------------------------------------------------

// Growth for a contiguous block: what the extent before the gap, if the stream may have it, lacks.
Bytes DeviceAllocator::growth_needed(Bytes size, StreamIndex stream, SpanId* gap,
                                     SpanId* before) const {
  *gap = arena_.gap_for(round_up(size, driver_.granularity()));
  *before = kNoId;
  if (*gap == kNoId) return round_up(size, driver_.granularity());
  const SpanId previous = arena_.span(*gap).previous;
  Bytes have{};
  if (previous != kNoId && arena_.span(previous).state == SpanState::kFree &&
      arena_.span(previous).size < size && may_take(arena_.tags_of(previous), stream)) {
    *before = previous;
    have = arena_.span(previous).size;
  }
  return round_up(size - have, driver_.granularity());
}

// Whether growing by `growth` keeps what is held within the slack above the most ever live.
bool DeviceAllocator::may_grow_to(Bytes growth, Bytes size) const {
  const Bytes live = max(highest_live_, allocated() + size);
  const auto slack =
      static_cast<std::uint64_t>(static_cast<double>(live.count) * config_.growth_slack);
  return arena_.mapped_bytes() + building_ + growth <= live + Bytes{slack};
}

// Adds chunks of `growth` bytes in a gap; they are free and untagged after, merged with what is
// before them.
Result<Address> DeviceAllocator::add_chunks(Bytes growth, Lock& lock) {
  if (arena_.mapped_bytes() + building_ + growth > limit_) return nothing_here();
  const SpanId gap = arena_.gap_for(growth);
  if (gap == kNoId) return nothing_here();
  const std::vector<Bytes> sizes =
      chunk_sizes(growth, arena_.mapped_bytes() + building_, driver_.granularity());
  const SpanId building = arena_.begin_building(gap, growth);
  const Address at = arena_.span(building).begin;
  building_ += growth;
  std::vector<MappedChunk> chunks;
  lock.unlock();
  const MapOutcome outcome = create_and_map(driver_, at, sizes, chunks);
  lock.lock();
  building_ -= growth;
  if (!outcome.status.ok()) {
    // What could not be unmapped stays set aside for ever: those addresses are not empty.
    if (outcome.is_clean) arena_.finish_unmapped(building);
    return outcome.status;
  }
  arena_.finish_mapped(building, chunks);
  held_.store(arena_.mapped_bytes().count, std::memory_order_relaxed);
  ++stats_.num_growths;
  stats_.num_device_alloc += static_cast<std::int64_t>(chunks.size());
  stats_.segment.increase(static_cast<std::int64_t>(chunks.size()));
  stats_.reserved_bytes.increase(static_cast<std::int64_t>(growth.count));
  trace_.add(TraceKind::kGrow, at, growth, Stream::kDefault);
  return at;
}

Result<DeviceAllocator::Placement> DeviceAllocator::grow(Bytes size, StreamIndex stream,
                                                         Lock& lock) {
  SpanId gap = kNoId;
  SpanId before = kNoId;
  const Bytes growth = growth_needed(size, stream, &gap, &before);
  if (gap == kNoId) return nothing_here();
  Held held;
  if (before != kNoId) {
    const Span& extent = arena_.span(before);
    held = hold({{extent.begin, extent.size}});
  }
  const Result<Address> added = add_chunks(growth, lock);
  if (!added.ok()) {
    give_back(held);
    return added.status();
  }
  // Another thread's growth may have come between the extent and ours: then they do not touch.
  Address begin = added.value();
  const bool is_adjacent = !held.spans.empty() && arena_.span(held.spans[0]).end() == added.value();
  if (is_adjacent) begin = arena_.span(held.spans[0]).begin;
  give_back(held);
  const SpanId extent = arena_.extent_over(begin, size);
  if (extent == kNoId) return take_extent(size, stream, lock);
  Held taken;
  taken.tags.push_back(arena_.tags_of(extent));
  taken.spans.push_back(arena_.take_at(extent, begin, size));
  if (const Status ordered = order(stream, taken, lock); !ordered.ok()) return ordered;
  return Placement{begin, taken.spans[0], kNoId};
}

// --- stitching
// -------------------------------------------------------------------------------------

StitchPlan DeviceAllocator::plan(Bytes size, StreamIndex stream) const {
  const bool is_shared = config_.cross_stream != CrossStream::kNever;
  std::vector<Piece> extents;
  for (const SpanId id :
       arena_.largest(kSmallestPiece, kMostExtents, is_shared ? Arena::kAnyStream : stream)) {
    extents.push_back({arena_.span(id).begin, arena_.span(id).size});
  }
  return plan_stitch(extents, arena_.chunks(), size);
}

Result<DeviceAllocator::Placement> DeviceAllocator::stitch(Bytes size, StreamIndex stream,
                                                           Lock& lock) {
  StitchPlan plan = this->plan(size, stream);
  Held held;
  if (!plan.missing) {
    held = hold(plan.pieces);
  } else {
    SpanId gap = kNoId;
    SpanId before = kNoId;
    const Bytes growth = round_up(plan.missing, driver_.granularity());
    if (growth_needed(size, stream, &gap, &before) <= growth) return grow(size, stream, lock);
    const Result<Held> grown = hold_with_growth(plan, growth, lock);
    if (!grown.ok()) return grown.status();
    held = grown.value();
  }
  if (const Status ordered = order(stream, held, lock); !ordered.ok()) return ordered;
  Placement placement;
  if (const Status mapped = map_alias(held, lock, &placement); !mapped.ok()) {
    give_back(held);
    return mapped;
  }
  placement.first_span = chain(held);
  ++stats_.num_stitches;
  return placement;
}

// New chunks fill what the plan lacks. They come before a last piece that ends mid-chunk, which
// then gives up what their rounding brings in surplus.
Result<DeviceAllocator::Held> DeviceAllocator::hold_with_growth(StitchPlan& plan, Bytes growth,
                                                                Lock& lock) {
  Bytes of_new = plan.missing;
  Piece last{};
  if (plan.ends_in_tail) {
    last = plan.pieces.back();
    plan.pieces.pop_back();
    of_new = min(growth, plan.missing + last.size);
    last.size = plan.missing + last.size - of_new;
  }
  Held held = hold(plan.pieces);
  Held held_last = last.size ? hold({last}) : Held{};
  const auto give_all_back = [&] {
    give_back(held);
    give_back(held_last);
  };
  const Result<Address> added = add_chunks(growth, lock);
  if (!added.ok()) {
    give_all_back();
    return added.status();
  }
  const Held fresh = hold({{added.value(), of_new}});
  held.spans.insert(held.spans.end(), fresh.spans.begin(), fresh.spans.end());
  held.tags.insert(held.tags.end(), fresh.tags.begin(), fresh.tags.end());
  held.spans.insert(held.spans.end(), held_last.spans.begin(), held_last.spans.end());
  held.tags.insert(held.tags.end(), held_last.tags.begin(), held_last.tags.end());
  return held;
}

std::vector<ChunkId> DeviceAllocator::chunks_under(const Held& held) const {
  std::vector<ChunkId> chunks;
  for (const SpanId id : held.spans) {
    const Span& span = arena_.span(id);
    for (Address at = span.begin; at < span.end(); at = arena_.chunks()[chunks.back()].end()) {
      chunks.push_back(arena_.chunks().at(at));
    }
  }
  return chunks;
}

Status DeviceAllocator::map_alias(const Held& held, Lock& lock, Placement* placement) {
  const std::vector<ChunkId> ids = chunks_under(held);
  std::vector<MappedChunk> chunks;
  Bytes size{};
  for (const ChunkId id : ids) {
    chunks.push_back({arena_.chunks()[id].size, arena_.chunks()[id].handle});
    size += chunks.back().size;
  }
  if (aliases_.mappings() + ids.size() > config_.alias_mappings) {
    collect_alias_mappings(ids.size(), lock);
  }
  if (aliases_.mappings() + ids.size() > config_.alias_mappings) return nothing_here();
  const Address base = alias_addresses_.take(size);
  if (!base) return nothing_here();
  const MapOutcome outcome = map_unlocked(base, chunks, lock);
  if (!outcome.status.ok()) {
    if (outcome.is_clean) alias_addresses_.give_back(base, size);
    return outcome.status;
  }
  placement->alias = aliases_.add(base, ids, arena_);
  aliases_.pin(placement->alias);
  const Address first = arena_.span(held.spans[0]).begin;
  placement->address = base + (first - arena_.chunks()[ids[0]].begin);
  trace_.add(TraceKind::kStitch, base, size, Stream::kDefault);
  return ok_status();
}

// The driver may have less room for mappings than was thought: then idle aliases make some.
MapOutcome DeviceAllocator::map_unlocked(Address base, const std::vector<MappedChunk>& chunks,
                                         Lock& lock) {
  lock.unlock();
  MapOutcome outcome = map_again(driver_, base, chunks);
  lock.lock();
  if (outcome.status.code != StatusCode::kOutOfMemory || !outcome.is_clean) return outcome;
  if (!collect_alias_mappings(chunks.size(), lock)) return outcome;
  lock.unlock();
  outcome = map_again(driver_, base, chunks);
  lock.lock();
  return outcome;
}

// --- setting aside
// ---------------------------------------------------------------------------------

bool DeviceAllocator::may_take(const TagSet& tags, StreamIndex stream) const {
  return config_.cross_stream != CrossStream::kNever || clocks_.is_ordered(tags, stream);
}

DeviceAllocator::Held DeviceAllocator::hold(const std::vector<Piece>& pieces) {
  Held held;
  for (const Piece& piece : joined(pieces)) {
    Bytes taken{};
    // Extents of different streams may lie side by side under one piece.
    while (taken < piece.size) {
      const SpanId extent = arena_.span_at(piece.begin + taken);
      const Address begin = piece.begin + taken;
      const Bytes size = min(piece.size - taken, arena_.span(extent).end() - begin);
      held.tags.push_back(arena_.tags_of(extent));
      held.spans.push_back(arena_.take_at(extent, begin, size));
      taken += size;
    }
  }
  return held;
}

void DeviceAllocator::give_back(const Held& held) {
  for (std::size_t i = 0; i < held.spans.size(); ++i) {
    arena_.give_back(held.spans[i], held.tags[i]);
  }
}

// Makes the stream wait for whoever used the pieces last; gives them back where that cannot be.
Status DeviceAllocator::order(StreamIndex stream, const Held& held, Lock& lock) {
  TagSet tags;
  for (const TagSet& of_span : held.tags) {
    if (!clocks_.is_ordered(of_span, stream)) tags.add(of_span);
  }
  if (tags.empty()) return ok_status();
  const Status ordered = clocks_.order(stream, tags, lock);
  if (!ordered.ok()) {
    give_back(held);
    return ordered;
  }
  ++stats_.num_cross_stream;
  return ok_status();
}

SpanId DeviceAllocator::chain(const Held& held) {
  for (std::size_t i = 1; i < held.spans.size(); ++i) {
    arena_.link_in_block(held.spans[i - 1], held.spans[i]);
  }
  return held.spans.front();
}

}  // namespace vramx
