// The part of DeviceAllocator that only looks: statistics, layout, what could be had, the text of
// an out-of-memory error, and check(). Looks at every span, but for the statistics.
#include <algorithm>
#include <cstdio>
#include <unordered_map>
#include <unordered_set>

#include "core/device_allocator.h"

namespace vramx {
namespace {

std::string binary(Bytes size) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB"};
  double value = static_cast<double>(size.count);
  std::size_t unit = 0;
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text;
}

}  // namespace

std::string OutOfMemory::message(int ordinal) const {
  std::string text = "CUDA out of memory. Tried to allocate " + binary(requested) + ". ";
  if (device.total) {
    text += ordinal < 0 ? "The device" : "GPU " + std::to_string(ordinal);
    text += " has " + binary(device.total) + ", of which " + binary(device.free) + " is free. ";
  }
  text += "vramx holds " + binary(held) + ": " + binary(live) + " live and " + binary(free) +
          " free in " + std::to_string(extents) + " pieces, the largest " + binary(largest_extent) +
          ", " + binary(whole_chunks) + " in whole chunks.";
  if (limit != Bytes{UINT64_MAX}) text += " Its limit is " + binary(limit) + ".";
  text += limit != Bytes{UINT64_MAX} ? " Try a smaller batch, or set a higher limit."
                                     : " Try a smaller batch.";
  return text;
}

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
  stats_.note_extents(arena_.extent_count(), arena_.free_bytes());
  const AllocatorStats stats = interval_stats();
  earlier_peaks_.raise_peaks(stats);
  stats_.reset_peak();
  return stats;
}

AllocatorStats DeviceAllocator::interval_stats() const {
  AllocatorStats stats = stats_;
  stats.note_extents(arena_.extent_count(), arena_.free_bytes());
  stats.alias_count = static_cast<std::int64_t>(aliases_.count());
  stats.alias_mappings = static_cast<std::int64_t>(aliases_.mappings());
  stats.alias_bytes = static_cast<std::int64_t>(aliases_.bytes().count);
  const std::size_t details = details_.capacity() * sizeof(BlockDetails);
  stats.host_bytes = static_cast<std::int64_t>(
      arena_.host_bytes() + blocks_.host_bytes() + details + aliases_.host_bytes() +
      clocks_.host_bytes() + recurrence_.host_bytes() + lifetimes_.host_bytes());
  return stats;
}

void DeviceAllocator::reset_peak_stats() {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  stats_.note_extents(arena_.extent_count(), arena_.free_bytes());
  stats_.reset_peak();
  earlier_peaks_ = {};
}

void DeviceAllocator::reset_accumulated_stats() {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  stats_.reset_accumulated();
}

OutOfMemory DeviceAllocator::last_out_of_memory() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  return last_out_of_memory_;
}

std::vector<TraceEvent> DeviceAllocator::events() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  return trace_.events();
}

Result<LiveBlock> DeviceAllocator::find(Address address) const {
  const Status absent{StatusCode::kInvalidValue, 0, "not a live block"};
  if (fork_guard_.is_in_child()) return absent;
  const Lock lock(mutex_);
  const BlockTable::Entry found = find_block(address);
  if (found.span == kNoId) return absent;
  return live_block(found.span);
}

// The first span of the block of every used span that has one: a span that was only set aside has
// none.
std::unordered_map<SpanId, SpanId> DeviceAllocator::owners() const {
  std::unordered_map<SpanId, SpanId> found;
  blocks_.for_each([&](SpanId first) {
    for (SpanId id = first; id != kNoId; id = arena_.used(id).next) found[id] = first;
  });
  return found;
}

std::vector<SpanInfo> DeviceAllocator::layout() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  const std::unordered_map<SpanId, SpanId> owners = this->owners();
  std::vector<SpanInfo> spans;
  for (SpanId id = arena_.first(); id != kNoId; id = arena_.span(id).next) {
    const Span& span = arena_.span(id);
    const auto owner = owners.find(id);
    const Address block = owner == owners.end() ? Address{} : address_of(owner->second);
    spans.push_back({span.begin, span.size, span.state, block, block && !arena_.contains(block)});
  }
  return spans;
}

