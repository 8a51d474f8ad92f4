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
// seconds. Inert in a child that was forked from a process with a GPU in use: it answers kForked,
// takes no lock and calls no driver. Forked before that, a child goes on where its parent was.
// Finding an allocator is one read; finding an address's compares two ranges for each device
// started before.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/device_allocator.h"
#include "core/driver.h"
#include "core/fork_guard.h"
#include "process/allocators.h"
#include "process/device_source.h"

namespace vramx {

struct DevicesOptions {
  AllocatorConfig config;
  bool is_for_all = true;
  std::vector<int> devices;  // those that may be started, where it is not for all
};

class Devices final : public Allocators {
 public:
  static constexpr int kMostDevices = 64;

  Devices(std::unique_ptr<DeviceSource> source, DevicesOptions options);
  // To be destroyed when nobody has a block any more, which for real GPUs is never: tensors outlive
  // everything.
  ~Devices() = default;
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;

  // This object for code that is compiled apart; lives as long as it does.
  const AllocatorsHandle& handle() const { return handle_; }

  // --- process/allocators.h says what each does -------------------------------------------------
  CoreCode allocate(int device, Bytes size, Stream stream, Address* address) override;
  CoreCode free(Address address, CoreBlock* freed) override;
  CoreCode record_stream(Address address, StreamName stream, bool is_lasting) override;
  CoreCode find(Address address, CoreBlock* block) const override;
  void trim(int device) override;
  CoreReport defragment(int device) override;
  void set_limit(int device, Bytes limit) override;
  void add_relief(Relieve relieve, void* context) override;
  Bytes held(int device) const override;
  Bytes allocated(int device) const override;
  Bytes largest_obtainable(int device) override;
  AllocatorStats stats(int device) const override;
  AllocatorStats take_interval_stats(int device) override;
  void reset_peak_stats(int device) override;
  void reset_accumulated_stats(int device) override;
  void for_each_piece(int device, Visit visit, void* context) const override;
  void set_observer(Observe observe, void* context) override;
  void set_surroundings(const Surroundings* surroundings) override;
  const char* out_of_memory_text() const override;
  const char* failure_text() const override;
  bool is_in_child() const override { return fork_guard_.is_in_child() && !take_over(); }
  void note_use() override;
  CoreCode allow_peer(int device, int peer) override;

  // A second limit of a device, for torch's fraction: the lower one holds. UINT64_MAX for none.
  void set_share(int device, Bytes share);

  // --- looks ------------------------------------------------------------------------------------
  // The allocator of a device; null before its start and in a forked child.
  DeviceAllocator* started(int device) const;
  // Calls act(device, allocator) for the device, or all with kAll, that was started.
  template <class Action>
  void for_each_started(int device, Action act) const;
  const Driver* driver(int device) const;  // of a started device, else null
  Bytes capacity(int device) const;        // of any device; zero where it does not exist

 private:
  struct Slot {
    std::atomic<DeviceAllocator*> allocator{nullptr};  // set once, when all else is ready
    std::unique_ptr<Driver> driver;                    // outlives the allocator
    std::unique_ptr<DeviceAllocator> owner;
    std::string failure;  // why it cannot be used, for good; empty where it can
    std::atomic<std::uint64_t> limit{UINT64_MAX};  // set_limit()
    std::atomic<std::uint64_t> share{UINT64_MAX};  // set_share()

    Bytes bound() const { return {std::min(limit.load(), share.load())}; }
    std::vector<int> peers;  // to be let in at its start
  };
  // Not set to anything beforehand, which would cost more than all else on the hot path.
  union RoomForReport {
    RoomForReport() {}  // NOLINT(modernize-use-equals-default)
    OutOfMemory report;
  };
  struct Relief {
    Relieve relieve = nullptr;
    void* context = nullptr;
  };
  // Addresses of one device.
  struct Region {
    Address begin;
    Bytes size;
    DeviceAllocator* allocator = nullptr;
    int device = -1;
  };

  // Holds mutex_, and tells a child that is forked meanwhile, which could never get it.
  class Lock {
   public:
    explicit Lock(const Devices& devices) : devices_(devices) {
      ++devices_.lock_count_;
      devices_.mutex_.lock();
    }
    ~Lock() {
      devices_.mutex_.unlock();
      --devices_.lock_count_;
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    const Devices& devices_;
  };

  static bool is_number(int device) { return device >= 0 && device < kMostDevices; }
  Slot& slot(int device) { return slots_[static_cast<std::size_t>(device)]; }
  const Slot& slot(int device) const { return slots_[static_cast<std::size_t>(device)]; }
  const Region* region_of(Address address) const;
  bool take_over() const;
  void apply_bounds(int device);
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
  mutable ForkGuard fork_guard_;
  const AllocatorsHandle handle_;

  std::array<Slot, kMostDevices> slots_;
  std::array<Region, 2 * kMostDevices> regions_;
  std::atomic<int> region_count_{0};
  std::atomic<bool> is_in_use_{false};      // a GPU, by this process; never cleared
  mutable std::atomic<int> lock_count_{0};  // of Lock objects

  // Of the slots' plain members and of all below. Held while a device starts, never while a relief
  // or the observer is called.
  mutable std::mutex mutex_;
  std::vector<Relief> reliefs_;
  Observe observe_ = nullptr;
  void* observed_by_ = nullptr;  // the context of observe_
  const Surroundings* surroundings_ = nullptr;
};

// --- the hot path -------------------------------------------------------------------------------

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

template <class Action>
void Devices::for_each_started(int device, Action act) const {
  const int first = device == kAll ? 0 : device;
  const int last = device == kAll ? kMostDevices - 1 : device;
  for (int i = first; i <= last; ++i) {
    if (DeviceAllocator* const allocator = started(i)) act(i, *allocator);
  }
}

}  // namespace vramx
