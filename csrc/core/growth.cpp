// The part of DeviceAllocator that takes more memory from the device: how much, where it goes, and
// what the driver is asked for it.
//
// Addresses and limits are claimed under the lock before the driver is called without it, so that
// two threads that grow at once get neither the same addresses nor more than the limit together.
#include "core/chunk_policy.h"
#include "core/device_allocator.h"
#include "core/mapper.h"

namespace vramx {

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

// Adds chunks at the start of the growth's gap and sets them aside: one span, which waits for
// nothing.
Result<SpanId> DeviceAllocator::add_chunks(const Growth& growth, Bytes request, Lock& lock) {
  if (growth.gap == kNoId || !is_within_limit(growth.bytes)) return nothing_here();
  const Bytes held = arena_.mapped_bytes() + building_;
  const std::vector<Bytes> sizes =
      chunk_sizes({growth.bytes, request, held, room()}, driver_.granularity());
  const SpanId building = arena_.begin_building(growth.gap, growth.bytes);
  const Piece range{arena_.span(building).begin, growth.bytes};
  std::vector<MappedChunk> chunks;
  const MapOutcome outcome = build_chunks(range, sizes, chunks, lock);
  note_leftovers(outcome, range, building);
  if (!outcome.status.ok()) return outcome.status;
  arena_.finish_mapped(building, chunks);
  held_.store(arena_.mapped_bytes().count, std::memory_order_relaxed);
  ++stats_.num_growths;
  stats_.num_device_alloc += static_cast<std::int64_t>(chunks.size());
  stats_.segment.increase(static_cast<std::int64_t>(chunks.size()));
  stats_.reserved_bytes.increase(static_cast<std::int64_t>(growth.bytes.count));
  trace_.add(TraceKind::kGrow, range.begin, growth.bytes, Stream::kDefault);
  observe(Holding::kMapped, range, lock);
  return building;
}

// A device that is full says so at the first chunk that it has no room for, and until then has made
// chunks for nothing. Where that may happen it is asked first: what it said before does not count,
// because others use it too.
MapOutcome DeviceAllocator::build_chunks(const Piece& range, const std::vector<Bytes>& sizes,
                                         std::vector<MappedChunk>& chunks, Lock& lock) {
  const bool is_in_doubt = is_growth_in_doubt(range.size);
  const std::uint64_t generation = access_generation_;
  building_ += range.size;
  lock.unlock();
  MapOutcome outcome{nothing_here()};
  const auto has_room = [&] {
    const Result<MemoryInfo> device = driver_.memory_info();
    return !device.ok() || device.value().free >= range.size;
  };
  if (!is_in_doubt || has_room()) {
    outcome = create_and_map(driver_, range.begin, sizes, chunks);
  }
  lock.lock();
  if (outcome.status.ok()) {
    const Status covered = catch_up_access(range, generation, lock);
    if (!covered.ok()) {
      lock.unlock();
      outcome = undo_map(driver_, range.begin, chunks, covered);
      lock.lock();
    }
  }
  building_ -= range.size;
  has_growth_failed_ = !outcome.status.ok();
  return outcome;
}

// Near the device's capacity, and ever since a growth failed.
bool DeviceAllocator::is_growth_in_doubt(Bytes growth) const {
  constexpr std::uint64_t kNear = 8;
  return has_growth_failed_ || capacity_ < arena_.mapped_bytes() + building_ + growth * kNear;
}

void DeviceAllocator::observe(Holding change, const Piece& range, Lock& lock) {
  if (!observer_) return;
  const HoldingObserver observer = observer_;
  lock.unlock();
  observer(change, range);
  lock.lock();
}

Result<DeviceAllocator::Placement> DeviceAllocator::grow(Request& request, Lock& lock) {
  const InFlight in_flight(*this);
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
      !have || arena_.span(held.back().id).end() == arena_.span(added.value()).begin;
  held.push_back({added.value(), TagSet{}});
  if (!is_adjacent) {
    // Another thread's growth came between the extent and ours; together they may still do.
    give_back(held);
    return take_extent(request, lock);
  }
  held.back().id = arena_.give_back_end(added.value(), request.size - have);
  if (const Status ordered = order(request, held, lock); !ordered.ok()) return ordered;
  return Placement{arena_.span(held[0].id).begin, chain(held), kNoId};
}

}  // namespace vramx
