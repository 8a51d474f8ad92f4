// Driver operations of several calls: each is done whole, or undone call by call in reverse.
#include "core/mapper.h"

#include <memory>
#include <vector>

#include "units/units.h"

namespace vramx::units::mapper_claims {

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

CHECK(Fixture, chunks_lie_one_behind_the_other) {
  REQUIRE(create().status.ok());
  REQUIRE(chunks.size() == 3);
  EXPECT(chunks[1].size == kPage * 2);
  EXPECT(sim->live_mappings() == 3 && sim->used() == kTotal);
  EXPECT(sim->unmap(at + kPage, kPage * 2).ok());
}

CHECK(Fixture, access_is_set_in_one_call) {
  REQUIRE(create().status.ok());
  EXPECT(sim->call_count(CallKind::kSetAccess) == 1);
}

CHECK(Fixture, chunks_are_mapped_again_without_new_memory) {
  REQUIRE(create().status.ok());
  REQUIRE(map_again(*sim, elsewhere, chunks).status.ok());
  EXPECT(sim->live_mappings() == 6 && sim->used() == kTotal);
}

CHECK(Fixture, what_is_released_leaves_the_device_empty) {
  REQUIRE(create().status.ok());
  EXPECT(unmap_and_release(*sim, at, chunks).status.ok());
  EXPECT(is_empty());
}

bool is_undone(const MapOutcome& outcome) {
  return !outcome.left_mapped && outcome.unreleased.empty();
}

// --- a failure at each call ---------------------------------------------------------------------

// Three creates, three maps, one set_access.
CHECK(Fixture, a_growth_that_fails_at_any_call_leaves_nothing) {
  for (std::uint64_t nth = 1; nth <= 7; ++nth) {
    chunks.clear();
    sim->fail_nth_call(nth, StatusCode::kOutOfMemory);
    const MapOutcome outcome = create();
    EXPECT(outcome.status.code == StatusCode::kOutOfMemory && is_undone(outcome));
    EXPECT(is_empty());
  }
  EXPECT(sim->faults_fired() == 7);
}

// Three maps, one set_access.
CHECK(Fixture, an_alias_that_fails_at_any_call_leaves_the_first_mapping) {
  REQUIRE(create().status.ok());
  for (std::uint64_t nth = 1; nth <= 4; ++nth) {
    sim->fail_nth_call(nth, StatusCode::kDriverError);
    const MapOutcome outcome = map_again(*sim, elsewhere, chunks);
    EXPECT(outcome.status.code == StatusCode::kDriverError && is_undone(outcome));
    EXPECT(sim->live_mappings() == 3 && sim->live_chunks() == 3);
  }
  EXPECT(sim->faults_fired() == 4);
}

CHECK(Fixture, what_cannot_be_unmapped_again_is_reported) {
  REQUIRE(create().status.ok());
  sim->fail_call(CallKind::kMap, 3, StatusCode::kDriverError);
  sim->fail_call(CallKind::kUnmap, 1, StatusCode::kDriverError);
  const MapOutcome outcome = map_again(*sim, elsewhere, chunks);
  EXPECT(outcome.left_mapped == kPage * 3);
  EXPECT(sim->live_mappings() == 5);
  EXPECT(sim->unmap(elsewhere, outcome.left_mapped).ok());
}

CHECK(Fixture, chunks_that_cannot_be_released_again_are_reported) {
  sim->fail_call(CallKind::kSetAccess, 1, StatusCode::kDriverError);
  sim->fail_call(CallKind::kReleaseChunk, 1, StatusCode::kDriverError);
  const MapOutcome outcome = create();
  REQUIRE(outcome.unreleased.size() == 1 && sim->live_chunks() == 1);
  EXPECT(sim->release_chunk(outcome.unreleased[0]).ok());
  EXPECT(is_empty());
}

CHECK(Fixture, chunks_that_cannot_be_unmapped_are_not_released) {
  REQUIRE(create().status.ok());
  sim->fail_call(CallKind::kUnmap, 1, StatusCode::kDriverError);
  const MapOutcome outcome = unmap_and_release(*sim, at, chunks);
  EXPECT(!outcome.status.ok() && outcome.left_mapped == kTotal);
  EXPECT(sim->call_count(CallKind::kReleaseChunk) == 0);
  EXPECT(sim->live_chunks() == 3);
}

CHECK(Fixture, a_growth_beyond_the_device_gives_back_what_it_got) {
  const MapOutcome outcome = create_and_map(*sim, at, {kPage * 8, kPage * 9}, chunks);
  EXPECT(outcome.status.code == StatusCode::kOutOfMemory);
  EXPECT(is_empty());
}

}  // namespace vramx::units::mapper_claims
