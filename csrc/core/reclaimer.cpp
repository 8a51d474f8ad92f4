#include "core/reclaimer.h"

#include <algorithm>
#include <limits>
#include <set>

#include "core/mapper.h"

namespace vramx {

DefragmentReport Reclaimer::run(bool all_aliases, Lock& lock) {
  DefragmentReport report;
  report.extents_before = state_.arena.extent_count();
  state_.order.settle(lock);
  ++state_.stats.num_sync_all_streams;
  state_.drop_tags_over();
  executor_.retry_leftovers(lock);
  if (all_aliases) {
    collect(planner_.idle_aliases(std::numeric_limits<std::size_t>::max()), lock, &report);
  }
  release_whole_chunks(lock, &report);
  report.extents_after = state_.arena.extent_count();
  return report;
}

void Reclaimer::collect(const std::vector<AliasId>& ids, Lock& lock, DefragmentReport* report) {
  report->aliases_collected += executor_.unmap(ids, lock, &report->alias_addresses);
}

bool Reclaimer::waits_for_nothing(const Chunk& chunk) const {
  for (SpanId id = state_.arena.span_at(chunk.begin); state_.arena.is_extent(id);
       id = state_.arena.span(id).next) {
    if (state_.arena.span(id).begin >= chunk.end()) break;
    if (!state_.order.is_over(state_.arena.tags_of(id))) return false;
  }
  return true;
}

// The chunks that nothing uses: wholly free, waiting for nothing, in no alias that is in use.
std::vector<ChunkId> Reclaimer::releasable(std::vector<AliasId>* aliases) const {
  std::set<ChunkId> chunks;
  state_.arena.chunks().for_each([&](ChunkId id, const Chunk& chunk) {
    if (state_.arena.is_whole_free(id) && waits_for_nothing(chunk)) chunks.insert(id);
  });
  const std::vector<AliasId> idle = planner_.idle_aliases(std::numeric_limits<std::size_t>::max());
  const std::set<AliasId> are_idle(idle.begin(), idle.end());
  for (const AliasId id : state_.aliases.all()) {
    if (are_idle.contains(id)) continue;
    for (const ChunkId chunk : state_.aliases[id].chunks) chunks.erase(chunk);
  }
  for (const AliasId id : idle) {
    const std::vector<ChunkId>& mapped = state_.aliases[id].chunks;
    if (std::any_of(mapped.begin(), mapped.end(), [&](ChunkId c) { return chunks.contains(c); })) {
      aliases->push_back(id);
    }
  }
  return {chunks.begin(), chunks.end()};
}

// A chunk that is still mapped in an alias, because the driver would not unmap that, stays: its
// memory would not come free.
bool Reclaimer::is_releasable(ChunkId id) const {
  const Chunk& chunk = state_.arena.chunks()[id];
  return chunk.alias_count == 0 && state_.arena.is_whole_free(id) && waits_for_nothing(chunk);
}

// One after the other, so that whoever needs memory meanwhile finds all but one of them. Another
// chunk may lie there by then, even under the same handle, so only the address is kept.
void Reclaimer::release_whole_chunks(Lock& lock, DefragmentReport* report) {
  std::vector<AliasId> aliases;
  std::vector<Address> leaving;
  for (const ChunkId id : releasable(&aliases)) {
    leaving.push_back(state_.arena.chunks()[id].begin);
  }
  collect(aliases, lock, report);
  for (const Address begin : leaving) {
    const ChunkId id = state_.arena.chunks().find(begin);
    if (id == kNoId || !is_releasable(id)) continue;
    const Chunk chunk = state_.arena.chunks()[id];
    const InFlight in_flight(state_);
    const SpanId span = state_.arena.begin_removing(id);
    if (!release(chunk, lock)) {
      state_.arena.cancel_removing(span);
      continue;
    }
    state_.arena.finish_unmapped(span);
    state_.note_held();
    ++report->chunks_released;
    report->released += chunk.size;
    ++state_.stats.num_device_free;
    state_.stats.segment.decrease(1);
    state_.stats.reserved_bytes.decrease(static_cast<std::int64_t>(chunk.size.count));
    state_.trace.add(TraceKind::kShrink, chunk.begin, chunk.size, Stream::kDefault);
  }
}

// The observer is told before the addresses can be mapped again, so that it sees the changes of
// one range in their order.
bool Reclaimer::release(const Chunk& chunk, Lock& lock) {
  const HoldingObserver observer = state_.observer;
  lock.unlock();
  const MapOutcome outcome =
      unmap_and_release(state_.driver, chunk.begin, {{chunk.size, chunk.handle}});
  if (outcome.status.ok() && observer) observer(Holding::kUnmapped, {chunk.begin, chunk.size});
  lock.lock();
  state_.unreleased.insert(state_.unreleased.end(), outcome.unreleased.begin(),
                           outcome.unreleased.end());
  return outcome.status.ok();
}

}  // namespace vramx
