#include "core/device_allocator.h"

#include <algorithm>
#include <memory>

namespace vramx {
namespace {

// The largest request that arithmetic on sizes is safe for; no device comes near it.
constexpr Bytes kLargestRequest{std::uint64_t{1} << 46};

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
  // In one piece: an offset from the arena's begin says where a block lies, in an alias too.
  const Result<Address> base = driver.reserve_address(arena_size + config.alias_addresses);
  if (!base.ok()) return base.status();
  const DeviceState::Grounds grounds{memory.value().total,
                                     {base.value(), arena_size},
                                     {base.value() + arena_size, config.alias_addresses}};
  return std::unique_ptr<DeviceAllocator>(new DeviceAllocator(driver, config, grounds));
}

DeviceAllocator::DeviceAllocator(Driver& driver, const AllocatorConfig& config,
                                 const DeviceState::Grounds& grounds)
    : state_(driver, config, grounds) {}

// The caller has made sure that the device no longer uses the memory. In a forked child there is no
// driver to talk to, and the parent still has everything.
DeviceAllocator::~DeviceAllocator() {
  if (fork_guard_.is_in_child()) return;
  Driver& driver = state_.driver;
  // A GPU does not care for the order; the simulated one is quickest from the top.
  std::vector<Piece> mapped = mappings();
  std::sort(mapped.begin(), mapped.end(),
            [](const Piece& a, const Piece& b) { return a.begin > b.begin; });
  for (const Piece& each : mapped) driver.unmap(each.begin, each.size).ignore();
  state_.arena.chunks().for_each(
      [&](ChunkId, const Chunk& chunk) { driver.release_chunk(chunk.handle).ignore(); });
  for (const Leftover& leftover : state_.leftovers) {
    driver.unmap(leftover.range.begin, leftover.mapped).ignore();
  }
  for (const ChunkHandle chunk : state_.unreleased) driver.release_chunk(chunk).ignore();
  const Piece arena = arena_addresses();
  driver.release_address(arena.begin, arena.size + alias_addresses().size).ignore();
}

// --- allocate -----------------------------------------------------------------------------------

Result<Address> DeviceAllocator::allocate(Bytes requested, Stream stream, OutOfMemory* why) {
  if (fork_guard_.is_in_child()) return in_child();
  Lock lock(mutex_);
  if (requested > kLargestRequest) {
    return note_out_of_memory(requested, {StatusCode::kOutOfMemory, 0, "allocate"}, why, lock);
  }
  const Bytes size = size_of(requested);
  StreamIndex index = state_.order.recent_index_of(stream);
  if (index == kNoId) [[unlikely]] {
    index = state_.order.index_of(stream);
    // For the block, and from here on: without the lock others look for an entry that none needs.
    state_.order.hold(index);
    note_streams();
  }
  // Before the fast path, where nothing was asked for a while.
  if (--ask_in_ == 0) [[unlikely]] {
    ask_streams(lock);
  }
  Placement placement = quick_.take(size, index, [&] { ask_streams(lock); });
  if (!placement.address) [[unlikely]] {
    const Result<Placement> placed = place_slowly(size, index, lock);
    if (!placed.ok()) {
      state_.order.let_go(index);
      return note_out_of_memory(requested, placed.status(), why, lock);
    }
    placement = placed.value();
  } else if (placement.alias != kNoId) {
    note_asker(index);  // no extent of its own would have served it
  }
  return publish(placement, requested, size, index);
}

// A call of it would take three hundredths of an allocation.
[[gnu::always_inline]] inline Address DeviceAllocator::publish(const Placement& placement,
                                                               Bytes requested, Bytes size,
                                                               StreamIndex stream) {
  UsedSpan& block = state_.arena.used(placement.first_span);
  block.stream = stream;
  block.requested = requested;
  blocks_.insert(placement);
  quick_.note(placement, size, stream);
  state_.blocks.count_allocation(requested, size);
  note_allocated();
  // Growth and what is taken from the middle of an extent make more of them.
  state_.stats.note_extents(state_.arena.extent_count(), state_.arena.free_bytes());
  state_.trace.add(TraceKind::kAllocate, placement.address, requested,
                   state_.order.handle_of(stream));
  return placement.address;
}

void DeviceAllocator::note_allocated() {
  allocated_.store(state_.blocks.live_bytes().count, std::memory_order_relaxed);
}

LiveBlock DeviceAllocator::live_block(SpanId first) const {
  const UsedSpan& block = state_.arena.used(first);
  return {blocks_.address_of(first), size_of(block.requested), block.requested,
          state_.order.handle_of(block.stream)};
}

// --- free ---------------------------------------------------------------------------------------

Status DeviceAllocator::free(Address address, LiveBlock* freed) {
  if (fork_guard_.is_in_child()) return ok_status();
  Lock lock(mutex_);
  const BlockTable::Entry found = blocks_.find(address);
  if (found.span == kNoId) return unknown_address();
  const SpanId first = found.span;
  blocks_.erase(found);
  if (freed != nullptr) *freed = live_block(first);
  // Field by field: a copy of the whole would have to wait for fields that were just written.
  const UsedSpan& block = state_.arena.used(first);
  const Bytes requested = block.requested;
  const StreamIndex stream = block.stream;
  const Bytes size = size_of(requested);
  quick_.note_free(block, size);
  state_.blocks.count_free(requested, size);
  note_allocated();
  state_.trace.add(TraceKind::kFree, address, requested, state_.order.handle_of(stream));
  const bool is_plain = (block.details & block.next) == kNoId;  // both are
  const bool is_marked = state_.order.wants_mark(stream, size);
  if (is_plain && !is_marked) [[likely]] {
    state_.arena.give_back(first, state_.order.stamp(stream));
  } else {
    const UsedSpan had(block);
    give_back(first, had, tags_of_free(had, first, is_marked, lock));
  }
  state_.stats.note_extents(state_.arena.extent_count(), state_.arena.free_bytes());
  return ok_status();
}

// The memory waits for the stream it was allocated on and for those that were recorded. What is set
// aside while their marks are recorded is in flight.
TagSet DeviceAllocator::tags_of_free(const UsedSpan& block, SpanId first, bool is_marked,
                                     Lock& lock) {
  StreamOrder& order = state_.order;
  const std::vector<StreamIndex> users = blocks_.users_of(first);  // marks let the lock go
  is_marked = is_marked || !users.empty();
  for (const StreamIndex user : users) order.count_free(user, size_of(block.requested));
  const InFlight in_flight(state_);
  // The first tag says whose own the memory is.
  TagSet tags(is_marked ? order.mark(block.stream, lock) : order.stamp(block.stream));
  for (const StreamIndex user : users) tags.add(order.mark(user, lock));
  // Not before: marks are recorded without the lock, and the tags keep the entries from now on.
  order.let_go(block.stream);
  for (const StreamIndex user : users) order.let_go(user);
  return tags;
}

void DeviceAllocator::give_back(SpanId first, const UsedSpan& block, const TagSet& tags) {
  if (const AliasId alias = blocks_.alias_of(first); alias != kNoId) {
    state_.aliases.unpin(alias, size_of(block.requested), tags);
  }
  blocks_.drop_details(block.details);
  for (SpanId span = first; span != kNoId;) {
    const SpanId next = state_.arena.used(span).next;
    state_.arena.give_back(span, tags);
    span = next;
  }
}

Status DeviceAllocator::record_stream(Address address, StreamName stream, bool is_lasting) {
  if (fork_guard_.is_in_child()) return ok_status();
  const Lock lock(mutex_);
  const BlockTable::Entry found = blocks_.find(address);
  if (found.span == kNoId) return unknown_address();
  const StreamIndex user = state_.order.index_of(stream, is_lasting);
  if (!blocks_.add_user(found.span, user)) return ok_status();
  state_.order.hold(user);
  note_streams();
  state_.trace.add(TraceKind::kRecordStream, address, state_.arena.used(found.span).requested,
                   stream.handle);
  return ok_status();
}

// --- settings -----------------------------------------------------------------------------------

DefragmentReport DeviceAllocator::trim() { return release(false); }

DefragmentReport DeviceAllocator::defragment() { return release(true); }

DefragmentReport DeviceAllocator::release(bool all_aliases) {
  if (fork_guard_.is_in_child()) return {};
  Lock lock(mutex_);
  const DefragmentReport report = reclaimer_.run(all_aliases, lock);
  if (report.chunks_released != 0) quick_.note_released();
  return report;
}

void DeviceAllocator::set_limit(Bytes limit) {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  state_.limit = limit;
}

void DeviceAllocator::set_observer(HoldingObserver observer) {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  state_.observer = std::move(observer);
}

void DeviceAllocator::set_surroundings(const Surroundings* surroundings) {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  state_.order.set_surroundings(surroundings);
}

void DeviceAllocator::add_relief(std::function<void()> callback) {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  relief_.push_back(std::move(callback));
}

bool DeviceAllocator::owns(Address address) const {
  const auto is_in = [&](const Piece& range) {
    return address >= range.begin && address < range.end();
  };
  return is_in(arena_addresses()) || is_in(alias_addresses());
}

// Asks the device how much it has left, without the lock.
Status DeviceAllocator::note_out_of_memory(Bytes requested, const Status& cause, OutOfMemory* why,
                                           Lock& lock) {
  lock.unlock();
  const Result<MemoryInfo> device = state_.driver.memory_info();
  lock.lock();
  OutOfMemory& report = last_out_of_memory_;
  report = OutOfMemory{};
  report.requested = requested;
  report.live = allocated();
  report.held = state_.arena.mapped_bytes();
  report.limit = state_.limit;
  report.free = state_.arena.free_bytes();
  report.extents = state_.arena.extent_count();
  state_.arena.for_each_extent([&](SpanId id) {
    const Span& extent = state_.arena.span(id);
    report.largest_extent = max(report.largest_extent, extent.size);
    report.whole_chunks += state_.arena.chunks().whole_bytes(extent.begin, extent.end());
  });
  if (device.ok()) report.device = device.value();
  report.cause = cause;
  ++state_.stats.num_ooms;
  state_.trace.add(TraceKind::kOutOfMemory, Address{}, requested, Stream::kDefault);
  if (why != nullptr) std::construct_at(why, report);
  return Status{StatusCode::kOutOfMemory, cause.driver_code, cause.call};
}

}  // namespace vramx
