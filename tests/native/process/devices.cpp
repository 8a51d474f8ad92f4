// How devices are started and found, and what was asked for before they were there.
#include "process/devices.h"

#include <string>
#include <thread>
#include <vector>

#include "process/process.h"

namespace vramx::process_checks {
namespace devices_claims {
namespace {

constexpr Bytes kPiece = 8_MiB;

// --- the start ----------------------------------------------------------------------------------

void a_device_is_started_by_its_first_allocation(Fixture& fixture) {
  EXPECT(fixture.source.opened == 0 && fixture.devices.started(1) == nullptr);
  EXPECT(fixture.core.held(1) == Bytes{});
  EXPECT(fixture.core.stats(1).num_device_alloc == 0);
  EXPECT(static_cast<bool>(fixture.take(1, kPiece)));
  EXPECT(static_cast<bool>(fixture.take(1, kPiece)));
  EXPECT(fixture.source.opened == 1 && fixture.devices.started(1) != nullptr);
  EXPECT(fixture.devices.started(0) == nullptr);
}

void a_device_that_cannot_be_used_is_remembered_with_its_reason(Fixture& fixture) {
  fixture.source.failures[2] = {StatusCode::kNotSupported, 801, "virtual memory management"};
  Address address;
  EXPECT(fixture.allocate(2, kPiece, &address) == CoreCode::kUnavailable);
  const std::string text = fixture.failure();
  EXPECT(text ==
         "GPU 2 cannot be used: virtual memory management failed with 801: as the test wants it");
  fixture.source.failures[2] = ok_status();
  EXPECT(fixture.allocate(-1, kPiece, &address) == CoreCode::kUnavailable);
  EXPECT(fixture.failure() == "GPU -1 is not a device: accepted are 0 to 63");
  EXPECT(fixture.allocate(2, kPiece, &address) == CoreCode::kUnavailable);
  EXPECT(fixture.failure() == text && fixture.source.opened == 1);
  EXPECT(static_cast<bool>(fixture.take(0, kPiece)));
}

void a_full_device_may_be_started_later(Fixture& fixture) {
  fixture.source.failures[0] = {StatusCode::kOutOfMemory, 2, "cuDevicePrimaryCtxRetain"};
  Address address;
  EXPECT(fixture.allocate(0, kPiece, &address) == CoreCode::kOutOfMemory);
  EXPECT(fixture.out_of_memory().starts_with("CUDA out of memory. GPU 0 has no room"));
  fixture.source.failures[0] = ok_status();
  EXPECT(fixture.allocate(0, kPiece, &address) == CoreCode::kOk);
}

void a_device_that_was_not_asked_for_is_unavailable(Fixture&) {
  Fixture fixture({.config = {}, .is_for_all = false, .devices = {1}});
  Address address;
  EXPECT(fixture.allocate(0, kPiece, &address) == CoreCode::kUnavailable);
  EXPECT(fixture.failure().find("GPU 0 is not among the devices") == 0);
  EXPECT(fixture.allocate(1, kPiece, &address) == CoreCode::kOk);
  EXPECT(fixture.source.opened == 1);
}

// --- addresses ----------------------------------------------------------------------------------

void an_address_leads_to_its_device(Fixture& fixture) {
  const Address on_5 = fixture.take(5, Bytes{1000});
  const Address on_0 = fixture.take(0, kPiece);
  REQUIRE(on_5 && on_0);
  CoreBlock block;
  REQUIRE(fixture.core.find(on_5, &block) == CoreCode::kOk);
  EXPECT(block.device == 5 && block.address == on_5 && block.size == Bytes{1024});
  CoreBlock freed;
  REQUIRE(fixture.core.free(on_5, &freed) == CoreCode::kOk);
  EXPECT(freed.device == 5 && freed.requested == Bytes{1000});
  EXPECT(fixture.devices.started(5)->allocated() == Bytes{});
  EXPECT(fixture.devices.started(0)->allocated() == kPiece);
}

void a_block_in_an_alias_is_found(Fixture& fixture) {
  const Address pieces[] = {fixture.take(0, kPiece), fixture.take(0, kPiece),
                            fixture.take(0, kPiece)};
  REQUIRE(static_cast<bool>(pieces[2]));
  fixture.free(pieces[0]);
  fixture.free(pieces[2]);
  fixture.devices.set_limit(0, kPiece * 3);
  const Address stitched = fixture.take(0, kPiece * 2);
  REQUIRE(fixture.devices.started(0)->stats().alias_count == 1);
  CoreBlock block;
  EXPECT(fixture.core.find(stitched, &block) == CoreCode::kOk);
  EXPECT(fixture.free(stitched) == CoreCode::kOk);
}

void an_address_of_nobody_is_not_ours(Fixture& fixture) {
  int on_the_stack = 0;
  const Address foreign{reinterpret_cast<std::uint64_t>(&on_the_stack)};
  EXPECT(fixture.free(foreign) == CoreCode::kNotOurs);
  const Address block = fixture.take(0, kPiece);
  CoreBlock found;
  for (const Address address : {foreign, Address{}, block + kBlockUnit, block + 2_GiB}) {
    EXPECT(fixture.free(address) == CoreCode::kNotOurs);
    EXPECT(fixture.core.find(address, &found) == CoreCode::kNotOurs);
    EXPECT(fixture.core.record_stream(address, {Stream{3}}, false) == CoreCode::kNotOurs);
  }
  EXPECT(fixture.free(block) == CoreCode::kOk);
  EXPECT(fixture.free(block) == CoreCode::kNotOurs);
}

// --- before the start ---------------------------------------------------------------------------

void a_limit_is_kept_for_a_device_to_come(Fixture& fixture) {
  fixture.core.set_limit(1, kPiece);
  EXPECT(!fixture.take(1, kPiece * 2) && fixture.take(1, kPiece));
  EXPECT(static_cast<bool>(fixture.take(0, kPiece * 2)));
  fixture.core.set_limit(-1, 16_MiB);
  EXPECT(static_cast<bool>(fixture.take(1, kPiece)));
  EXPECT(!fixture.take(0, kPiece) && !fixture.take(1, kPiece) && !fixture.take(2, kPiece * 3));
}

void the_configured_limit_is_every_devices(Fixture&) {
  Fixture fixture({.config = {.limit = kPiece}, .is_for_all = true, .devices = {}});
  EXPECT(fixture.take(3, kPiece) && !fixture.take(3, kPiece));
}

void relief_comes_to_every_device(Fixture& fixture) {
  REQUIRE(static_cast<bool>(fixture.take(0, kPiece)));
  std::vector<int> relieved;
  fixture.core.add_relief(

      [](void* context, std::int32_t device) {
        static_cast<std::vector<int>*>(context)->push_back(device);
      },
      &relieved);
  EXPECT(!fixture.take(0, kCapacity * 2) && !fixture.take(4, kCapacity * 2));
  EXPECT((relieved == std::vector<int>{0, 4}));
}

void the_observer_sees_every_device(Fixture& fixture) {
  REQUIRE(static_cast<bool>(fixture.take(0, kPiece)));
  std::vector<CoreEvent> events;
  fixture.core.set_observer(

      [](void* context, const CoreEvent& event) {
        static_cast<std::vector<CoreEvent>*>(context)->push_back(event);
      },
      &events);
  const Address on_6 = fixture.take(6, kPiece);
  REQUIRE(fixture.take(0, kPiece) && events.size() == 2);
  EXPECT(events[0].device == 6 && events[0].kind == CoreEventKind::kMapped);
  EXPECT(events[0].begin <= on_6 && on_6 < events[0].begin + events[0].size);
  EXPECT(events[1].device == 0);
  fixture.free(on_6);
  fixture.core.trim(-1);
  EXPECT(events.size() > 2 && events.back().kind == CoreEventKind::kUnmapped);
  const std::size_t seen = events.size();
  fixture.core.set_observer(nullptr, nullptr);
  EXPECT(fixture.take(6, kPiece) && fixture.take(7, kPiece) && events.size() == seen);
}

void a_peer_is_let_in_before_and_after_the_start(Fixture& fixture) {
  Allocators& core = fixture.core;
  EXPECT(core.allow_peer(0, 1) == CoreCode::kOk && fixture.source.opened == 0);
  REQUIRE(static_cast<bool>(fixture.take(0, kPiece)));
  const SimDriver& sim = *fixture.source.drivers[0];
  EXPECT(sim.live_mappings() > 0 && sim.mappings_open_to(1) == sim.live_mappings());
  EXPECT(core.allow_peer(0, 2) == CoreCode::kOk);
  EXPECT(sim.mappings_open_to(2) == sim.live_mappings());
  EXPECT(core.allow_peer(0, -1) == CoreCode::kUnavailable);
  EXPECT(fixture.failure().find("GPU -1 cannot be given access to GPU 0") == 0);
}

// Its memory would be unreachable for copies that were promised to work.
void a_device_whose_peer_is_refused_at_its_start_is_unavailable(Fixture& fixture) {
  fixture.source.refuses_peers = true;
  EXPECT(fixture.core.allow_peer(0, 1) == CoreCode::kOk);
  Address address;
  EXPECT(fixture.allocate(0, kPiece, &address) == CoreCode::kUnavailable);
  EXPECT(fixture.allocate(1, kPiece, &address) == CoreCode::kOk);
}

// --- words --------------------------------------------------------------------------------------

void the_text_is_of_the_threads_own_failure(Fixture& fixture) {
  EXPECT(fixture.out_of_memory().find("96.00 MiB") == std::string::npos);
  REQUIRE(!fixture.take(3, 96_MiB));
  std::thread other([&] {
    EXPECT(!fixture.take(0, 80_MiB));
    EXPECT(fixture.out_of_memory().starts_with(
        "CUDA out of memory. Tried to allocate 80.00 MiB. GPU 0 has 64.00 MiB, of which"));
  });
  other.join();
  EXPECT(fixture.out_of_memory().starts_with(
      "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 3 has 64.00 MiB, of which"));
}

constexpr Check<Fixture> kChecks[] = {
    {"a device is started by its first allocation", a_device_is_started_by_its_first_allocation},
    {"a device that cannot be used is remembered with its reason",
     a_device_that_cannot_be_used_is_remembered_with_its_reason},
    {"a full device may be started later", a_full_device_may_be_started_later},
    {"a device that was not asked for is unavailable",
     a_device_that_was_not_asked_for_is_unavailable},
    {"an address leads to its device", an_address_leads_to_its_device},
    {"a block in an alias is found", a_block_in_an_alias_is_found},
    {"an address of nobody is not ours", an_address_of_nobody_is_not_ours},
    {"a limit is kept for a device to come", a_limit_is_kept_for_a_device_to_come},
    {"the configured limit is every device's", the_configured_limit_is_every_devices},
    {"relief comes to every device", relief_comes_to_every_device},
    {"the observer sees every device", the_observer_sees_every_device},
    {"a peer is let in before and after the start", a_peer_is_let_in_before_and_after_the_start},
    {"a device whose peer is refused at its start is unavailable",
     a_device_whose_peer_is_refused_at_its_start_is_unavailable},
    {"the text is of the thread's own failure", the_text_is_of_the_threads_own_failure},
};

}  // namespace
}  // namespace devices_claims

void check_devices() { run_checks("devices", devices_claims::kChecks); }

}  // namespace vramx::process_checks