void DeviceAllocator::for_each_piece(const std::function<void(const HeldPiece&)>& visit) const {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  const std::unordered_map<SpanId, SpanId> owners = this->owners();
  std::vector<HeldPiece> pieces;
  for (SpanId id = arena_.first(); id != kNoId; id = arena_.span(id).next) {
    const Span& span = arena_.span(id);
    const bool is_held = span.state == SpanState::kUsed || span.state == SpanState::kFree ||
                         arena_.chunks().find(span.begin) != kNoId;
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

// What could be put together from free pieces alone: what a plan for too much has found.
Bytes DeviceAllocator::largest_stitch(StreamIndex stream) const {
  const Bytes too_much = arena_.mapped_bytes() + kBlockUnit;
  const Request request{too_much, stream, config_.cross_stream == CrossStream::kNever};
  return too_much - plan(request).missing;
}

Bytes DeviceAllocator::largest_obtainable() {
  if (fork_guard_.is_in_child()) return {};
  const Result<MemoryInfo> device = driver_.memory_info();
  const Lock lock(mutex_);
  const StreamIndex stream = clocks_.index_of(Stream::kDefault);
  const bool is_alone = config_.cross_stream == CrossStream::kNever;
  Bytes extent{};
  arena_.for_each_extent(is_alone ? stream : Arena::kAnyStream,
                         [&](SpanId id) { extent = max(extent, arena_.span(id).size); });
  const Bytes room = device.ok() ? min(this->room(), device.value().free) : Bytes{};
  Bytes growth = round_down(room, driver_.granularity());
  if (growth && arena_.gap_for(growth) == kNoId) growth = Bytes{};
  return max(extent, largest_stitch(stream) + growth);
}

std::string DeviceAllocator::check_blocks() const {
  std::unordered_set<SpanId> owned;
  std::unordered_map<AliasId, Bytes> in_alias;
  Bytes sum{};
  std::string broken;
  blocks_.for_each([&](SpanId first) {
    Bytes size{};
    for (SpanId id = first; id != kNoId; id = arena_.used(id).next) {
      if (arena_.span(id).state != SpanState::kUsed) {
        broken = "block 2: a block's span is not used";
        return;
      }
      if (!owned.insert(id).second) {
        broken = "block 2: a span belongs to two blocks";
        return;
      }
      size += arena_.span(id).size;
    }
    if (size != live_block(first).size) {
      broken = "block 2: the spans of a block add up to " + std::to_string(size.count);
    }
    if (const AliasId alias = alias_of(first); alias != kNoId) {
      Bytes& lived_in = in_alias[alias];
      lived_in += size;
      if (aliases_[alias].pins == 0 || lived_in > aliases_[alias].pinned) {
        broken = "alias 3: a block lives in an alias and is not pinned there";
      }
    }
    sum += size;
  });
  if (!broken.empty()) return broken;
  const Bytes counted{static_cast<std::uint64_t>(stats_.allocated_bytes[0].current)};
  for (const Bytes claimed : {counted, allocated()}) {
    if (sum != claimed) return "block 1: allocated bytes " + std::to_string(claimed.count);
  }
  return {};
}

// Callers that allocate at the same time hold spans that no block owns yet, so block 1 and block 2
// are only claimed of what is published.
std::string DeviceAllocator::check() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  if (std::string broken = arena_.check(); !broken.empty()) return broken;
  if (std::string broken = check_blocks(); !broken.empty()) return broken;
  if (std::string broken = aliases_.check(arena_); !broken.empty()) return broken;
  if (std::string broken = recurrence_.check(); !broken.empty()) return broken;
  if (std::string broken = lifetimes_.check(); !broken.empty()) return broken;
  std::string broken;
  arena_.for_each_extent(Arena::kAnyStream, [&](SpanId id) {
    if (broken.empty()) broken = clocks_.check(arena_.tags_of(id));
  });
  return broken;
}

}  // namespace vramx
