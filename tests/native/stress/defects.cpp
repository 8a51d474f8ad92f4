// The checks that check the checks: a device with one broken promise must be found out within a few
// seeds, and the scenario that does it must shrink to a handful of steps that still fail and pass
// on a device that keeps its promises.
#include <cstdio>

#include "stress/shrink.h"
#include "stress/suite.h"

namespace vramx::stress {
namespace {

constexpr std::uint64_t kSeedsTried = 64;
constexpr std::size_t kFewSteps = 48;

// The claim that a defect breaks, up to the colon; any of these, separated by bars.
void expect_found(const Options& options, Defect defect, const std::string& claims) {
  SeedRun run;
  std::uint64_t seed = options.first_seed;
  for (; seed < options.first_seed + kSeedsTried && run.failure.empty(); ++seed) {
    run = run_seed(seed, kStepsPerSeed, defect);
  }
  REQUIRE(!run.failure.empty());
  const std::string kind = run.failure.substr(0, run.failure.find(':'));
  EXPECT(claims.find(kind) != std::string::npos);
  Scenario small = shrink(run.scenario, run.failure);
  std::printf("  %s: %zu steps of %zu\n", run.failure.c_str(), small.steps.size(),
              run.scenario.steps.size());
  EXPECT(small.steps.size() <= kFewSteps);
  EXPECT(first_failure(small).substr(0, kind.size()) == kind);
  small.setup.defect = Defect::kNone;
  EXPECT(first_failure(small).empty());
}

CHECK(Nothing, a_wait_that_orders_nothing_is_found) {
  expect_found(options, Defect::kWaitDoesNothing, "stream safety");
}

CHECK(Nothing, a_hasty_query_is_found) {
  expect_found(options, Defect::kQueryIsHasty, "stream safety|unmapped in use|released in use");
}

CHECK(Nothing, an_alias_of_the_wrong_chunk_is_found) {
  expect_found(options, Defect::kAliasOfWrongChunk, "bytes");
}

CHECK(Nothing, access_that_is_not_granted_is_found) {
  expect_found(options, Defect::kAccessNotGranted, "access");
}

CHECK(Nothing, memory_that_does_not_return_is_found) {
  expect_found(options, Defect::kReleaseDoesNothing, "books|end");
}

// The three rules of order between streams that are easily got wrong.
CHECK(Nothing, an_event_at_the_take_is_found) {
  // Recorded again, it may also stand for another stream's work than the one that it was left by.
  expect_found(options, Defect::kEventAtTheTake, "order|stream safety");
}

CHECK(Nothing, streams_by_their_handles_are_found) {
  expect_found(options, Defect::kStreamsByHandle, "stream safety");
}

CHECK(Nothing, a_missing_device_is_found) {
  expect_found(options, Defect::kDeviceMissing, "stream safety|unmapped in use|released in use");
}

}  // namespace

}  // namespace vramx::stress
