// The slow path of DeviceAllocator::allocate: what happens when no extent of the stream's own fits.
//
// Every step sets the memory that it wants aside under the lock, lets the lock go for its driver
// calls, and either hands over a placement or gives everything back as it was.
#include <algorithm>
#include <chrono>
#include <span>
#include <thread>

#include "core/device_allocator.h"

namespace vramx {
namespace {

// Below this a block is not worth an alias while the arena may grow: the chunk that it would open
// takes more like it. What a page is worth depends on what is held.
Bytes smallest_stitched(Bytes held) {
  constexpr std::uint64_t kShare = 2048;
  return min(max(Bytes{held.count / kShare}, Bytes{1 << 20}), Bytes{4 << 20});
}

// How long a request that found nothing waits in all for what other threads have set aside, and how
// long it sleeps between two looks. A chunk is given back in 12 us to 13 ms (measured, H200): time
// for some forty of the slowest, and an end where the others never are done.
constexpr std::chrono::milliseconds kPatience{500};
constexpr std::chrono::microseconds kLook{20};

// What a stitch adds to the pieces that it found: new chunks, and one that comes behind them.
constexpr std::size_t kMoreSpans = 2;

}  // namespace

Result<DeviceAllocator::Placement> DeviceAllocator::place_slowly(Bytes size, StreamIndex stream,
                                                                 Lock& lock) {
  Request request{size, stream, config_.cross_stream == CrossStream::kNever};
  // What every stream is done with waits for nobody, and joins its neighbours: without asking,
  // memory that went from stream to stream would stay in ever smaller pieces. The question costs a
  // few microseconds a stream, a stitch or growth a hundred.
  if (clocks_.stream_count() > 1) ask_all_streams(lock);
  Result<Placement> placed = try_all(request, lock);
  if (!placed.ok() && !request.is_alone && request.has_failed_to_wait) {
    // A stream is being captured, say: then what needs no waiting has to do.
    request.is_alone = true;
    placed = try_all(request, lock);
  }
  if (placed.ok()) return placed;
  relieve(lock);
  ++stats_.num_alloc_retries;
  placed = try_all(request, lock);
  const Deadline deadline = std::chrono::steady_clock::now() + kPatience;
  while (!placed.ok() && wait_for_others(deadline, lock)) placed = try_all(request, lock);
  return placed;
}

// What other threads have set aside - chunks on their way out, pieces of a stitch - is neither free
// nor used: while there is any, "nothing fits" is not the last word. False where there is none, or
// no time left.
bool DeviceAllocator::wait_for_others(Deadline deadline, Lock& lock) {
  if (operations_in_flight_ == 0) return false;
  const std::uint64_t landed = operations_landed_;
  while (operations_in_flight_ != 0 && operations_landed_ == landed) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    lock.unlock();
    std::this_thread::sleep_for(kLook);
    lock.lock();
  }
  return true;
}

// A range of one extent or several, where this stream may have all of it without a wait. The
// streams that it waits for are asked, which takes a microsecond each: a block that does not go
// where its counterpart went takes the place of another, and so on, until one needs a stitch.
SpanId DeviceAllocator::take_range(const Piece& range, StreamIndex stream, Lock& lock) {
  for (const bool has_asked : {false, true}) {
    TagSet tags;
    if (!arena_.add_tags_over(range.begin, range.size, &tags)) return kNoId;
    if (!clocks_.is_ordered(tags, stream)) {
      if (!has_asked) ask_streams_of(tags, stream, lock);
      continue;
    }
    // Asked for, its parts have joined, unless some wait for others all the same.
    const SpanId extent = arena_.extent_over(range.begin, range.size);
    return extent != kNoId ? arena_.take_at(extent, range.begin, range.size) : chain(hold({range}));
  }
  return kNoId;
}

// The same for the alias that the counterpart was given: among many that would do the search may
// never come to the one that the other requests leave free.
DeviceAllocator::Placement DeviceAllocator::reuse_as_before(AliasId alias, Bytes size,
                                                            StreamIndex stream, Lock& lock) {
  for (const bool has_asked : {false, true}) {
    const AliasFit fit = aliases_.fit_in(alias, arena_, size);
    if (fit.alias == kNoId) return {};
    TagSet tags;
    for (const Piece& piece : fit.pieces) tags.add(arena_.tags_of(arena_.span_at(piece.begin)));
    if (clocks_.is_ordered(tags, stream)) {
      aliases_.pin(alias, size);
      ++stats_.num_alias_hits;
      return {fit.address, chain(hold(fit.pieces)), alias};
    }
    if (!has_asked) ask_streams_of(tags, stream, lock);
  }
  return {};
}

