// How devices are started and found, and what was asked for before they were there.
#include "process/devices.h"

#include <string>
#include <thread>
#include <vector>

#include "process/process.h"

namespace vramx::process_checks::devices_claims {

constexpr Bytes kPiece = 8_MiB;

// --- the start ----------------------------------------------------------------------------------

CHECK(Fixture, a_device_is_started_by_its_first_allocation) {
  EXPECT(source.opened == 0 && devices.started(1) == nullptr);
  EXPECT(core.held(1) == Bytes{});
  EXPECT(core.stats(1).num_device_alloc == 0);
  EXPECT(take(1, kPiece));
  EXPECT(take(1, kPiece));
  EXPECT(source.opened == 1 && devices.started(1) != nullptr);
  EXPECT(devices.started(0) == nullptr);
}

CHECK(Fixture, a_device_that_cannot_be_used_is_remembered_with_its_reason) {
  source.failures[2] = {StatusCode::kNotSupported, 801, "virtual memory management"};
  Address address;
  EXPECT(allocate(2, kPiece, &address) == CoreCode::kUnavailable);
  const std::string text = failure();
  EXPECT(text ==
         "GPU 2 cannot be used: virtual memory management failed with 801: as the test wants it");
  source.failures[2] = ok_status();
  EXPECT(allocate(-1, kPiece, &address) == CoreCode::kUnavailable);
  EXPECT(failure() == "GPU -1 is not a device: accepted are 0 to 63");
  EXPECT(allocate(2, kPiece, &address) == CoreCode::kUnavailable);
  EXPECT(failure() == text && source.opened == 1);
  EXPECT(take(0, kPiece));
}

CHECK(Fixture, a_full_device_may_be_started_later) {
  source.failures[0] = {StatusCode::kOutOfMemory, 2, "cuDevicePrimaryCtxRetain"};
  Address address;
  EXPECT(allocate(0, kPiece, &address) == CoreCode::kOutOfMemory);
  EXPECT(out_of_memory().starts_with("CUDA out of memory. GPU 0 has no room"));
  source.failures[0] = ok_status();
  EXPECT(allocate(0, kPiece, &address) == CoreCode::kOk);
}

CHECK(Fixture, a_device_that_was_not_asked_for_is_unavailable) {
  Fixture fixture({.config = {}, .is_for_all = false, .devices = {1}});
  Address address;
  EXPECT(fixture.allocate(0, kPiece, &address) == CoreCode::kUnavailable);
  EXPECT(fixture.failure().find("GPU 0 is not among the devices") == 0);
  EXPECT(fixture.allocate(1, kPiece, &address) == CoreCode::kOk);
  EXPECT(fixture.source.opened == 1);
}

// --- addresses ----------------------------------------------------------------------------------

CHECK(Fixture, an_address_leads_to_its_device) {
  const Address on_5 = take(5, Bytes{1000});
  const Address on_0 = take(0, kPiece);
  REQUIRE(on_5 && on_0);
  CoreBlock block;
  REQUIRE(core.find(on_5, &block) == CoreCode::kOk);
  EXPECT(block.device == 5 && block.address == on_5 && block.size == Bytes{1024});
  CoreBlock freed;
  REQUIRE(core.free(on_5, &freed) == CoreCode::kOk);
  EXPECT(freed.device == 5 && freed.requested == Bytes{1000});
  EXPECT(devices.started(5)->allocated() == Bytes{});
  EXPECT(devices.started(0)->allocated() == kPiece);
}

CHECK(Fixture, a_block_in_an_alias_is_found) {
  const Address pieces[] = {take(0, kPiece), take(0, kPiece), take(0, kPiece)};
  REQUIRE(pieces[2]);
  free(pieces[0]);
  free(pieces[2]);
  devices.set_limit(0, kPiece * 3);
  const Address stitched = take(0, kPiece * 2);
  REQUIRE(devices.started(0)->stats().alias_count == 1);
  CoreBlock block;
  EXPECT(core.find(stitched, &block) == CoreCode::kOk);
  EXPECT(free(stitched) == CoreCode::kOk);
}

CHECK(Fixture, an_address_of_nobody_is_not_ours) {
  int on_the_stack = 0;
  const Address foreign{reinterpret_cast<std::uint64_t>(&on_the_stack)};
  EXPECT(free(foreign) == CoreCode::kNotOurs);
  const Address block = take(0, kPiece);
  CoreBlock found;
  for (const Address address : {foreign, Address{}, block + kBlockUnit, block + 2_GiB}) {
    EXPECT(free(address) == CoreCode::kNotOurs);
    EXPECT(core.find(address, &found) == CoreCode::kNotOurs);
    EXPECT(core.record_stream(address, {Stream{3}}, false) == CoreCode::kNotOurs);
  }
  EXPECT(free(block) == CoreCode::kOk);
  EXPECT(free(block) == CoreCode::kNotOurs);
}

// --- before the start ---------------------------------------------------------------------------

CHECK(Fixture, a_limit_is_kept_for_a_device_to_come) {
  core.set_limit(1, kPiece);
  EXPECT(!take(1, kPiece * 2) && take(1, kPiece));
  EXPECT(take(0, kPiece * 2));
  core.set_limit(-1, 16_MiB);
  EXPECT(take(1, kPiece));
  EXPECT(!take(0, kPiece) && !take(1, kPiece) && !take(2, kPiece * 3));
}

CHECK(Fixture, the_configured_limit_is_every_devices) {
  Fixture fixture({.config = {.limit = kPiece}, .is_for_all = true, .devices = {}});
  EXPECT(fixture.take(3, kPiece) && !fixture.take(3, kPiece));
}

CHECK(Fixture, relief_comes_to_every_device) {
  REQUIRE(take(0, kPiece));
  std::vector<int> relieved;
  core.add_relief(

      [](void* context, std::int32_t device) {
        static_cast<std::vector<int>*>(context)->push_back(device);
      },
      &relieved);
  EXPECT(!take(0, kCapacity * 2) && !take(4, kCapacity * 2));
  EXPECT((relieved == std::vector<int>{0, 4}));
}

CHECK(Fixture, the_observer_sees_every_device) {
  REQUIRE(take(0, kPiece));
  std::vector<CoreEvent> events;
  core.set_observer(

      [](void* context, const CoreEvent& event) {
        static_cast<std::vector<CoreEvent>*>(context)->push_back(event);
      },
      &events);
  const Address on_6 = take(6, kPiece);
  REQUIRE(take(0, kPiece) && events.size() == 2);
  EXPECT(events[0].device == 6 && events[0].kind == CoreEventKind::kMapped);
  EXPECT(events[0].begin <= on_6 && on_6 < events[0].begin + events[0].size);
  EXPECT(events[1].device == 0);
  free(on_6);
  core.trim(-1);
  EXPECT(events.size() > 2 && events.back().kind == CoreEventKind::kUnmapped);
  const std::size_t seen = events.size();
  core.set_observer(nullptr, nullptr);
  EXPECT(take(6, kPiece) && take(7, kPiece) && events.size() == seen);
}

CHECK(Fixture, a_peer_is_let_in_before_and_after_the_start) {
  EXPECT(core.allow_peer(0, 1) == CoreCode::kOk && source.opened == 0);
  REQUIRE(take(0, kPiece));
  const SimDriver& sim = *source.drivers[0];
  EXPECT(sim.live_mappings() > 0 && sim.mappings_open_to(1) == sim.live_mappings());
  EXPECT(core.allow_peer(0, 2) == CoreCode::kOk);
  EXPECT(sim.mappings_open_to(2) == sim.live_mappings());
  EXPECT(core.allow_peer(0, -1) == CoreCode::kUnavailable);
  EXPECT(failure().find("GPU -1 cannot be given access to GPU 0") == 0);
}

// Its memory would be unreachable for copies that were promised to work.
CHECK(Fixture, a_device_whose_peer_is_refused_at_its_start_is_unavailable) {
  source.refuses_peers = true;
  EXPECT(core.allow_peer(0, 1) == CoreCode::kOk);
  Address address;
  EXPECT(allocate(0, kPiece, &address) == CoreCode::kUnavailable);
  EXPECT(allocate(1, kPiece, &address) == CoreCode::kOk);
}

// --- words --------------------------------------------------------------------------------------

CHECK(Fixture, the_text_is_of_the_threads_own_failure) {
  EXPECT(out_of_memory().find("96.00 MiB") == std::string::npos);
  REQUIRE(!take(3, 96_MiB));
  std::thread other([&] {
    EXPECT(!take(0, 80_MiB));
    EXPECT(
        out_of_memory().starts_with("CUDA out of memory. Tried to allocate 80.00 MiB. "
                                    "GPU 0 has a total capacity of 64.00 MiB of which"));
  });
  other.join();
  EXPECT(
      out_of_memory().starts_with("CUDA out of memory. Tried to allocate 96.00 MiB. "
                                  "GPU 3 has a total capacity of 64.00 MiB of which"));
}

}  // namespace vramx::process_checks::devices_claims
