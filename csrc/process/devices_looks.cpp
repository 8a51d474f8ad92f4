// Sums over the devices, and looks at one of them.
#include "process/devices.h"
#include "process/thread_note.h"

namespace vramx {

// --- sums over devices --------------------------------------------------------------------------

void Devices::trim(int device) {
  for_each_started(device, [](int, DeviceAllocator& allocator) { allocator.trim(); });
}

CoreReport Devices::defragment(int device) {
  CoreReport sum;
  for_each_started(device, [&](int, DeviceAllocator& allocator) {
    const DefragmentReport report = allocator.defragment();
    sum.aliases_collected += report.aliases_collected;
    sum.extents_before += report.extents_before;
    sum.extents_after += report.extents_after;
    sum.released += report.released;
  });
  return sum;
}

Bytes Devices::held(int device) const {
  Bytes sum{};
  for_each_started(device, [&](int, const DeviceAllocator& each) { sum += each.held(); });
  return sum;
}

Bytes Devices::allocated(int device) const {
  Bytes sum{};
  for_each_started(device, [&](int, const DeviceAllocator& each) { sum += each.allocated(); });
  return sum;
}

void Devices::reset_peak_stats(int device) {
  for_each_started(device, [](int, DeviceAllocator& each) { each.reset_peak_stats(); });
}

void Devices::reset_accumulated_stats(int device) {
  for_each_started(device, [](int, DeviceAllocator& each) { each.reset_accumulated_stats(); });
}

void Devices::for_each_piece(int device, Visit visit, void* context) const {
  for_each_started(device, [&](int number, const DeviceAllocator& allocator) {
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

// --- looks --------------------------------------------------------------------------------------

Bytes Devices::largest_obtainable(int device) {
  DeviceAllocator* const allocator = started(device);
  return allocator == nullptr ? Bytes{} : allocator->largest_obtainable();
}

AllocatorStats Devices::stats(int device) const {
  const DeviceAllocator* const allocator = started(device);
  return allocator == nullptr ? AllocatorStats{} : allocator->stats();
}

AllocatorStats Devices::take_interval_stats(int device) {
  DeviceAllocator* const allocator = started(device);
  return allocator == nullptr ? AllocatorStats{} : allocator->take_interval_stats();
}

const char* Devices::out_of_memory_text() const { return out_of_memory_note().text(); }

const char* Devices::failure_text() const { return failure_note().text(); }

DeviceAllocator* Devices::started(int device) const {
  if (!is_number(device) || is_in_child()) return nullptr;
  return slot(device).allocator.load(std::memory_order_acquire);
}

const Driver* Devices::driver(int device) const {
  return started(device) == nullptr ? nullptr : slot(device).driver.get();
}

Bytes Devices::capacity(int device) const {
  if (is_in_child()) return {};
  if (const DeviceAllocator* const allocator = started(device)) return allocator->capacity();
  return source_->capacity(device);
}

}  // namespace vramx