Result<DeviceAllocator::Placement> DeviceAllocator::try_all(Request& request, Lock& lock) {
  using Step = Result<Placement> (DeviceAllocator::*)(Request&, Lock&);
  constexpr Step kOfSmall[] = {&DeviceAllocator::take_extent, &DeviceAllocator::reuse_alias,
                               &DeviceAllocator::grow, &DeviceAllocator::stitch};
  constexpr Step kOfLarge[] = {&DeviceAllocator::take_extent, &DeviceAllocator::stitch,
                               &DeviceAllocator::grow};
  const bool is_small = request.size < smallest_stitched(arena_.mapped_bytes());
  Status last = nothing_here();
  for (const Step step : is_small ? std::span<const Step>(kOfSmall) : kOfLarge) {
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
  const TagSet tags = arena_.tags_of(extent);
  const SpanId taken = arena_.take(extent, request.size);
  if (const Status ordered = order(request, {{taken, tags}}, lock); !ordered.ok()) return ordered;
  return Placement{arena_.span(taken).begin, taken, kNoId};
}

AliasFit DeviceAllocator::find_alias(const Request& request) const {
  if (arena_.free_bytes() < request.size) return {};
  return aliases_.find(arena_, request.size, [&](const std::vector<Piece>& pieces) {
    return std::all_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
      return may_take(arena_.tags_of(arena_.span_at(piece.begin)), request);
    });
  });
}

Result<DeviceAllocator::Placement> DeviceAllocator::reuse_alias(Request& request, Lock& lock) {
  const AliasFit fit = find_alias(request);
  return fit.alias != kNoId ? move_in(fit, request, lock) : nothing_here();
}

Result<DeviceAllocator::Placement> DeviceAllocator::move_in(const AliasFit& fit, Request& request,
                                                            Lock& lock) {
  aliases_.pin(fit.alias, request.size);
  const Held held = hold(fit.pieces);
  if (const Status ordered = order(request, held, lock); !ordered.ok()) {
    aliases_.unpin(fit.alias, request.size, TagSet{});
    return ordered;
  }
  ++stats_.num_alias_hits;
  return Placement{fit.address, chain(held), fit.alias};
}

// --- setting aside ---

bool DeviceAllocator::may_take(const TagSet& tags, const Request& request) const {
  return !request.is_alone || clocks_.is_ordered(tags, request.stream);
}

// Pieces that are neighbours are taken as one.
DeviceAllocator::Held DeviceAllocator::hold(const std::vector<Piece>& pieces) {
  Held held;
  held.reserve(pieces.size() + kMoreSpans);
  for (auto piece = pieces.begin(); piece != pieces.end();) {
    Address begin = piece->begin;
    Address end = begin;
    for (; piece != pieces.end() && piece->begin == end; ++piece) end = piece->end();
    // Extents of different streams may lie side by side under them.
    while (begin < end) {
      const SpanId extent = arena_.span_at(begin);
      const Bytes size = min(end - begin, arena_.span(extent).end() - begin);
      HeldSpan& part = held.emplace_back(HeldSpan{.tags = arena_.tags_of(extent)});
      part.id = arena_.take_at(extent, begin, size);
      begin = begin + size;
    }
  }
  return held;
}

// What has become complete since it was set aside is not looked for again: see has_completed().
void DeviceAllocator::give_back(const Held& held) {
  for (const HeldSpan& each : held) {
    TagSet tags = each.tags;
    tags.drop([&](const Tag& tag) { return clocks_.is_complete(tag); });
    arena_.give_back(each.id, tags);
  }
}

// Makes the stream wait for whoever used the pieces last; gives them back where that cannot be.
Status DeviceAllocator::order(Request& request, const Held& held, Lock& lock) {
  TagSet tags;
  for (const HeldSpan& each : held) {
    if (!clocks_.is_ordered(each.tags, request.stream)) tags.add(each.tags);
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
  for (std::size_t i = 1; i < held.size(); ++i) arena_.used(held[i - 1].id).next = held[i].id;
  return held.front().id;
}

}  // namespace vramx
