// The functions of the table: each finds the devices behind `self` and asks them.
#include "process/core_table.h"

#include <algorithm>

#include "process/devices.h"
#include "process/thread_note.h"

namespace vramx {
namespace {

Devices& devices_of(void* self) { return *static_cast<Devices*>(self); }

// --- blocks ---

CoreCode allocate(void* self, std::int32_t device, Bytes size, Stream stream, Address* address) {
  return devices_of(self).allocate(device, size, stream, address);
}

CoreCode free_block(void* self, Address address, CoreBlock* freed) {
  return devices_of(self).free(address, freed);
}

CoreCode record_stream(void* self, Address address, Stream stream) {
  return devices_of(self).record_stream(address, stream);
}

CoreCode find(void* self, Address address, CoreBlock* block) {
  return devices_of(self).find_block(address, block);
}

// --- memory given back, and bounded ---

void trim(void* self, std::int32_t device) {
  devices_of(self).for_each_started(device,
                                    [](int, DeviceAllocator& allocator) { allocator.trim(); });
}

CoreReport defragment(void* self, std::int32_t device) {
  CoreReport sum;
  devices_of(self).for_each_started(device, [&](int, DeviceAllocator& allocator) {
    const DefragmentReport report = allocator.defragment();
    sum.aliases_collected += report.aliases_collected;
    sum.extents_before += report.extents_before;
    sum.extents_after += report.extents_after;
    sum.released += report.released;
  });
  return sum;
}

void set_limit(void* self, std::int32_t device, Bytes limit) {
  devices_of(self).set_limit(device, limit);
}

void add_relief(void* self, void (*relieve)(void* context, std::int32_t device), void* context) {
  devices_of(self).add_relief([=](int device) { relieve(context, device); });
}

// --- looks ---

Bytes held(void* self, std::int32_t device) {
  Bytes sum{};
  devices_of(self).for_each_started(
      device, [&](int, const DeviceAllocator& allocator) { sum += allocator.held(); });
  return sum;
}

Bytes allocated(void* self, std::int32_t device) {
  Bytes sum{};
  devices_of(self).for_each_started(
      device, [&](int, const DeviceAllocator& allocator) { sum += allocator.allocated(); });
  return sum;
}

Bytes largest_obtainable(void* self, std::int32_t device) {
  DeviceAllocator* const allocator = devices_of(self).started(device);
  return allocator == nullptr ? Bytes{} : allocator->largest_obtainable();
}

AllocatorStats stats(void* self, std::int32_t device) {
  const DeviceAllocator* const allocator = devices_of(self).started(device);
  return allocator == nullptr ? AllocatorStats{} : allocator->stats();
}

void reset_peak_stats(void* self, std::int32_t device) {
  devices_of(self).for_each_started(
      device, [](int, DeviceAllocator& allocator) { allocator.reset_peak_stats(); });
}

void reset_accumulated_stats(void* self, std::int32_t device) {
  devices_of(self).for_each_started(
      device, [](int, DeviceAllocator& allocator) { allocator.reset_accumulated_stats(); });
}

void for_each_piece(void* self, std::int32_t device,
                    void (*visit)(void* context, const CorePiece& piece), void* context) {
  devices_of(self).for_each_started(device, [&](int number, const DeviceAllocator& allocator) {
    Address end;
    allocator.for_each_piece([&](const HeldPiece& piece) {
      const LiveBlock& block = piece.block;
      visit(context, {{block.address, block.size, block.requested, block.stream, number},
                      piece.begin,
                      piece.size,
                      piece.begin != end});
      end = piece.begin + piece.size;
    });
  });
}

void set_observer(void* self, void (*observe)(void* context, const CoreEvent& event),
                  void* context) {
  if (observe == nullptr) return devices_of(self).set_observer(nullptr);
  devices_of(self).set_observer([=](const CoreEvent& event) { observe(context, event); });
}

const char* out_of_memory_text(void*) { return out_of_memory_note().text(); }
const char* failure_text(void*) { return failure_note().text(); }
bool is_in_child(void* self) { return devices_of(self).is_in_child(); }

// --- other devices ---

CoreCode allow_peer(void* self, std::int32_t device, std::int32_t peer) {
  return devices_of(self).allow_peer(device, peer);
}

}  // namespace

CoreTable make_core_table(Devices& devices) {
  CoreTable table;
  table.size_bytes = sizeof(CoreTable);
  table.self = &devices;
  table.allocate = allocate;
  table.free = free_block;
  table.record_stream = record_stream;
  table.find = find;
  table.trim = trim;
  table.defragment = defragment;
  table.set_limit = set_limit;
  table.add_relief = add_relief;
  table.held = held;
  table.allocated = allocated;
  table.largest_obtainable = largest_obtainable;
  table.stats = stats;
  table.reset_peak_stats = reset_peak_stats;
  table.reset_accumulated_stats = reset_accumulated_stats;
  table.for_each_piece = for_each_piece;
  table.set_observer = set_observer;
  table.out_of_memory_text = out_of_memory_text;
  table.failure_text = failure_text;
  table.is_in_child = is_in_child;
  table.allow_peer = allow_peer;
  return table;
}

}  // namespace vramx
