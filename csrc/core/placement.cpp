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
  Request request{size, stream, config_.cross_stream == CrossStream::kNever};
  Result<Placement> placed = try_all(request, lock);
  if (!placed.ok() && !request.is_alone && request.has_failed_to_wait) {
    // A stream is being captured, say: then what needs no waiting has to do.
    request.is_alone = true;
    placed = try_all(request, lock);
  }
  if (placed.ok()) return placed;
  relieve(lock);
  Result<Placement> again = try_all(request, lock);
  if (again.ok()) ++stats_.num_alloc_retries;
  return again;
}

Result<DeviceAllocator::Placement> DeviceAllocator::try_all(Request& request, Lock& lock) {
  using Step = Result<Placement> (DeviceAllocator::*)(Request&, Lock&);
  const Growth growth = growth_for(request);
  const bool may_grow =
      request.size < kSmallestStitched || is_growth_free(growth.bytes, request.size);
  Status last = nothing_here();
  for (const Step step : {&DeviceAllocator::take_extent, &DeviceAllocator::reuse_alias,
                          may_grow ? &DeviceAllocator::grow : &DeviceAllocator::stitch,
                          may_grow ? &DeviceAllocator::stitch : &DeviceAllocator::grow}) {
    Result<Placement> placed = (this->*step)(request, lock);
    if (placed.ok()) return placed;
    // The driver's own word is worth more to the caller than "nothing fits".
    if (placed.status().driver_code != 0 || last.driver_code == 0) last = placed.status();
  }
  return last;
}

// --- memory that is mapped ---

// While the lock was let go an extent of the stream's own may have appeared; and where the
// alternative is growth, so does memory that waits for other streams.
SpanId DeviceAllocator::find_extent(const Request& request) {
  const bool is_any_first = config_.cross_stream == CrossStream::kAlways && !request.is_alone;
  const auto find = [&](bool is_own) {
    return is_own ? arena_.best_fit(request.size, request.stream)
                  : arena_.best_fit_of_any(request.size);
  };
  SpanId extent = find(!is_any_first);
  if (extent == kNoId && !request.is_alone) extent = find(false);
  if (extent == kNoId &&
      arena_.merge_neighbours(request.is_alone ? Arena::Merging::kAlike : Arena::Merging::kAll)) {
    extent = find(request.is_alone);
  }
  return extent;
}

Result<DeviceAllocator::Placement> DeviceAllocator::take_extent(Request& request, Lock& lock) {
  const SpanId extent = find_extent(request);
  if (extent == kNoId) return nothing_here();
  Held held;
  held.tags.push_back(arena_.tags_of(extent));
  held.spans.push_back(arena_.take(extent, request.size));
  if (const Status ordered = order(request, held, lock); !ordered.ok()) return ordered;
  return Placement{arena_.span(held.spans[0]).begin, held.spans[0], kNoId};
}

Result<DeviceAllocator::Placement> DeviceAllocator::reuse_alias(Request& request, Lock& lock) {
  const AliasFit fit = aliases_.find(arena_, request.size, [&](const std::vector<Piece>& pieces) {
    return std::all_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
      return may_take(arena_.tags_of(arena_.span_at(piece.begin)), request);
    });
  });
  if (fit.alias == kNoId) return nothing_here();
  aliases_.pin(fit.alias);
  const Held held = hold(fit.pieces);
  if (const Status ordered = order(request, held, lock); !ordered.ok()) {
    aliases_.unpin(fit.alias, TagSet{});
    return ordered;
  }
  ++stats_.num_alias_hits;
  return Placement{fit.address, chain(held), fit.alias};
}

// --- growth ---

// Growth for a contiguous block: what the extent before the gap, if the stream may have it, lacks.
// An extent that would not spare a unit of growth is left alone, so that the block begins with a
// chunk: otherwise one odd size would shift every later block across the bounds of its chunks, and
// a chunk that two blocks share is whole for neither.
DeviceAllocator::Growth DeviceAllocator::growth_for(const Request& request) const {
  const Bytes alone = round_up(request.size, driver_.granularity());
  Growth growth{.bytes = alone, .gap = arena_.gap_for(alone)};
  if (growth.gap == kNoId) return growth;
  const SpanId previous = arena_.span(growth.gap).previous;
  if (previous == kNoId || arena_.span(previous).state != SpanState::kFree ||
      arena_.span(previous).size >= request.size || !may_take(arena_.tags_of(previous), request)) {
    return growth;
  }
  const Bytes rest = round_up(request.size - arena_.span(previous).size, driver_.granularity());
  if (rest < alone) growth = {.bytes = rest, .gap = growth.gap, .before = previous};
  return growth;
}

