// The checks that check the checks: a device with one broken promise must be found out within a few
// seeds, and the scenario that does it must shrink to a handful of steps that still fail and pass
// on a device that keeps its promises.
#include <cstdio>

#include "stress/shrink.h"
#include "stress/suite.h"

namespace vramx::stress {
namespace {

constexpr std::uint64_t kSeedsTried = 2048;
constexpr std::size_t kFewSteps = 48;

// The claim that a defect breaks, up to the colon; any of these, separated by bars.
void expect_found(Defect defect, const std::string& claims) {
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

CHECK(Nothing, a_broken_promise_of_the_device_is_found) {
  expect_found(Defect::kWaitDoesNothing, "stream safety");
  expect_found(Defect::kQueryIsHasty, "stream safety|unmapped in use|released in use");
  expect_found(Defect::kAliasOfWrongChunk, "bytes");
  expect_found(Defect::kAccessNotGranted, "access");
  expect_found(Defect::kReleaseDoesNothing, "books|end");
}

// The three rules of order between streams that are easily got wrong.
CHECK(Nothing, a_broken_rule_of_order_is_found) {
  // Recorded again, it may also stand for another stream's work than the one that it was left by.
  expect_found(Defect::kEventAtTheTake, "order|stream safety");
  expect_found(Defect::kStreamsByHandle, "stream safety");
  expect_found(Defect::kDeviceMissing, "stream safety|unmapped in use|released in use");
}

// What may come in the middle of a call is kept off by books that the call leaves as they must be.
CHECK(Nothing, a_call_that_keeps_nobody_off_is_found) {
  expect_found(Defect::kEntryNotHeld, "stream safety");
  expect_found(Defect::kGrowthNotCounted, "limit");
}

}  // namespace
}  // namespace vramx::stress
