// Letting another device in, at the moments when it could be missed: while a mapping is made, while
// one goes, and while a call fails. The moments are met exactly, not by chance: a driver in between
// makes the second caller's call in the middle of the first one's.
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "core/device_allocator.h"
#include "driver/sim_driver.h"
#include "stress/layered_driver.h"
#include "units/units.h"

namespace vramx::units {
namespace peers_claims {
namespace {

constexpr int kPeer = 1;
constexpr Bytes kPiece = 8_MiB;

// Runs something once, right after the next set_access has been made and before it returns.
class InterruptedDriver final : public stress::ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;

  Status set_access(Address at, Bytes size) override {
    const Status status = inner_.set_access(at, size);
    if (const auto interruption = std::exchange(interruption_, nullptr)) interruption();
    return status;
  }
  void interrupt_next(std::function<void()> interruption) {
    interruption_ = std::move(interruption);
  }
  bool has_interrupted() const { return !interruption_; }

 private:
  std::function<void()> interruption_;
};

std::unique_ptr<DeviceAllocator> open(Driver& driver) {
  auto made = DeviceAllocator::create(driver, {.alias_addresses = 1_GiB});
  return made.ok() ? std::move(made.value()) : nullptr;
}

struct Fixture {
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = 64_MiB, .mode = SimMode::kAccounting});
  std::unique_ptr<InterruptedDriver> driver = std::make_unique<InterruptedDriver>(*sim);
  std::unique_ptr<DeviceAllocator> allocator = open(*driver);

  Address take(Bytes size) {
    const Result<Address> made = allocator->allocate(size, Stream::kDefault);
    return made.ok() ? made.value() : Address{};
  }
  // Two holes that together are twice a piece; no growth is allowed.
  void leave_holes() {
    const Address pieces[] = {take(kPiece), take(kPiece), take(kPiece), take(kPiece)};
    EXPECT(allocator->free(pieces[0]).ok() && allocator->free(pieces[2]).ok());
    allocator->set_limit(kPiece * 4);
  }
  bool is_open_to(int peer) const { return sim->mappings_open_to(peer) == sim->live_mappings(); }
};

void a_peer_has_access_to_what_is_and_what_comes(Fixture& fixture) {
  fixture.leave_holes();
  REQUIRE(static_cast<bool>(fixture.take(kPiece * 2)));
  REQUIRE(fixture.allocator->stats().alias_count == 1);
  EXPECT(fixture.sim->mappings_open_to(kPeer) == 0);
  REQUIRE(fixture.allocator->allow_peer(kPeer).ok());
  EXPECT(fixture.is_open_to(kPeer));
  fixture.allocator->set_limit(64_MiB);
  REQUIRE(static_cast<bool>(fixture.take(kPiece)));
  EXPECT(fixture.is_open_to(kPeer));
  REQUIRE(fixture.allocator->allow_peer(kPeer + 1).ok());
  EXPECT(fixture.is_open_to(kPeer) && fixture.is_open_to(kPeer + 1));
}

void growth_that_is_under_way_does_not_miss_a_peer(Fixture& fixture) {
  fixture.driver->interrupt_next([&] { EXPECT(fixture.allocator->allow_peer(kPeer).ok()); });
  REQUIRE(static_cast<bool>(fixture.take(kPiece)));
  REQUIRE(fixture.driver->has_interrupted());
  EXPECT(fixture.is_open_to(kPeer));
}

void an_alias_that_is_being_built_does_not_miss_a_peer(Fixture& fixture) {
  fixture.leave_holes();
  fixture.driver->interrupt_next([&] { EXPECT(fixture.allocator->allow_peer(kPeer).ok()); });
  REQUIRE(static_cast<bool>(fixture.take(kPiece * 2)));
  REQUIRE(fixture.driver->has_interrupted() && fixture.allocator->stats().alias_count == 1);
  EXPECT(fixture.is_open_to(kPeer));
}

void a_mapping_that_stays_after_all_has_its_peers(Fixture& fixture) {
  const Address block = fixture.take(kPiece);
  REQUIRE(fixture.allocator->free(block).ok());
  fixture.sim->fail_call(CallKind::kUnmap, 1, StatusCode::kDriverError);
  fixture.allocator->trim();
  REQUIRE(fixture.allocator->allow_peer(kPeer).ok());
  EXPECT(fixture.sim->live_mappings() > 0 && fixture.is_open_to(kPeer));
}

