// What the checks of the process layer share: a source of simulated devices that counts what it is
// asked, fails on request and can be held up; and the devices on it, behind their interface.
//
// Expectations and the tally are the contract suite's.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "contract.h"
#include "process/devices.h"

namespace vramx::process_checks {

using namespace vramx::literals;

constexpr Bytes kCapacity = 64_MiB;
constexpr Stream kStream = Stream::kDefault;

// Devices 0 to 7, each of 64 MiB without bytes.
class TestSource final : public DeviceSource {
 public:
  Result<std::unique_ptr<Driver>> open(int device) override {
    ++opened;
    wait_at_gate();
    const Status failure = failures.at(static_cast<std::size_t>(device));
    if (!failure.ok()) return failure;
    SimOptions options{.capacity = kCapacity, .mode = SimMode::kAccounting};
    options.first_address = {(static_cast<std::uint64_t>(device) + 1) << 46};
    auto sim = SimDriver::open(options);
    if (!sim.ok()) return sim.status();
    drivers.at(static_cast<std::size_t>(device)) = sim.value().get();
    if (refuses_peers) sim.value()->fail_call(CallKind::kAllowPeer, 1, StatusCode::kNotSupported);
    return std::unique_ptr<Driver>(std::move(sim.value()));
  }
  Bytes capacity(int) const override { return kCapacity; }
  std::string reason(const Status&) const override { return "as the test wants it"; }

  // The next open waits until the gate is opened; wait_until_held() returns when it does.
  void close_gate() { is_closed_ = true; }
  void open_gate() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = false;
    changed_.notify_all();
  }
  void wait_until_held() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return is_held_; });
  }

  std::atomic<int> opened{0};
  std::array<Status, 8> failures{};
  std::array<SimDriver*, 8> drivers{};
  bool refuses_peers = false;

 private:
  void wait_at_gate() {
    std::unique_lock<std::mutex> lock(mutex_);
    is_held_ = is_closed_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !is_closed_; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_closed_ = false;
  bool is_held_ = false;
};

struct Fixture {
  explicit Fixture(DevicesOptions options = {})
      : Fixture(std::make_unique<TestSource>(), options) {}

  CoreCode allocate(int device, Bytes size, Address* address) {
    return core.allocate(device, size, kStream, address);
  }
  Address take(int device, Bytes size) {
    Address address;
    return allocate(device, size, &address) == CoreCode::kOk ? address : Address{};
  }
  CoreCode free(Address address) { return core.free(address, nullptr); }
  std::string failure() const { return core.failure_text(); }
  std::string out_of_memory() const { return core.out_of_memory_text(); }

  TestSource& source;
  Devices devices;
  Allocators& core;

 private:
  Fixture(std::unique_ptr<TestSource> owned, DevicesOptions options)
      : source(*owned),
        devices(std::move(owned), with_few_addresses(std::move(options))),
        core(devices) {}
  static DevicesOptions with_few_addresses(DevicesOptions options) {
    options.config.alias_addresses = 4_GiB;
    return options;
  }
};

}  // namespace vramx::process_checks