// What may still be held, on this device and under the limit.
Bytes DeviceAllocator::room() const {
  const Bytes held = arena_.mapped_bytes() + building_;
  const Bytes most = min(limit_, capacity_);
  return most > held ? most - held : Bytes{};
}

bool DeviceAllocator::is_within_limit(Bytes growth) const {
  return arena_.mapped_bytes() + building_ + growth <= limit_;
}

// What convenience may waste: a share of `bytes`, and little of the room that is left.
Bytes DeviceAllocator::allowance(Bytes bytes, double share) const {
  constexpr std::uint64_t kShareOfRoom = 64;
  const Bytes of_bytes{static_cast<std::uint64_t>(static_cast<double>(bytes.count) * share)};
  return min(of_bytes, Bytes{room().count / kShareOfRoom});
}

// Whether growing by `growth` keeps what is held within the slack above the most ever live.
bool DeviceAllocator::is_growth_free(Bytes growth, Bytes size) const {
  const Bytes live = max(highest_live_, allocated() + size);
  return arena_.mapped_bytes() + building_ + growth <= live + allowance(live, config_.growth_slack);
}

// Adds chunks at the start of the growth's gap and sets them aside: one span, which waits for
// nothing.
Result<SpanId> DeviceAllocator::add_chunks(const Growth& growth, Bytes request, Lock& lock) {
  if (growth.gap == kNoId || !is_within_limit(growth.bytes)) return nothing_here();
  const Bytes held = arena_.mapped_bytes() + building_;
  const std::vector<Bytes> sizes =
      chunk_sizes({growth.bytes, request, held, room()}, driver_.granularity());
  const SpanId building = arena_.begin_building(growth.gap, growth.bytes);
  const Address at = arena_.span(building).begin;
  building_ += growth.bytes;
  std::vector<MappedChunk> chunks;
  lock.unlock();
  const MapOutcome outcome = create_and_map(driver_, at, sizes, chunks);
  lock.lock();
  building_ -= growth.bytes;
  note_leftovers(outcome, {at, growth.bytes}, building);
  if (!outcome.status.ok()) return outcome.status;
  arena_.finish_mapped(building, chunks);
  held_.store(arena_.mapped_bytes().count, std::memory_order_relaxed);
  ++stats_.num_growths;
  stats_.num_device_alloc += static_cast<std::int64_t>(chunks.size());
  stats_.segment.increase(static_cast<std::int64_t>(chunks.size()));
  stats_.reserved_bytes.increase(static_cast<std::int64_t>(growth.bytes.count));
  trace_.add(TraceKind::kGrow, at, growth.bytes, Stream::kDefault);
  return building;
}

Result<DeviceAllocator::Placement> DeviceAllocator::grow(Request& request, Lock& lock) {
  const Growth growth = growth_for(request);
  Held held;
  Bytes have{};
  if (growth.before != kNoId) {
    const Span& extent = arena_.span(growth.before);
    have = extent.size;
    held = hold({{extent.begin, extent.size}});
  }
  const Result<SpanId> added = add_chunks(growth, request.size, lock);
  if (!added.ok()) {
    give_back(held);
    return added.status();
  }
  const bool is_adjacent =
      !have || arena_.span(held.spans.back()).end() == arena_.span(added.value()).begin;
  held.spans.push_back(added.value());
  held.tags.emplace_back();
  if (!is_adjacent) {
    // Another thread's growth came between the extent and ours; together they may still do.
    give_back(held);
    return take_extent(request, lock);
  }
  held.spans.back() = arena_.give_back_end(added.value(), request.size - have);
  if (const Status ordered = order(request, held, lock); !ordered.ok()) return ordered;
  return Placement{arena_.span(held.spans[0]).begin, chain(held), kNoId};
}

// --- setting aside ---

bool DeviceAllocator::may_take(const TagSet& tags, const Request& request) const {
  return !request.is_alone || clocks_.is_ordered(tags, request.stream);
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
Status DeviceAllocator::order(Request& request, const Held& held, Lock& lock) {
  TagSet tags;
  for (const TagSet& of_span : held.tags) {
    if (!clocks_.is_ordered(of_span, request.stream)) tags.add(of_span);
  }
  if (tags.empty()) return ok_status();
  const Status ordered = clocks_.order(request.stream, tags, lock);
  if (!ordered.ok()) {
    request.has_failed_to_wait = true;
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
