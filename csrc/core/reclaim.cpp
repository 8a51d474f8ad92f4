// The part of DeviceAllocator that gives things up: relief when memory runs out, idle aliases,
// whole free chunks.
#include <algorithm>
#include <set>

#include "core/device_allocator.h"
#include "core/mapper.h"

namespace vramx {

// What frees memory without a wait of the host: tags that are found complete, then the callbacks.
void DeviceAllocator::relieve(Lock& lock) {
  ask_all_streams(lock);
  const std::vector<std::function<void()>> callbacks = relief_;
  lock.unlock();
  for (const auto& callback : callbacks) callback();
  lock.lock();
}

void DeviceAllocator::drop_complete_tags(Merge merge) {
  const auto has_done = [&](StreamIndex stream) { return clocks_.has_completed(stream); };
  const auto is_done = [&](const Tag& tag) { return clocks_.is_complete(tag); };
  if (merge == Merge::kAlike) {
    arena_.drop_tags_and_merge(has_done, is_done);
  } else {
    arena_.drop_tags(has_done, is_done);
  }
  clocks_.note_told();
}

void DeviceAllocator::ask_all_streams(Lock& lock) {
  clocks_.settle(StreamClocks::Settle::kQuery, lock);
  drop_complete_tags(Merge::kNone);
}

// The streams that keep `reader` from memory with these tags. What they are done with joins its
// neighbours at once, so that the next look finds it whole.
void DeviceAllocator::ask_streams_of(const TagSet& tags, StreamIndex reader, Lock& lock) {
  const auto now =
      static_cast<std::uint64_t>(stats_.allocation[0].allocated + stats_.allocation[0].freed);
  if (clocks_.ask(tags, reader, now, lock)) drop_complete_tags(Merge::kAlike);
}

bool DeviceAllocator::is_idle(AliasId id) const {
  const Alias& alias = aliases_[id];
  if (alias.pins != 0 || alias.is_leaving) return false;
  for (std::size_t i = 0; i < alias.last_tags.size(); ++i) {
    if (!clocks_.is_complete(alias.last_tags[i])) return false;
  }
  return true;
}

// Least recently used first, and only those whose last block's work is known to be over. Frees
// mappings and addresses, not memory.
bool DeviceAllocator::collect_aliases(std::size_t mappings, Lock& lock) {
  clocks_.settle(StreamClocks::Settle::kQuery, lock);
  std::vector<AliasId> chosen;
  std::size_t found = 0;
  for (const AliasId id : aliases_.idle()) {
    if (found >= mappings) break;
    if (!is_idle(id)) continue;
    found += aliases_[id].chunks.size();
    chosen.push_back(id);
  }
  return unmap_aliases(chosen, lock, nullptr);
}

// No block moves in while the lock is away; kept where the driver refuses.
bool DeviceAllocator::unmap_aliases(const std::vector<AliasId>& ids, Lock& lock,
                                    DefragmentReport* report) {
  bool has_unmapped = false;
  for (const AliasId id : ids) aliases_.set_leaving(id, true);
  for (const AliasId id : ids) {
    const Address base = aliases_[id].base;
    const Bytes size = aliases_[id].size;
    lock.unlock();
    const Status unmapped = driver_.unmap(base, size);
    lock.lock();
    aliases_.set_leaving(id, false);
    if (!unmapped.ok()) continue;
    has_unmapped = true;
    aliases_.remove(id, arena_);
    alias_addresses_.give_back(base, size);
    if (report == nullptr) continue;
    ++report->aliases_collected;
    report->alias_addresses += size;
  }
  return has_unmapped;
}

// What a failed operation could not undo is remembered: a span that is still being built until its
// addresses are empty, or addresses of aliases, and chunks that nobody has.
void DeviceAllocator::note_leftovers(const MapOutcome& outcome, const Piece& range,
                                     SpanId building) {
  unreleased_.insert(unreleased_.end(), outcome.unreleased.begin(), outcome.unreleased.end());
  if (outcome.status.ok()) return;
  if (outcome.left_mapped) {
    leftovers_.push_back({range, outcome.left_mapped, building});
  } else {
    give_up_range(range, building);
  }
}

void DeviceAllocator::give_up_range(const Piece& range, SpanId building) {
  if (building != kNoId) {
    arena_.finish_unmapped(building);
  } else {
    alias_addresses_.give_back(range.begin, range.size);
  }
}

void DeviceAllocator::retry_leftovers(Lock& lock) {
  std::vector<Leftover> ranges;
  std::vector<ChunkHandle> chunks;
  ranges.swap(leftovers_);
  chunks.swap(unreleased_);
  for (const Leftover& leftover : ranges) {
    lock.unlock();
    const Status unmapped = driver_.unmap(leftover.range.begin, leftover.mapped);
    lock.lock();
    if (unmapped.ok()) {
      give_up_range(leftover.range, leftover.building);
    } else {
      leftovers_.push_back(leftover);
    }
  }
  for (const ChunkHandle chunk : chunks) {
    lock.unlock();
    const Status released = driver_.release_chunk(chunk);
    lock.lock();
    if (!released.ok()) unreleased_.push_back(chunk);
  }
}

// The chunks that nothing uses: wholly free, waiting for nothing, in no alias that is in use.
std::vector<ChunkId> DeviceAllocator::releasable_chunks(std::vector<AliasId>* aliases) const {
  std::set<ChunkId> chunks;
  arena_.chunks().for_each([&](ChunkId id, const Chunk& chunk) {
    const bool is_whole = arena_.is_whole_free(id);
    if (is_whole && arena_.tags_of(arena_.span_at(chunk.begin)).empty()) chunks.insert(id);
  });
  for (const AliasId id : aliases_.all()) {
    if (is_idle(id)) continue;
    for (const ChunkId chunk : aliases_[id].chunks) chunks.erase(chunk);
  }
  for (const AliasId id : aliases_.all()) {
    const std::vector<ChunkId>& mapped = aliases_[id].chunks;
    if (std::any_of(mapped.begin(), mapped.end(), [&](ChunkId c) { return chunks.contains(c); })) {
      aliases->push_back(id);
    }
  }
  return {chunks.begin(), chunks.end()};
}

// Whether the chunk is the one that was seen and still unused. One that is still mapped in an
// alias, because the driver would not unmap that, stays: its memory would not come free.
bool DeviceAllocator::is_releasable(ChunkId id, const Chunk& seen) const {
  const Chunk& chunk = arena_.chunks()[id];
  return chunk.handle == seen.handle && chunk.alias_count == 0 && arena_.is_whole_free(id) &&
         arena_.tags_of(arena_.span_at(chunk.begin)).empty();
}

// One after the other, so that whoever needs memory meanwhile finds all but one of them.
void DeviceAllocator::release_whole_chunks(Lock& lock, DefragmentReport* report) {
  std::vector<AliasId> aliases;
  std::vector<Chunk> leaving;
  for (const ChunkId id : releasable_chunks(&aliases)) leaving.push_back(arena_.chunks()[id]);
  unmap_aliases(aliases, lock, report);
  for (const Chunk& chunk : leaving) {
    const ChunkId id = arena_.chunks().find(chunk.begin);
    if (id == kNoId || !is_releasable(id, chunk)) continue;
    const InFlight in_flight(*this);
    const SpanId span = arena_.begin_removing(id);
    if (!release_chunk(chunk, lock)) {
      arena_.cancel_removing(span);
      continue;
    }
    arena_.finish_unmapped(span);
    held_.store(arena_.mapped_bytes().count, std::memory_order_relaxed);
    ++report->chunks_released;
    report->released += chunk.size;
    ++stats_.num_device_free;
    stats_.segment.decrease(1);
    stats_.reserved_bytes.decrease(static_cast<std::int64_t>(chunk.size.count));
    trace_.add(TraceKind::kShrink, chunk.begin, chunk.size, Stream::kDefault);
  }
}

// The observer is told before the addresses can be mapped again, so that it sees the changes of
// one range in their order.
bool DeviceAllocator::release_chunk(const Chunk& chunk, Lock& lock) {
  const HoldingObserver observer = observer_;
  lock.unlock();
  const MapOutcome outcome = unmap_and_release(driver_, chunk.begin, {{chunk.size, chunk.handle}});
  if (outcome.status.ok() && observer) observer(Holding::kUnmapped, {chunk.begin, chunk.size});
  lock.lock();
  unreleased_.insert(unreleased_.end(), outcome.unreleased.begin(), outcome.unreleased.end());
  return outcome.status.ok();
}

void DeviceAllocator::settle_all(Lock& lock) {
  clocks_.settle(StreamClocks::Settle::kWait, lock);
  ++stats_.num_sync_all_streams;
  drop_complete_tags(Merge::kAlike);
  retry_leftovers(lock);
}

DefragmentReport DeviceAllocator::trim() {
  DefragmentReport report;
  if (fork_guard_.is_in_child()) return report;
  Lock lock(mutex_);
  report.extents_before = arena_.extent_count();
  settle_all(lock);
  release_whole_chunks(lock, &report);
  report.extents_after = arena_.extent_count();
  return report;
}

DefragmentReport DeviceAllocator::defragment() {
  DefragmentReport report;
  if (fork_guard_.is_in_child()) return report;
  Lock lock(mutex_);
  report.extents_before = arena_.extent_count();
  settle_all(lock);
  std::vector<AliasId> idle = aliases_.idle();
  std::erase_if(idle, [&](AliasId id) { return !is_idle(id); });
  unmap_aliases(idle, lock, &report);
  release_whole_chunks(lock, &report);
  report.extents_after = arena_.extent_count();
  return report;
}

}  // namespace vramx