void memory_that_goes_meanwhile_is_no_failure(Fixture& fixture) {
  const Address blocks[] = {fixture.take(kPiece), fixture.take(kPiece)};
  REQUIRE(fixture.allocator->free(blocks[1]).ok());
  fixture.driver->interrupt_next([&] { EXPECT(fixture.allocator->trim().chunks_released > 0); });
  EXPECT(fixture.allocator->allow_peer(kPeer).ok());
  REQUIRE(fixture.driver->has_interrupted());
  EXPECT(fixture.is_open_to(kPeer) && fixture.allocator->check().empty());
}

// The access that was missed cannot be set: the new chunks go, and what is tried next succeeds.
void growth_that_cannot_catch_up_is_undone(Fixture& fixture) {
  fixture.driver->interrupt_next([&] {
    EXPECT(fixture.allocator->allow_peer(kPeer).ok());
    fixture.sim->fail_call(CallKind::kSetAccess, 1, StatusCode::kDriverError);
  });
  EXPECT(static_cast<bool>(fixture.take(kPiece)));
  EXPECT(fixture.sim->faults_fired() == 1 && fixture.is_open_to(kPeer));
  EXPECT(fixture.allocator->held() == kPiece && fixture.sim->used() == kPiece);
  EXPECT(fixture.allocator->check().empty());
}

void an_alias_that_cannot_catch_up_is_undone(Fixture& fixture) {
  fixture.leave_holes();
  const std::size_t mappings = fixture.sim->live_mappings();
  fixture.driver->interrupt_next([&] {
    EXPECT(fixture.allocator->allow_peer(kPeer).ok());
    fixture.sim->fail_call(CallKind::kSetAccess, 1, StatusCode::kDriverError);
  });
  EXPECT(static_cast<bool>(fixture.take(kPiece * 2)));  // the second attempt, after relief
  EXPECT(fixture.sim->faults_fired() == 1 && fixture.is_open_to(kPeer));
  EXPECT(fixture.sim->live_mappings() == mappings + mappings / 2);
  EXPECT(fixture.allocator->check().empty() && fixture.sim->check().empty());
}

void a_refused_peer_changes_nothing(Fixture& fixture) {
  REQUIRE(static_cast<bool>(fixture.take(kPiece)));
  EXPECT(fixture.allocator->allow_peer(-1).code == StatusCode::kInvalidValue);
  fixture.sim->fail_call(CallKind::kAllowPeer, 1, StatusCode::kNotSupported);
  EXPECT(fixture.allocator->allow_peer(kPeer).code == StatusCode::kNotSupported);
  EXPECT(fixture.sim->mappings_open_to(kPeer) == 0);
}

void a_failed_access_is_reported_and_made_good_by_asking_again(Fixture& fixture) {
  REQUIRE(static_cast<bool>(fixture.take(kPiece)));
  fixture.sim->fail_call(CallKind::kSetAccess, 1, StatusCode::kDriverError);
  EXPECT(fixture.allocator->allow_peer(kPeer).code == StatusCode::kDriverError);
  EXPECT(fixture.allocator->allow_peer(kPeer).ok() && fixture.is_open_to(kPeer));
}

constexpr Check<Fixture> kChecks[] = {
    {"a peer has access to what is and what comes", a_peer_has_access_to_what_is_and_what_comes},
    {"growth that is under way does not miss a peer",
     growth_that_is_under_way_does_not_miss_a_peer},
    {"an alias that is being built does not miss a peer",
     an_alias_that_is_being_built_does_not_miss_a_peer},
    {"a mapping that stays after all has its peers", a_mapping_that_stays_after_all_has_its_peers},
    {"memory that goes meanwhile is no failure", memory_that_goes_meanwhile_is_no_failure},
    {"growth that cannot catch up is undone", growth_that_cannot_catch_up_is_undone},
    {"an alias that cannot catch up is undone", an_alias_that_cannot_catch_up_is_undone},
    {"a refused peer changes nothing", a_refused_peer_changes_nothing},
    {"a failed access is reported and made good by asking again",
     a_failed_access_is_reported_and_made_good_by_asking_again},
};

}  // namespace
}  // namespace peers_claims

void check_peers() { run_checks("peers", peers_claims::kChecks); }

}  // namespace vramx::units
