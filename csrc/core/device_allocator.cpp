#include "core/device_allocator.h"

#include <algorithm>

#include "core/chunk_policy.h"

namespace vramx {
namespace {

// The largest request that arithmetic on sizes is safe for; no device comes near it.
constexpr Bytes kLargestRequest{std::uint64_t{1} << 46};

// An extent of so many times a block's size, or more, is no good fit: what is left of it would be a
// hole for other sizes. That of one and a half is none for a block that has a better place.
constexpr std::uint64_t kLoose = 5;
bool is_slack(Bytes extent, Bytes size) { return extent * 2 >= size * 3; }

// What a block for this request takes.
Bytes size_of(Bytes requested) { return round_up(max(requested, kBlockUnit), kBlockUnit); }

Status unknown_address() { return Status{StatusCode::kInvalidValue, 0, "not a live block"}; }
Status in_child() { return Status{StatusCode::kNotInitialized, 0, "used in a forked child"}; }

}  // namespace

Result<std::unique_ptr<DeviceAllocator>> DeviceAllocator::create(Driver& driver,
                                                                 const AllocatorConfig& config) {
  const Result<MemoryInfo> memory = driver.memory_info();
  if (!memory.ok()) return memory.status();
  const Bytes arena_size =
      round_up(memory.value().total * config.arena_factor, driver.granularity());
  const Result<Address> arena = driver.reserve_address(arena_size);
  if (!arena.ok()) return arena.status();
  const Result<Address> aliases = driver.reserve_address(config.alias_addresses);
  if (!aliases.ok()) {
    driver.release_address(arena.value(), arena_size).ignore();
    return aliases.status();
  }
  const Grounds grounds{memory.value().total, {arena.value(), arena_size}, aliases.value()};
  return std::unique_ptr<DeviceAllocator>(new DeviceAllocator(driver, config, grounds));
}

DeviceAllocator::DeviceAllocator(Driver& driver, const AllocatorConfig& config,
                                 const Grounds& grounds)
    : driver_(driver),
      config_(config),
      capacity_(grounds.capacity),
      arena_base_(grounds.arena.begin),
      arena_size_(grounds.arena.size),
      alias_base_(grounds.aliases),
      limit_(config.limit),
      arena_(grounds.arena.begin, grounds.arena.size, driver.granularity()),
      alias_addresses_(grounds.aliases, config.alias_addresses),
      clocks_(driver),
      recurrence_(grounds.arena.begin),
      trace_(config.trace_events) {}

// The caller has made sure that the device no longer uses the memory. In a forked child there is no
// driver to talk to, and the parent still has everything.
DeviceAllocator::~DeviceAllocator() {
  if (fork_guard_.is_in_child()) return;
  // A GPU does not care for the order; the simulated one is quickest from the top.
  std::vector<Piece> mapped = mappings();
  std::sort(mapped.begin(), mapped.end(),
            [](const Piece& a, const Piece& b) { return a.begin > b.begin; });
  for (const Piece& each : mapped) driver_.unmap(each.begin, each.size).ignore();
  arena_.chunks().for_each(
      [&](ChunkId, const Chunk& chunk) { driver_.release_chunk(chunk.handle).ignore(); });
  for (const Leftover& leftover : leftovers_) {
    driver_.unmap(leftover.range.begin, leftover.mapped).ignore();
  }
  for (const ChunkHandle chunk : unreleased_) driver_.release_chunk(chunk).ignore();
  driver_.release_address(alias_base_, config_.alias_addresses).ignore();
  driver_.release_address(arena_base_, arena_size_).ignore();
}

Result<Address> DeviceAllocator::allocate(Bytes requested, Stream stream, OutOfMemory* why) {
  if (fork_guard_.is_in_child()) return in_child();
  Lock lock(mutex_);
  if (requested > kLargestRequest) {
    return note_out_of_memory(requested, nothing_here(), why, lock);
  }
  const Bytes size = size_of(requested);
  const StreamIndex index = clocks_.index_of(stream);
  if (recurrence_.is_running()) {
    const Placement placement = place_as_before(size, index, lock);
    if (placement.address) return publish(placement, requested, size, index);
  }
  if (const SpanId span = take_best(size, index); span != kNoId) {
    return publish({arena_.span(span).begin, span, kNoId}, requested, size, index);
  }
  const Result<Placement> placed = place_slowly(size, index, lock);
  if (!placed.ok()) return note_out_of_memory(requested, placed.status(), why, lock);
  // Growth may have made extents; taking from one, above, never makes more or larger ones.
  stats_.note_extents(arena_.extent_count(), arena_.free_bytes());
  return publish(placed.value(), requested, size, index);
}

// Where the request's counterpart went; no address where that is not to be had.
DeviceAllocator::Placement DeviceAllocator::place_as_before(Bytes size, StreamIndex stream,
                                                            Lock& lock) {
  const Recurrence::Place place = recurrence_.expect(size, stream);
  if (place.alias != kNoId) return reuse_as_before(place.alias, size, stream, lock);
  const SpanId span = place.address ? take_as_before(place.address, size, stream, lock) : kNoId;
  return span != kNoId ? Placement{place.address, span, kNoId} : Placement{};
}

// Whether the stream may have it without a wait. Nearly all that it is asked about is its own.
inline bool DeviceAllocator::is_at_once(SpanId extent, StreamIndex stream) const {
  return arena_.is_own(extent, stream) || clocks_.is_ordered(arena_.tags_of(extent), stream);
}

// The range that the request's counterpart had, where this stream may have it without a wait.
SpanId DeviceAllocator::take_as_before(Address place, Bytes size, StreamIndex stream, Lock& lock) {
  const SpanId extent = arena_.extent_over(place, size);
  SpanId span = kNoId;
  if (extent != kNoId && is_at_once(extent, stream)) {
    span = arena_.take_at(extent, place, size);
  } else if (clocks_.stream_count() > 1) {
    span = take_range({place, size}, stream, lock);
  }
  if (span == kNoId) return kNoId;
  stats_.note_extents(arena_.extent_count(), arena_.free_bytes());  // from its middle: one more
  return span;
}

SpanId DeviceAllocator::take_best(Bytes size, StreamIndex stream) {
  const bool is_own_first = config_.cross_stream != CrossStream::kAlways;
  const SpanId extent = is_own_first ? arena_.best_fit(size, stream) : arena_.best_fit_of_any(size);
  if (extent == kNoId) return kNoId;
  if (!is_own_first) {
    return is_at_once(extent, stream) ? arena_.take(extent, size) : kNoId;
  }
  return size < Lifetimes::kSmallest ? arena_.take(extent, size) : take_large(extent, size, stream);
}

// A large block that stays splits what it is put into for as long as it lives. Where it fits badly
// it goes beside its kin, blocks that live about as long: what comes together mostly goes together,
// and leaves an extent as large as it found. All the more one smaller than two chunks, which alone
// may leave no whole chunk. Where its kin have no room, the largest extent takes them up.
SpanId DeviceAllocator::take_large(SpanId best, Bytes size, StreamIndex stream) {
  const Bytes fit = arena_.span(best).size;
  const bool is_loose = fit >= size * kLoose;
  const bool may_join = is_loose || (is_slack(fit, size) && size < usual_chunk() * 2);
  if (!may_join) return arena_.take(best, size);
  const std::uint32_t kin = lifetimes_.kin_of(size);
  if (Lifetimes::is_brief(kin)) return arena_.take(best, size);
  SpanId extent = arena_.extent_over(kin_ends_[kin], size);
  if (extent == kNoId || !is_at_once(extent, stream)) {
    if (!is_loose) return arena_.take(best, size);
    extent = arena_.largest_extent(stream);
  }
  const Address at = arena_.span(extent).begin;
  kin_ends_[kin] = at + size;
  return arena_.take_at(extent, at, size);
}

Bytes DeviceAllocator::usual_chunk() const {
  return vramx::usual_chunk(arena_.mapped_bytes(), driver_.granularity());
}

Address DeviceAllocator::publish(const Placement& placement, Bytes requested, Bytes size,
                                 StreamIndex stream) {
  const SpanId first = placement.first_span;
  arena_.used(first).stream = stream;
  arena_.used(first).requested = requested;
  if (placement.alias != kNoId) {
    BlockDetails& details = details_of(first);
    details.address = placement.address;
    details.alias = placement.alias;
  }
  blocks_.insert(placement.address, first);
  if (size >= Recurrence::kSmallest && config_.repeats_placements) {
    recurrence_.note(size, stream, placement.address, placement.alias);
  }
  if (size >= Lifetimes::kSmallest) {
    const Lifetimes::Request request = lifetimes_.note_request(size);
    arena_.used(first).time = request.time;
    arena_.used(first).context = request.context;
  }
  stats_.count_allocation(requested, size);
  note_allocated();
  trace_.add(TraceKind::kAllocate, placement.address, requested, clocks_.stream_of(stream));
  return placement.address;
}

void DeviceAllocator::note_allocated() {
  allocated_.store(static_cast<std::uint64_t>(stats_.allocated_bytes[0].current),
                   std::memory_order_relaxed);
}

BlockTable::Entry DeviceAllocator::find_block(Address address) const {
  return blocks_.find(address, [&](SpanId first) { return address_of(first) == address; });
}

Address DeviceAllocator::address_of(SpanId first) const {
  const std::uint32_t details = arena_.used(first).details;
  return details == kNoId ? arena_.span(first).begin : details_[details].address;
}

AliasId DeviceAllocator::alias_of(SpanId first) const {
  const std::uint32_t details = arena_.used(first).details;
  return details == kNoId ? kNoId : details_[details].alias;
}

// It has some from now on.
DeviceAllocator::BlockDetails& DeviceAllocator::details_of(SpanId first) {
  std::uint32_t& details = arena_.used(first).details;
  if (details != kNoId) return details_[details];
  if (vacant_details_.empty()) {
    vacant_details_.push_back(static_cast<std::uint32_t>(details_.size()));
    details_.emplace_back();
  }
  details = vacant_details_.back();
  vacant_details_.pop_back();
  details_[details].address = arena_.span(first).begin;
  return details_[details];
}

LiveBlock DeviceAllocator::live_block(SpanId first) const {
  const UsedSpan& block = arena_.used(first);
  return {address_of(first), size_of(block.requested), block.requested,
          clocks_.stream_of(block.stream)};
}

Status DeviceAllocator::free(Address address, LiveBlock* freed) {
  if (fork_guard_.is_in_child()) return ok_status();
  const Lock lock(mutex_);
  const BlockTable::Entry found = find_block(address);
  if (found.span == kNoId) return unknown_address();
  const SpanId first = found.span;
  blocks_.erase(found);
  if (freed != nullptr) *freed = live_block(first);
  // Field by field: a copy of the whole would have to wait for fields that were just written.
  const UsedSpan& block = arena_.used(first);
  const Bytes requested = block.requested;
  const StreamIndex stream = block.stream;
  const Bytes size = size_of(requested);
  if (size >= Lifetimes::kSmallest) lifetimes_.note_free({block.time, block.context});
  if ((block.details & block.next) == kNoId) [[likely]] {  // both are kNoId
    arena_.give_back(first, clocks_.stamp(stream));
  } else {
    give_back_block(first, UsedSpan(block));
  }
  stats_.count_free(requested, size);
  note_allocated();
  stats_.note_extents(arena_.extent_count(), arena_.free_bytes());
  trace_.add(TraceKind::kFree, address, requested, clocks_.stream_of(stream));
  return ok_status();
}

// One in several pieces, in an alias, or that several streams have used.
void DeviceAllocator::give_back_block(SpanId first, const UsedSpan& block) {
  const TagSet tags = stamp_free(block);
  if (block.details != kNoId) {
    BlockDetails& details = details_[block.details];
    if (details.alias != kNoId) aliases_.unpin(details.alias, size_of(block.requested), tags);
    details.alias = kNoId;
    details.users.clear();
    vacant_details_.push_back(block.details);
  }
  for (SpanId span = first; span != kNoId;) {
    const SpanId next = arena_.used(span).next;
    arena_.give_back(span, tags);
    span = next;
  }
}

// The memory waits for the stream it was allocated on and for those that were recorded.
TagSet DeviceAllocator::stamp_free(const UsedSpan& block) {
  TagSet tags(clocks_.stamp(block.stream));
  if (block.details == kNoId) return tags;
  for (const StreamIndex user : details_[block.details].users) tags.add(clocks_.stamp(user));
  return tags;
}

Status DeviceAllocator::record_stream(Address address, StreamName stream, bool) {
  if (fork_guard_.is_in_child()) return ok_status();
  const Lock lock(mutex_);
  const BlockTable::Entry found = find_block(address);
  if (found.span == kNoId) return unknown_address();
  const UsedSpan& block = arena_.used(found.span);
  const StreamIndex user = clocks_.index_of(stream.handle);
  if (user == block.stream) return ok_status();
  std::vector<StreamIndex>& users = details_of(found.span).users;
  if (std::find(users.begin(), users.end(), user) == users.end()) users.push_back(user);
  trace_.add(TraceKind::kRecordStream, address, block.requested, stream.handle);
  return ok_status();
}

Status DeviceAllocator::forget_stream(Stream stream) {
  if (fork_guard_.is_in_child()) return ok_status();
  Lock lock(mutex_);
  return clocks_.forget(stream, lock);
}

void DeviceAllocator::set_limit(Bytes limit) {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  limit_ = limit;
}

void DeviceAllocator::set_observer(HoldingObserver observer) {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  observer_ = std::move(observer);
}

void DeviceAllocator::set_surroundings(const Surroundings* surroundings) {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  surroundings_ = surroundings;
}

void DeviceAllocator::add_relief(std::function<void()> callback) {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  relief_.push_back(std::move(callback));
}

bool DeviceAllocator::owns(Address address) const {
  return (address >= arena_base_ && address < arena_base_ + arena_size_) ||
         (address >= alias_base_ && address < alias_base_ + config_.alias_addresses);
}

// Asks the device how much it has left, without the lock.
Status DeviceAllocator::note_out_of_memory(Bytes requested, const Status& cause, OutOfMemory* why,
                                           Lock& lock) {
  lock.unlock();
  const Result<MemoryInfo> device = driver_.memory_info();
  lock.lock();
  OutOfMemory& report = last_out_of_memory_;
  report = OutOfMemory{};
  report.requested = requested;
  report.live = allocated();
  report.held = arena_.mapped_bytes();
  report.limit = limit_;
  report.free = arena_.free_bytes();
  report.extents = arena_.extent_count();
  arena_.for_each_extent(Arena::kAnyStream, [&](SpanId id) {
    const Span& extent = arena_.span(id);
    report.largest_extent = max(report.largest_extent, extent.size);
    report.whole_chunks += arena_.chunks().whole_bytes(extent.begin, extent.end());
  });
  if (device.ok()) report.device = device.value();
  report.cause = cause;
  ++stats_.num_ooms;
  trace_.add(TraceKind::kOutOfMemory, Address{}, requested, Stream::kDefault);
  if (why != nullptr) std::construct_at(why, report);
  return Status{StatusCode::kOutOfMemory, cause.driver_code, cause.call};
}

}  // namespace vramx
