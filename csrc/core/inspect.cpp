// The part of DeviceAllocator that only looks: statistics, layout, what could be had, and check().
// Looks at every span, but for the statistics.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "core/device_allocator.h"

namespace vramx {
AllocatorStats DeviceAllocator::stats() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  AllocatorStats stats = interval_stats();
  stats.raise_peaks(earlier_peaks_);
  return stats;
}

AllocatorStats DeviceAllocator::take_interval_stats() {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  const AllocatorStats stats = interval_stats();
  earlier_peaks_.raise_peaks(stats);
  begin_interval();
  return stats;
}

void DeviceAllocator::begin_interval() {
  state_.blocks.reset_peak();
  state_.stats.reset_peak();
  state_.stats.note_extents(state_.arena.extent_count(), state_.arena.free_bytes());
}

AllocatorStats DeviceAllocator::interval_stats() const {
  AllocatorStats stats = state_.stats;
  state_.blocks.report(&stats);
  stats.inactive_split.current = static_cast<std::int64_t>(state_.arena.extent_count());
  stats.inactive_split_bytes.current = static_cast<std::int64_t>(state_.arena.free_bytes().count);
  stats.note_extents(state_.arena.extent_count(), state_.arena.free_bytes());
  stats.alias_count = static_cast<std::int64_t>(state_.aliases.count());
  stats.alias_mappings = static_cast<std::int64_t>(state_.aliases.mappings());
  stats.alias_bytes = static_cast<std::int64_t>(state_.aliases.bytes().count);
  stats.host_bytes = static_cast<std::int64_t>(state_.arena.host_bytes() + blocks_.host_bytes() +
                                               state_.aliases.host_bytes() +
                                               state_.order.host_bytes() + quick_.host_bytes());
  return stats;
}

void DeviceAllocator::reset_peak_stats() {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  begin_interval();
  earlier_peaks_ = {};
}

void DeviceAllocator::reset_accumulated_stats() {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  state_.blocks.reset_accumulated();
  state_.stats.reset_accumulated();
}

OutOfMemory DeviceAllocator::last_out_of_memory() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  return last_out_of_memory_;
}

std::vector<TraceEvent> DeviceAllocator::events() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  return state_.trace.events();
}

Result<LiveBlock> DeviceAllocator::find(Address address) const {
  const Status absent{StatusCode::kInvalidValue, 0, "not a live block"};
  if (fork_guard_.is_in_child()) return absent;
  const Lock lock(mutex_);
  const BlockTable::Entry found = blocks_.find(address);
  if (found.span == kNoId) return absent;
  return live_block(found.span);
}

// The first span of the block of every used span that has one: a span that was only set aside has
// none.
std::unordered_map<SpanId, SpanId> DeviceAllocator::owners() const {
  std::unordered_map<SpanId, SpanId> found;
  blocks_.for_each([&](SpanId first) {
    for (SpanId id = first; id != kNoId; id = state_.arena.used(id).next) found[id] = first;
  });
  return found;
}

std::vector<SpanInfo> DeviceAllocator::layout() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  const std::unordered_map<SpanId, SpanId> owners = this->owners();
  std::vector<SpanInfo> spans;
  for (SpanId id = state_.arena.first(); id != kNoId; id = state_.arena.span(id).next) {
    const Span& span = state_.arena.span(id);
    const auto owner = owners.find(id);
    const Address block = owner == owners.end() ? Address{} : blocks_.address_of(owner->second);
    spans.push_back(
        {span.begin, span.size, span.state, block, block && !state_.arena.contains(block)});
  }
  return spans;
}

