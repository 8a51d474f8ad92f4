// One failure at a time, at every driver call of a scenario that takes every path: each step then
// either does what it does without the failure, or fails and leaves everything as it was; the next
// steps succeed; nothing is left at the end.
//
// The scenario has memory to spare, so that nothing but the injected failure can fail.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "stress/suite.h"

namespace vramx::stress {
namespace {

using enum StepKind;

// Growth, reuse across streams, stitching with and without growth, an alias hit, a stream that goes
// away, trim and defragment. Streams have work queued all along. What is to be stitched is above
// 1 MiB, below which the core prefers to grow. No block's number is a multiple of four: those are
// stamped in full (bytes.cpp), and touching memory would take most of the time. Chunks are of one
// unit, so that a step makes the calls of up to eleven of them, and of no more.
Scenario every_path() {
  constexpr std::uint64_t kUnit = 256 << 10;
  return {.setup = {.capacity = Bytes{16 << 20},
                    .granularity = Bytes{kUnit},
                    .cross_stream = CrossStream::kAlways},
          .steps = {
              {kAllocate, 1, 1, kUnit},
              {kAllocate, 2, 1, 3 * kUnit},
              {kAllocate, 3, 2, kUnit},
              {kAllocate, 17, 1, 3 * kUnit + 512},
              {kAllocate, 5, 1, 700},
              {kRecordStream, 2, 3, 0},
              {kFree, 2, 0, 0},
              {kFree, 17, 0, 0},
              {kAllocate, 6, 2, 5 * kUnit},  // both holes: stitched, and ordered
              {kSubmit, 0, 2, 3},
              {kFree, 6, 0, 0},
              {kAllocate, 7, 2, 5 * kUnit},  // the alias again
              {kFree, 7, 0, 0},
              {kAllocate, 18, 2, 7 * kUnit},  // the stream's own holes, and growth
              {kAllocate, 11, 2, 4 * kUnit},
              {kAllocate, 19, 1, kUnit},
              {kAllocate, 13, 1, 5 * kUnit},
              {kAllocate, 14, 1, kUnit},
              {kSubmit, 0, 1, 1},
              {kFree, 11, 0, 0},
              {kFree, 13, 0, 0},
              {kAllocate, 21, 2, 5 * kUnit},  // the other stream's, ordered
              {kAllocate, 15, 3, 11 * kUnit},
              {kFree, 1, 0, 0},
              {kReplaceStream, 0, 3, 1},
              {kFree, 18, 0, 0},
              {kDefragment, 0, 0, 0},
              {kAllocate, 9, 1, 2 * kUnit},
              {kAllocate, 10, 2, 6 * kUnit},
              {kFree, 9, 0, 0},
              {kTrim, 0, 0, 0},
              {kFree, 10, 0, 0},
              {kTrim, 0, 0, 0},
          }};
}

// What a failed request may not change: everything but where free memory is cut.
std::vector<SpanInfo> without_cuts(const std::vector<SpanInfo>& layout) {
  std::vector<SpanInfo> merged;
  for (const SpanInfo& span : layout) {
    const bool joins =
        !merged.empty() && merged.back().state == span.state && merged.back().block == span.block;
    if (joins) {
      merged.back().size += span.size;
    } else {
      merged.push_back(span);
    }
  }
  return merged;
}

bool equal(const std::vector<SpanInfo>& a, const std::vector<SpanInfo>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const SpanInfo& x, const SpanInfo& y) {
                      return x.address == y.address && x.size == y.size && x.state == y.state &&
                             x.block == y.block && x.is_in_alias == y.is_in_alias;
                    });
}

struct Outcome {
  std::string failure;
  bool has_fired = false;
  int failed_requests = 0;
};

// One step, and if the failure fires in it what it leaves behind.
void apply_and_compare(World& world, const Step& step, Outcome& outcome) {
  const std::vector<SpanInfo> before = without_cuts(world.allocator().layout());
  const std::uint64_t fired = world.sim().faults_fired();
  const std::int64_t ooms = world.ooms();
  world.apply(step);
  if (world.ooms() == ooms) return;
  ++outcome.failed_requests;
  if (world.sim().faults_fired() == fired) outcome.failure = "a request failed without a reason";
  if (!equal(before, without_cuts(world.allocator().layout()))) {
    outcome.failure = "a failed request left a trace";
  }
}

template <class Arm>
Outcome run_with(Arm arm) {
  const Scenario scenario = every_path();
  World world(scenario.setup);
  arm(world.sim());
  Outcome outcome;
  for (const Step& step : scenario.steps) apply_and_compare(world, step, outcome);
  outcome.has_fired = world.sim().faults_fired() != 0;
  // The trim that follows is the one that takes back what the device had refused.
  world.finish();
  if (outcome.failure.empty()) outcome.failure = world.failure();
  if (outcome.failure.empty()) outcome.failure = world.leftovers();
  return outcome;
}

void expect_harmless_until_none_fires(StatusCode code) {
  constexpr std::uint64_t kMostCalls = 2000;
  for (std::uint64_t nth = 1; nth < kMostCalls; ++nth) {
    const Outcome outcome = run_with([&](SimDriver& sim) { sim.fail_nth_call(nth, code); });
    if (!EXPECT(outcome.failure.empty() && outcome.failed_requests <= 1)) {
      std::printf("  call %llu: %s\n", static_cast<unsigned long long>(nth),
                  outcome.failure.c_str());
    }
    if (!outcome.has_fired) return;
  }
  EXPECT(false);
}

CHECK(Nothing, the_scenario_takes_every_path) {
  const Scenario scenario = every_path();
  World world(scenario.setup);
  for (const Step& step : scenario.steps) world.apply(step);
  const Coverage seen = world.coverage();
  EXPECT(seen.growths >= 4 && seen.stitches >= 2 && seen.alias_hits >= 1);
  EXPECT(seen.cross_stream >= 2 && seen.streams_replaced == 1 && seen.ooms == 0);
  EXPECT(seen.chunks_released > 0 && seen.aliases_collected > 0);
  for (const CallKind kind :
       {CallKind::kCreateChunk, CallKind::kMap, CallKind::kSetAccess, CallKind::kUnmap,
        CallKind::kReleaseChunk, CallKind::kCreateEvent, CallKind::kRecordEvent,
        CallKind::kWaitEvent, CallKind::kQueryEvent, CallKind::kSynchronize, CallKind::kStreamId}) {
    EXPECT(world.sim().call_count(kind) > 0);
  }
  world.finish();
  EXPECT(world.failure().empty());
}

CHECK(Nothing, a_failed_call_changes_nothing) {
  expect_harmless_until_none_fires(StatusCode::kDriverError);
}

CHECK(Nothing, an_exhausted_call_changes_nothing) {
  expect_harmless_until_none_fires(StatusCode::kOutOfMemory);
}

CHECK(Nothing, a_failed_creation_leaves_nothing) {
  const auto sim = contract::open_sim(contract::small_sim());
  REQUIRE(sim != nullptr);
  std::uint64_t nth = 0;
  for (bool is_created = false; !is_created; ++nth) {
    sim->fail_nth_call(nth + 1, StatusCode::kDriverError);
    const auto created = DeviceAllocator::create(*sim, {.alias_addresses = kGranularity * 64});
    sim->clear_faults();
    is_created = created.ok();
    EXPECT(is_created || created.status().code == StatusCode::kDriverError);
    EXPECT(is_created || contract::is_empty(*sim));
  }
  EXPECT(nth > 2);
  EXPECT(contract::is_empty(*sim));
}

}  // namespace
}  // namespace vramx::stress
