// The part of DeviceAllocator that only looks: statistics, layout, the text of an out-of-memory
// error, and check().
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

std::string OutOfMemory::message() const {
  std::string text = "CUDA out of memory. Tried to allocate " + binary(requested) + ". ";
  if (device.total) {
    text += "The device has " + binary(device.total) + ", of which " + binary(device.free) +
            " is free. ";
  }
  text += "vramx holds " + binary(held) + ": " + binary(live) + " live and " + binary(free) +
          " free in " + std::to_string(extents) + " pieces, the largest " + binary(largest_extent) +
          ", " + binary(whole_chunks) + " in whole chunks.";
  if (limit != Bytes{UINT64_MAX}) text += " Its limit is " + binary(limit) + ".";
  text += limit != Bytes{UINT64_MAX} ? " Try a smaller batch or a higher limit."
                                     : " Try a smaller batch.";
  return text;
}

AllocatorStats DeviceAllocator::stats() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  AllocatorStats stats = stats_;
  stats.note_extents(arena_.extent_count(), arena_.free_bytes());
  stats.alias_count = static_cast<std::int64_t>(aliases_.count());
  stats.alias_mappings = static_cast<std::int64_t>(aliases_.mappings());
  stats.alias_bytes = static_cast<std::int64_t>(aliases_.bytes().count);
  stats.host_bytes = static_cast<std::int64_t>(arena_.host_bytes() + blocks_.host_bytes() +
                                               aliases_.host_bytes() + clocks_.host_bytes());
  return stats;
}

void DeviceAllocator::reset_peak_stats() {
  if (fork_guard_.is_in_child()) return;
  const Lock lock(mutex_);
  stats_.reset_peak();
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

std::vector<SpanInfo> DeviceAllocator::layout() const {
  if (fork_guard_.is_in_child()) return {};
  const Lock lock(mutex_);
  std::unordered_map<SpanId, Address> owners;
  blocks_.for_each([&](const Block& block) {
    for (SpanId id = block.first_span; id != kNoId; id = arena_.next_in_block(id)) {
      owners[id] = block.address;
    }
  });
  std::vector<SpanInfo> spans;
  for (SpanId id = arena_.first(); id != kNoId; id = arena_.span(id).next) {
    const Span& span = arena_.span(id);
    const auto owner = owners.find(id);
    const Address block = owner == owners.end() ? Address{} : owner->second;
    spans.push_back({span.begin, span.size, span.state, block, block && !arena_.contains(block)});
  }
  return spans;
}

std::string DeviceAllocator::check_blocks() const {
  std::unordered_set<SpanId> owned;
  Bytes sum{};
  std::string broken;
  blocks_.for_each([&](const Block& block) {
    Bytes size{};
    for (SpanId id = block.first_span; id != kNoId; id = arena_.next_in_block(id)) {
      if (!owned.insert(id).second) broken = "block 2: a span belongs to two blocks";
      if (arena_.span(id).state != SpanState::kUsed) broken = "block 2: a block's span is not used";
      size += arena_.span(id).size;
    }
    if (size != round_up(max(block.requested, kBlockUnit), kBlockUnit)) {
      broken = "block 2: the spans of a block add up to " + std::to_string(size.count);
    }
    if (block.alias != kNoId && aliases_[block.alias].pins == 0) {
      broken = "alias 3: a block lives in an alias that is not pinned";
    }
    sum += size;
  });
  if (!broken.empty()) return broken;
  if (sum != allocated()) return "block 1: allocated bytes " + std::to_string(allocated().count);
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
  for (const SpanId id : arena_.largest(kBlockUnit, SIZE_MAX, Arena::kAnyStream)) {
    const TagSet tags = arena_.tags_of(id);
    if (std::string broken = clocks_.check(tags); !broken.empty()) return broken;
  }
  return {};
}

}  // namespace vramx