void DeviceAllocator::for_each_piece(const std::function<void(const HeldPiece&)>& visit) const {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  const std::unordered_map<SpanId, SpanId> owners = this->owners();
  std::vector<HeldPiece> pieces;
  for (SpanId id = state_.arena.first(); id != kNoId; id = state_.arena.span(id).next) {
    const Span& span = state_.arena.span(id);
    const bool is_held = span.state == SpanState::kUsed || span.state == SpanState::kFree ||
                         state_.arena.chunks().find(span.begin) != kNoId;
    if (!is_held) continue;
    const auto owner = owners.find(id);
    const bool is_free = owner == owners.end();
    if (is_free) pieces.push_back({{}, span.begin, span.size});
    if (is_free || owner->second != id) continue;
    const LiveBlock block = live_block(id);
    pieces.push_back({block, block.address, block.size});
  }
  std::sort(pieces.begin(), pieces.end(),
            [](const HeldPiece& a, const HeldPiece& b) { return a.begin < b.begin; });
  for (const HeldPiece& piece : pieces) visit(piece);
}

// What could be put together from free pieces alone is what a plan for too much has found.
Bytes DeviceAllocator::largest_obtainable() {
  if (fork_guard_.is_in_child()) return {};
  const Result<MemoryInfo> device = state_.driver.memory_info();
  const Lock lock(mutex_);
  const bool is_alone = state_.config.cross_stream == CrossStream::kNever;
  const Request request{.size = state_.arena.mapped_bytes() + kBlockUnit,
                        .stream = state_.order.index_of(Stream::kDefault),
                        .reach = is_alone ? Reach::kAtOnce : Reach::kBehindWaits,
                        .most_growth = {}};
  Bytes extent{};
  state_.arena.for_each_extent([&](SpanId id) {
    if (!planner_.may_take(state_.arena.tags_of(id), request)) return;
    extent = max(extent, state_.arena.span(id).size);
  });
  const Bytes room = device.ok() ? min(state_.room(), device.value().free) : Bytes{};
  Bytes growth = round_down(room, state_.granularity);
  if (growth && state_.arena.gap_for(Zone::kLarge, growth) == kNoId) growth = Bytes{};
  return max(extent, planner_.largest_stitch(request) + growth);
}

std::string DeviceAllocator::check_blocks() const {
  std::unordered_set<SpanId> owned;
  std::unordered_map<AliasId, Bytes> in_alias;
  Bytes sum{};
  std::string broken;
  blocks_.for_each([&](SpanId first) {
    Bytes size{};
    for (SpanId id = first; id != kNoId; id = state_.arena.used(id).next) {
      if (state_.arena.span(id).state != SpanState::kUsed) {
        broken = "block 2: a block's span is not used";
        return;
      }
      if (!owned.insert(id).second) {
        broken = "block 2: a span belongs to two blocks";
        return;
      }
      size += state_.arena.span(id).size;
    }
    if (size != live_block(first).size) {
      broken = "block 2: the spans of a block add up to " + std::to_string(size.count);
    }
    if (const AliasId alias = blocks_.alias_of(first); alias != kNoId) {
      Bytes& lived_in = in_alias[alias];
      lived_in += size;
      if (state_.aliases[alias].pins == 0 || lived_in > state_.aliases[alias].pinned) {
        broken = "alias 3: a block lives in an alias and is not pinned there";
      }
    }
    sum += size;
  });
  if (!broken.empty()) return broken;
  for (const Bytes claimed : {state_.blocks.live_bytes(), allocated()}) {
    if (sum != claimed) return "block 1: allocated bytes " + std::to_string(claimed.count);
  }
  return {};
}

// Callers that allocate at the same time hold spans that no block owns yet, so block 1 and block 2
// are only claimed of what is published.
std::string DeviceAllocator::check() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  if (std::string broken = state_.arena.check(); !broken.empty()) return broken;
  if (std::string broken = check_blocks(); !broken.empty()) return broken;
  if (std::string broken = state_.aliases.check(state_.arena); !broken.empty()) return broken;
  if (std::string broken = quick_.check(); !broken.empty()) return broken;
  if (std::string broken = state_.order.check(); !broken.empty()) return broken;
  std::string broken;
  state_.arena.for_each_extent([&](SpanId id) {
    if (broken.empty()) broken = state_.order.check(state_.arena.tags_of(id));
  });
  return broken;
}

}  // namespace vramx
