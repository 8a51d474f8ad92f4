// The device allocators of this process: one for each device, started by its first allocation.
//
// Finds the allocator of a device by its number and of an address by its range, says what went
// wrong in words, and keeps what was asked for devices that are not there yet. It has no policy of
// its own: the allocators have that, and whose memory an unknown address is is its caller's
// business.
//
//   slots     device 0        device 1     device 2 ...
//                │               │            (not started)
//   regions   arena 0, aliases 0, arena 1, aliases 1      in the order of the starts, only added
//
// Thread-safe. A started device and its regions are published by one store and never change, so
// that finding them takes no lock, not even while another device is being started, which may take
// seconds. Inert in a forked child: it answers kForked, takes no lock and calls no driver. Finding
// an allocator is one read; finding an address's compares two ranges for each device started
// before.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/device_allocator.h"
#include "core/driver.h"
#include "core/fork_guard.h"
#include "process/core_table.h"
#include "process/device_source.h"

namespace vramx {

struct DevicesOptions {
  AllocatorConfig config;
  bool is_for_all = true;
  std::vector<int> devices;  // those that may be started, where it is not for all
};

class Devices {
 public:
  static constexpr int kAll = -1;
  static constexpr int kMostDevices = 64;

  Devices(std::unique_ptr<DeviceSource> source, DevicesOptions options);
  // To be destroyed when nobody has a block any more, which for real GPUs is never: tensors outlive
  // everything.
  ~Devices() = default;
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;

  // This object as C functions; lives as long as it does.
  const CoreTable& table() const { return table_; }

  // --- blocks: core_table.h says what each does -------------------------------------------------
  CoreCode allocate(int device, Bytes size, Stream stream, Address* address);
  CoreCode free(Address address, CoreBlock* freed);
  CoreCode record_stream(Address address, Stream stream);
  CoreCode find_block(Address address, CoreBlock* block) const;

  // --- what is kept for devices to come ---------------------------------------------------------
  void set_limit(int device, Bytes limit);
  void add_relief(std::function<void(int device)> relieve);
  void set_observer(std::function<void(const CoreEvent&)> observe);
  CoreCode allow_peer(int device, int peer);

  // --- looks ------------------------------------------------------------------------------------
  // The allocator of a device; null before its start and in a forked child.
  DeviceAllocator* started(int device) const;
  // Calls visit(device, allocator) for the device, or all with kAll, that was started.
  template <class Visit>
  void for_each_started(int device, Visit visit) const;
  const Driver* driver(int device) const;  // of a started device, else null
  Bytes capacity(int device) const;        // of any device; zero where it does not exist
  bool is_in_child() const { return fork_guard_.is_in_child(); }

 private:
  struct Slot {
    std::atomic<DeviceAllocator*> allocator{nullptr};  // set once, when all else is ready
    std::unique_ptr<Driver> driver;                    // outlives the allocator
    std::unique_ptr<DeviceAllocator> owner;
    std::string failure;  // why it cannot be used, for good; empty where it can
    Bytes limit{};
    std::vector<int> peers;  // to be let in at its start
  };
  // Not set to anything beforehand, which would cost more than all else on the hot path.
  union RoomForReport {
    RoomForReport() {}  // NOLINT(modernize-use-equals-default)
    OutOfMemory report;
  };
  // Addresses of one device.
  struct Region {
    Address begin;
    Bytes size;
    DeviceAllocator* allocator = nullptr;
    int device = -1;
  };

  static bool is_number(int device) { return device >= 0 && device < kMostDevices; }
  Slot& slot(int device) { return slots_[static_cast<std::size_t>(device)]; }
  const Slot& slot(int device) const { return slots_[static_cast<std::size_t>(device)]; }
  const Region* region_of(Address address) const;
  CoreCode start(int device, DeviceAllocator** allocator);
  CoreCode open(int device);
  static CoreCode refuse_number(int device);
  CoreCode refuse(int device, const Status& status);
  bool is_accepted(int device) const;
  Status connect(int device, DeviceAllocator& allocator) const;
  void publish(int device);
  HoldingObserver observer_of(int device) const;
  CoreCode explain(int device, const OutOfMemory& why) const;
  static CoreCode free_and_tell(const Region& region, Address address, CoreBlock* freed);

  const std::unique_ptr<DeviceSource> source_;
  const DevicesOptions options_;
  const ForkGuard fork_guard_;
  const CoreTable table_;

  std::array<Slot, kMostDevices> slots_;
  std::array<Region, 2 * kMostDevices> regions_;
  std::atomic<int> region_count_{0};

  // Of the slots' plain members and of all below. Held while a device starts, never while a relief
  // or the observer is called.
  mutable std::mutex mutex_;
  std::vector<std::function<void(int)>> reliefs_;
  std::function<void(const CoreEvent&)> observer_;
};

CoreTable make_core_table(Devices& devices);

// --- the hot path: what is written here in the header is compiled into the table's functions
// ------

inline CoreCode Devices::allocate(int device, Bytes size, Stream stream, Address* address) {
  DeviceAllocator* allocator =
      is_number(device) ? slot(device).allocator.load(std::memory_order_acquire) : nullptr;
  if (allocator == nullptr) [[unlikely]] {
    const CoreCode code = start(device, &allocator);
    if (code != CoreCode::kOk) return code;
  }
  RoomForReport why;
  const Result<Address> made = allocator->allocate(size, stream, &why.report);
  if (!made.ok()) [[unlikely]] {
    return explain(device, why.report);
  }
  *address = made.value();
  return CoreCode::kOk;
}

inline const Devices::Region* Devices::region_of(Address address) const {
  const int count = region_count_.load(std::memory_order_acquire);
  for (int i = 0; i < count; ++i) {
    const Region& region = regions_[static_cast<std::size_t>(i)];
    if (address - region.begin < region.size) return &region;
  }
  return nullptr;
}

inline CoreCode Devices::free(Address address, CoreBlock* freed) {
  const Region* const region = region_of(address);
  if (region == nullptr) return CoreCode::kNotOurs;
  if (is_in_child()) return CoreCode::kForked;
  if (freed != nullptr) return free_and_tell(*region, address, freed);
  return region->allocator->free(address).ok() ? CoreCode::kOk : CoreCode::kNotOurs;
}

template <class Visit>
void Devices::for_each_started(int device, Visit visit) const {
  const int first = device == kAll ? 0 : device;
  const int last = device == kAll ? kMostDevices - 1 : device;
  for (int i = first; i <= last; ++i) {
    if (DeviceAllocator* const allocator = started(i)) visit(i, *allocator);
  }
}

}  // namespace vramx
