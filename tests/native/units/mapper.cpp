// Driver operations of several calls: each is done whole, or undone call by call in reverse.
#include "core/mapper.h"

#include <memory>
#include <vector>

#include "driver/sim_driver.h"
#include "units/units.h"

namespace vramx::units {
namespace mapper_claims {
namespace {

const std::vector<Bytes> kSizes{kPage, kPage * 2, kPage};
constexpr Bytes kTotal = kPage * 4;

// A device of 16 pages and room for them twice over.
struct Fixture {
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = kPage * 16, .mode = SimMode::kAccounting});
  Address at = sim->reserve_address(kPage * 32).value();
  Address elsewhere = at + kPage * 16;
  std::vector<MappedChunk> chunks;

  MapOutcome create() { return create_and_map(*sim, at, kSizes, chunks); }
  bool is_empty() const {
    return sim->live_chunks() == 0 && sim->live_mappings() == 0 && !sim->used() &&
           sim->check().empty();
  }
};

void chunks_lie_one_behind_the_other(Fixture& fixture) {
  REQUIRE(fixture.create().status.ok());
  REQUIRE(fixture.chunks.size() == 3);
  EXPECT(fixture.chunks[1].size == kPage * 2);
  EXPECT(fixture.sim->live_mappings() == 3 && fixture.sim->used() == kTotal);
  EXPECT(fixture.sim->unmap(fixture.at + kPage, kPage * 2).ok());
}

void access_is_set_in_one_call(Fixture& fixture) {
  REQUIRE(fixture.create().status.ok());
  EXPECT(fixture.sim->call_count(CallKind::kSetAccess) == 1);
}

void chunks_are_mapped_again_without_new_memory(Fixture& fixture) {
  REQUIRE(fixture.create().status.ok());
  REQUIRE(map_again(*fixture.sim, fixture.elsewhere, fixture.chunks).status.ok());
  EXPECT(fixture.sim->live_mappings() == 6 && fixture.sim->used() == kTotal);
}

void what_is_released_leaves_the_device_empty(Fixture& fixture) {
  REQUIRE(fixture.create().status.ok());
  EXPECT(unmap_and_release(*fixture.sim, fixture.at, fixture.chunks).status.ok());
  EXPECT(fixture.is_empty());
}

bool is_undone(const MapOutcome& outcome) {
  return !outcome.left_mapped && outcome.unreleased.empty();
}

// --- a failure at each call ---------------------------------------------------------------------

// Three creates, three maps, one set_access.
void a_growth_that_fails_at_any_call_leaves_nothing(Fixture& fixture) {
  for (std::uint64_t nth = 1; nth <= 7; ++nth) {
    fixture.chunks.clear();
    fixture.sim->fail_nth_call(nth, StatusCode::kOutOfMemory);
    const MapOutcome outcome = fixture.create();
    EXPECT(outcome.status.code == StatusCode::kOutOfMemory && is_undone(outcome));
    EXPECT(fixture.is_empty());
  }
  EXPECT(fixture.sim->faults_fired() == 7);
}

// Three maps, one set_access.
void an_alias_that_fails_at_any_call_leaves_the_first_mapping(Fixture& fixture) {
  REQUIRE(fixture.create().status.ok());
  for (std::uint64_t nth = 1; nth <= 4; ++nth) {
    fixture.sim->fail_nth_call(nth, StatusCode::kDriverError);
    const MapOutcome outcome = map_again(*fixture.sim, fixture.elsewhere, fixture.chunks);
    EXPECT(outcome.status.code == StatusCode::kDriverError && is_undone(outcome));
    EXPECT(fixture.sim->live_mappings() == 3 && fixture.sim->live_chunks() == 3);
  }
  EXPECT(fixture.sim->faults_fired() == 4);
}

void what_cannot_be_unmapped_again_is_reported(Fixture& fixture) {
  REQUIRE(fixture.create().status.ok());
  fixture.sim->fail_call(CallKind::kMap, 3, StatusCode::kDriverError);
  fixture.sim->fail_call(CallKind::kUnmap, 1, StatusCode::kDriverError);
  const MapOutcome outcome = map_again(*fixture.sim, fixture.elsewhere, fixture.chunks);
  EXPECT(outcome.left_mapped == kPage * 3);
  EXPECT(fixture.sim->live_mappings() == 5);
  EXPECT(fixture.sim->unmap(fixture.elsewhere, outcome.left_mapped).ok());
}

void chunks_that_cannot_be_released_again_are_reported(Fixture& fixture) {
  fixture.sim->fail_call(CallKind::kSetAccess, 1, StatusCode::kDriverError);
  fixture.sim->fail_call(CallKind::kReleaseChunk, 1, StatusCode::kDriverError);
  const MapOutcome outcome = fixture.create();
  REQUIRE(outcome.unreleased.size() == 1 && fixture.sim->live_chunks() == 1);
  EXPECT(fixture.sim->release_chunk(outcome.unreleased[0]).ok());
  EXPECT(fixture.is_empty());
}

void chunks_that_cannot_be_unmapped_are_not_released(Fixture& fixture) {
  REQUIRE(fixture.create().status.ok());
  fixture.sim->fail_call(CallKind::kUnmap, 1, StatusCode::kDriverError);
  const MapOutcome outcome = unmap_and_release(*fixture.sim, fixture.at, fixture.chunks);
  EXPECT(!outcome.status.ok() && outcome.left_mapped == kTotal);
  EXPECT(fixture.sim->call_count(CallKind::kReleaseChunk) == 0);
  EXPECT(fixture.sim->live_chunks() == 3);
}

void a_growth_beyond_the_device_gives_back_what_it_got(Fixture& fixture) {
  const MapOutcome outcome =
      create_and_map(*fixture.sim, fixture.at, {kPage * 8, kPage * 9}, fixture.chunks);
  EXPECT(outcome.status.code == StatusCode::kOutOfMemory);
  EXPECT(fixture.is_empty());
}

constexpr Check<Fixture> kChecks[] = {
    {"chunks lie one behind the other", chunks_lie_one_behind_the_other},
    {"access is set in one call", access_is_set_in_one_call},
    {"chunks are mapped again without new memory", chunks_are_mapped_again_without_new_memory},
    {"what is released leaves the device empty", what_is_released_leaves_the_device_empty},
    {"a growth that fails at any call leaves nothing",
     a_growth_that_fails_at_any_call_leaves_nothing},
    {"an alias that fails at any call leaves the first mapping",
     an_alias_that_fails_at_any_call_leaves_the_first_mapping},
    {"what cannot be unmapped again is reported", what_cannot_be_unmapped_again_is_reported},
    {"chunks that cannot be released again are reported",
     chunks_that_cannot_be_released_again_are_reported},
    {"chunks that cannot be unmapped are not released",
     chunks_that_cannot_be_unmapped_are_not_released},
    {"a growth beyond the device gives back what it got",
     a_growth_beyond_the_device_gives_back_what_it_got},
};

}  // namespace
}  // namespace mapper_claims

void check_mapper() { run_checks("mapper", mapper_claims::kChecks); }

}  // namespace vramx::units
