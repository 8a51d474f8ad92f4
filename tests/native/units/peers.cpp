// Letting another device in, at the moments when it could be missed: while a mapping is made, while
// one goes, and while a call fails. The moments are met exactly, not by chance: a driver in between
// makes the second caller's call in the middle of the first one's.
#include <functional>
#include <memory>
#include <utility>

#include "stress/layered_driver.h"
#include "units/units.h"

namespace vramx::units::peers_claims {

constexpr int kPeer = 1;

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

struct Fixture : AllocatorFixture {
  std::unique_ptr<InterruptedDriver> driver = std::make_unique<InterruptedDriver>(*sim);

  Fixture() { allocator = open_allocator(*driver); }
  ~Fixture() { allocator.reset(); }
  bool is_open_to(int peer) const { return sim->mappings_open_to(peer) == sim->live_mappings(); }
};

CHECK(Fixture, a_peer_has_access_to_what_is_and_what_comes) {
  leave_holes();
  REQUIRE(take(kPiece * 2));
  REQUIRE(allocator->stats().alias_count == 1);
  EXPECT(sim->mappings_open_to(kPeer) == 0);
  REQUIRE(allocator->allow_peer(kPeer).ok());
  EXPECT(is_open_to(kPeer));
  allocator->set_limit(64_MiB);
  REQUIRE(take(kPiece));
  EXPECT(is_open_to(kPeer));
  REQUIRE(allocator->allow_peer(kPeer + 1).ok());
  EXPECT(is_open_to(kPeer) && is_open_to(kPeer + 1));
}

CHECK(Fixture, growth_that_is_under_way_does_not_miss_a_peer) {
  driver->interrupt_next([&] { EXPECT(allocator->allow_peer(kPeer).ok()); });
  REQUIRE(take(kPiece));
  REQUIRE(driver->has_interrupted());
  EXPECT(is_open_to(kPeer));
}

CHECK(Fixture, an_alias_that_is_being_built_does_not_miss_a_peer) {
  leave_holes();
  driver->interrupt_next([&] { EXPECT(allocator->allow_peer(kPeer).ok()); });
  REQUIRE(take(kPiece * 2));
  REQUIRE(driver->has_interrupted() && allocator->stats().alias_count == 1);
  EXPECT(is_open_to(kPeer));
}

CHECK(Fixture, a_mapping_that_stays_after_all_has_its_peers) {
  const Address block = take(kPiece);
  REQUIRE(free(block));
  sim->fail_call(CallKind::kUnmap, 1, StatusCode::kDriverError);
  allocator->trim();
  REQUIRE(allocator->allow_peer(kPeer).ok());
  EXPECT(sim->live_mappings() > 0 && is_open_to(kPeer));
}

CHECK(Fixture, memory_that_goes_meanwhile_is_no_failure) {
  const Address blocks[] = {take(kPiece), take(kPiece)};
  REQUIRE(free(blocks[1]));
  driver->interrupt_next([&] { EXPECT(allocator->trim().chunks_released > 0); });
  EXPECT(allocator->allow_peer(kPeer).ok());
  REQUIRE(driver->has_interrupted());
  EXPECT(is_open_to(kPeer) && allocator->check().empty());
}

// The access that was missed cannot be set: the new chunks go, and what is tried next succeeds.
CHECK(Fixture, growth_that_cannot_catch_up_is_undone) {
  driver->interrupt_next([&] {
    EXPECT(allocator->allow_peer(kPeer).ok());
    sim->fail_call(CallKind::kSetAccess, 1, StatusCode::kDriverError);
  });
  EXPECT(take(kPiece));
  EXPECT(sim->faults_fired() == 1 && is_open_to(kPeer));
  EXPECT(allocator->held() == kPiece && sim->used() == kPiece);
  EXPECT(allocator->check().empty());
}

CHECK(Fixture, an_alias_that_cannot_catch_up_is_undone) {
  leave_holes();
  const std::size_t mappings = sim->live_mappings();
  driver->interrupt_next([&] {
    EXPECT(allocator->allow_peer(kPeer).ok());
    sim->fail_call(CallKind::kSetAccess, 1, StatusCode::kDriverError);
  });
  EXPECT(static_cast<bool>(take(kPiece * 2)));  // the second attempt, after relief
  EXPECT(sim->faults_fired() == 1 && is_open_to(kPeer));
  EXPECT(sim->live_mappings() == mappings + mappings / 2);
  EXPECT(allocator->check().empty() && sim->check().empty());
}

CHECK(Fixture, a_refused_peer_changes_nothing) {
  REQUIRE(take(kPiece));
  EXPECT(allocator->allow_peer(-1).code == StatusCode::kInvalidValue);
  sim->fail_call(CallKind::kAllowPeer, 1, StatusCode::kNotSupported);
  EXPECT(allocator->allow_peer(kPeer).code == StatusCode::kNotSupported);
  EXPECT(sim->mappings_open_to(kPeer) == 0);
}

CHECK(Fixture, a_failed_access_is_reported_and_made_good_by_asking_again) {
  REQUIRE(take(kPiece));
  sim->fail_call(CallKind::kSetAccess, 1, StatusCode::kDriverError);
  EXPECT(allocator->allow_peer(kPeer).code == StatusCode::kDriverError);
  EXPECT(allocator->allow_peer(kPeer).ok() && is_open_to(kPeer));
}

}  // namespace vramx::units::peers_claims
