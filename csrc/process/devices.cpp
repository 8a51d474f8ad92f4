#include "process/devices.h"

#include <algorithm>
#include <utility>

#include "process/thread_note.h"

namespace vramx {

Devices::Devices(std::unique_ptr<DeviceSource> source, DevicesOptions options)
    : source_(std::move(source)), options_(std::move(options)), handle_{.allocators = this} {
  for (Slot& slot : slots_) slot.limit = options_.config.limit.count;
}

// --- forks --------------------------------------------------------------------------------------

// Says whether this is the process of these devices after all: a child of one that had used no GPU
// and held no lock is as good as its parent. Until a thread of the child has taken over, none holds
// the lock, so the count is the parent's.
bool Devices::take_over() const {
  if (!is_in_use_.load() && lock_count_.load() == 0) fork_guard_.renew();
  return !fork_guard_.is_in_child();
}

void Devices::note_use() {
  if (!is_in_child()) is_in_use_.store(true);
}

// --- blocks -------------------------------------------------------------------------------------

// A child has no report.
CoreCode Devices::explain(int device, const OutOfMemory& why) const {
  if (is_in_child()) return CoreCode::kForked;
  out_of_memory_note().write(why.message(device));
  return CoreCode::kOutOfMemory;
}

CoreCode Devices::free_and_tell(const Region& region, Address address, CoreBlock* freed) {
  LiveBlock block;
  if (!region.allocator->free(address, &block).ok()) return CoreCode::kNotOurs;
  *freed = {block.address, block.size, block.requested, block.stream, region.device};
  return CoreCode::kOk;
}

CoreCode Devices::record_stream(Address address, StreamName stream, bool is_lasting) {
  const Region* const region = region_of(address);
  if (region == nullptr) return CoreCode::kNotOurs;
  if (is_in_child()) return CoreCode::kForked;
  const Status recorded = region->allocator->record_stream(address, stream, is_lasting);
  return recorded.ok() ? CoreCode::kOk : CoreCode::kNotOurs;
}

CoreCode Devices::find(Address address, CoreBlock* block) const {
  const Region* const region = region_of(address);
  if (region == nullptr) return CoreCode::kNotOurs;
  if (is_in_child()) return CoreCode::kForked;
  const Result<LiveBlock> found = region->allocator->find(address);
  if (!found.ok()) return CoreCode::kNotOurs;
  const LiveBlock& live = found.value();
  *block = {live.address, live.size, live.requested, live.stream, region->device};
  return CoreCode::kOk;
}

CoreCode Devices::refuse_number(int device) {
  failure_note().write("GPU " + std::to_string(device) + " is not a device: accepted are 0 to " +
                       std::to_string(kMostDevices - 1));
  return CoreCode::kUnavailable;
}

// --- the start of a device ----------------------------------------------------------------------

CoreCode Devices::start(int device, DeviceAllocator** allocator) {
  if (is_in_child()) return CoreCode::kForked;
  if (!is_number(device)) return refuse_number(device);
  const Lock lock(*this);
  Slot& wanted = slot(device);
  if (!wanted.owner) {
    if (wanted.failure.empty() && !is_accepted(device)) {
      wanted.failure = "GPU " + std::to_string(device) +
                       " is not among the devices that the allocator was installed for";
    }
    if (!wanted.failure.empty()) {
      failure_note().write(wanted.failure);
      return CoreCode::kUnavailable;
    }
    if (const CoreCode code = open(device); code != CoreCode::kOk) return code;
  }
  *allocator = wanted.owner.get();
  return CoreCode::kOk;
}

bool Devices::is_accepted(int device) const {
  return options_.is_for_all || std::find(options_.devices.begin(), options_.devices.end(),
                                          device) != options_.devices.end();
}

CoreCode Devices::open(int device) {
  is_in_use_.store(true);
  Result<std::unique_ptr<Driver>> driver = source_->open(device);
  if (!driver.ok()) return refuse(device, driver.status());
  auto allocator = DeviceAllocator::create(*driver.value(), options_.config);
  if (!allocator.ok()) return refuse(device, allocator.status());
  const Status connected = connect(device, *allocator.value());
  if (!connected.ok()) return refuse(device, connected);
  slot(device).driver = std::move(driver.value());
  slot(device).owner = std::move(allocator.value());
  publish(device);
  return CoreCode::kOk;
}

// A device that others have filled may have room later; any other failure is for good.
CoreCode Devices::refuse(int device, const Status& status) {
  const std::string name = "GPU " + std::to_string(device);
  if (status.code == StatusCode::kOutOfMemory) {
    out_of_memory_note().write("CUDA out of memory. " + name + " has no room to be started (" +
                               status.call + "). Stop other processes that use it.");
    return CoreCode::kOutOfMemory;
  }
  std::string text = name + " cannot be used: " + status.call + " failed with " +
                     std::to_string(status.driver_code);
  if (const std::string reason = source_->reason(status); !reason.empty()) text += ": " + reason;
  slot(device).failure = text;
  failure_note().write(text);
  return CoreCode::kUnavailable;
}

// Gives a new allocator what was asked for while it was not there.
Status Devices::connect(int device, DeviceAllocator& allocator) const {
  allocator.set_limit(slot(device).bound());
  for (const Relief& each : reliefs_) {
    allocator.add_relief([each, device] { each.relieve(each.context, device); });
  }
  allocator.set_observer(observer_of(device));
  allocator.set_surroundings(surroundings_);
  for (const int peer : slot(device).peers) {
    if (const Status allowed = allocator.allow_peer(peer); !allowed.ok()) return allowed;
  }
  return ok_status();
}

HoldingObserver Devices::observer_of(int device) const {
  if (observe_ == nullptr) return nullptr;
  return [observe = observe_, context = observed_by_, device](Holding change, const Piece& range) {
    const bool is_mapped = change == Holding::kMapped;
    observe(context, {is_mapped ? CoreEventKind::kMapped : CoreEventKind::kUnmapped, device,
                      range.begin, range.size});
  };
}

void Devices::publish(int device) {
  DeviceAllocator* const allocator = slot(device).owner.get();
  auto count = static_cast<std::size_t>(region_count_.load(std::memory_order_relaxed));
  for (const Piece& range : {allocator->arena_addresses(), allocator->alias_addresses()}) {
    regions_[count++] = {range.begin, range.size, allocator, device};
  }
  region_count_.store(static_cast<int>(count), std::memory_order_release);
  slot(device).allocator.store(allocator, std::memory_order_release);
}

// --- what is kept for devices to come -----------------------------------------------------------

void Devices::set_limit(int device, Bytes limit) {
  if (is_in_child()) return;
  for (int i = 0; i < kMostDevices; ++i) {
    if (device == kAll || device == i) slot(i).limit = limit.count;
  }
  apply_bounds(device);
}

void Devices::set_share(int device, Bytes share) {
  if (is_in_child() || !is_number(device)) return;
  slot(device).share = share.count;
  apply_bounds(device);
}

// A limit may be set from inside another allocator's lock: it does not wait for a start then.
void Devices::apply_bounds(int device) {
  if (DeviceAllocator* const allocator = started(device)) {
    return allocator->set_limit(slot(device).bound());
  }
  const Lock lock(*this);
  for (int i = 0; i < kMostDevices; ++i) {
    if ((device == kAll || device == i) && slot(i).owner) {
      slot(i).owner->set_limit(slot(i).bound());
    }
  }
}

void Devices::add_relief(Relieve relieve, void* context) {
  if (is_in_child()) return;
  const Lock lock(*this);
  for_each_started(kAll, [&](int device, DeviceAllocator& allocator) {
    allocator.add_relief([=] { relieve(context, device); });
  });
  reliefs_.push_back({relieve, context});
}

void Devices::set_observer(Observe observe, void* context) {
  if (is_in_child()) return;
  const Lock lock(*this);
  observe_ = observe;
  observed_by_ = context;
  for_each_started(kAll, [&](int device, DeviceAllocator& allocator) {
    allocator.set_observer(observer_of(device));
  });
}

void Devices::set_surroundings(const Surroundings* surroundings) {
  if (is_in_child()) return;
  const Lock lock(*this);
  surroundings_ = surroundings;
  for_each_started(kAll, [&](int, DeviceAllocator& each) { each.set_surroundings(surroundings); });
}

CoreCode Devices::allow_peer(int device, int peer) {
  if (is_in_child()) return CoreCode::kForked;
  if (!is_number(device)) return refuse_number(device);
  {
    const Lock lock(*this);
    if (!slot(device).owner) {
      slot(device).peers.push_back(peer);
      return CoreCode::kOk;
    }
  }
  const Status status = slot(device).owner->allow_peer(peer);
  if (status.ok()) return CoreCode::kOk;
  failure_note().write("GPU " + std::to_string(peer) + " cannot be given access to GPU " +
                       std::to_string(device) + ": " + status.call + " failed with " +
                       std::to_string(status.driver_code));
  return CoreCode::kUnavailable;
}

}  // namespace vramx
