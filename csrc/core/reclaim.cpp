// The part of DeviceAllocator that gives things up: relief when memory runs out, idle aliases,
// whole free chunks.
#include <algorithm>
#include <set>

#include "core/device_allocator.h"
#include "core/mapper.h"

namespace vramx {

// What frees memory without a wait of the host: tags that are found complete, then the callbacks.
void DeviceAllocator::relieve(Lock& lock) {
  clocks_.settle(StreamClocks::Settle::kQuery, lock);
  arena_.drop_tags([&](const Tag& tag) { return clocks_.is_complete(tag); });
  const std::vector<std::function<bool()>> callbacks = relief_;
  lock.unlock();
  for (const auto& callback : callbacks) callback();
  lock.lock();
}

bool DeviceAllocator::is_idle(AliasId id) const {
  const Alias& alias = aliases_[id];
  if (alias.pins != 0) return false;
  for (std::size_t i = 0; i < alias.last_tags.size(); ++i) {
    if (!clocks_.is_complete(alias.last_tags[i])) return false;
  }
  return true;
}

// Least recently used first, and only those whose last block's work is known to be over. Frees
// mappings, not memory.
bool DeviceAllocator::collect_alias_mappings(std::size_t wanted, Lock& lock) {
  clocks_.settle(StreamClocks::Settle::kQuery, lock);
  std::vector<AliasId> chosen;
  std::size_t mappings = 0;
  for (const AliasId id : aliases_.idle()) {
    if (mappings >= wanted) break;
    if (!is_idle(id)) continue;
    mappings += aliases_[id].chunks.size();
    chosen.push_back(id);
  }
  unmap_aliases(chosen, lock, nullptr);
  return !chosen.empty();
}

void DeviceAllocator::unmap_aliases(const std::vector<AliasId>& ids, Lock& lock,
                                    DefragmentReport* report) {
  std::vector<Piece> ranges;
  for (const AliasId id : ids) {
    ranges.push_back({aliases_[id].base, aliases_[id].size});
    aliases_.remove(id, arena_);
  }
  for (const Piece& range : ranges) {
    lock.unlock();
    const MapOutcome outcome = unmap(driver_, range.begin, range.size);
    lock.lock();
    if (outcome.is_clean) alias_addresses_.give_back(range.begin, range.size);
    if (report == nullptr) continue;
    ++report->aliases_collected;
    report->alias_addresses += range.size;
  }
}

// The chunks that nothing uses: wholly free, waiting for nothing, in no alias that is in use.
std::vector<ChunkId> DeviceAllocator::releasable_chunks(std::vector<AliasId>* aliases) const {
  std::set<ChunkId> chunks;
  arena_.chunks().for_each([&](ChunkId id, const Chunk& chunk) {
    if (arena_.is_whole_free(id) && arena_.tags_of(chunk.span_at_begin).empty()) chunks.insert(id);
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

void DeviceAllocator::release_whole_chunks(Lock& lock, DefragmentReport* report) {
  std::vector<AliasId> aliases;
  std::vector<std::pair<SpanId, MappedChunk>> leaving;
  for (const ChunkId id : releasable_chunks(&aliases)) {
    const MappedChunk chunk{arena_.chunks()[id].size, arena_.chunks()[id].handle};
    leaving.emplace_back(arena_.begin_removing(id), chunk);
  }
  unmap_aliases(aliases, lock, report);
  for (const auto& [span, chunk] : leaving) {
    const Address at = arena_.span(span).begin;
    lock.unlock();
    const MapOutcome outcome = unmap_and_release(driver_, at, {chunk});
    lock.lock();
    if (!outcome.is_clean) continue;
    arena_.finish_unmapped(span);
    held_.store(arena_.mapped_bytes().count, std::memory_order_relaxed);
    ++report->chunks_released;
    report->released += chunk.size;
    ++stats_.num_device_free;
    stats_.segment.decrease(1);
    stats_.reserved_bytes.decrease(static_cast<std::int64_t>(chunk.size.count));
    trace_.add(TraceKind::kShrink, at, chunk.size, Stream::kDefault);
  }
}

void DeviceAllocator::settle_all(Lock& lock) {
  clocks_.settle(StreamClocks::Settle::kWait, lock);
  ++stats_.num_sync_all_streams;
  arena_.drop_tags([&](const Tag& tag) { return clocks_.is_complete(tag); });
  arena_.merge_neighbours();
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
