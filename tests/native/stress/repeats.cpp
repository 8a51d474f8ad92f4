// Programs that repeat themselves for long enough that the allocator puts blocks where they were
// the last time round, with everything that hinders it: small blocks that come anew each time and
// live on, other streams that are late, memory that is given back in between.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "core/recurrence.h"
#include "stress/random.h"
#include "stress/suite.h"

namespace vramx::stress {
namespace {

using enum StepKind;

constexpr std::uint32_t kRequests = 320;  // large ones in a period: more than a layer's
constexpr int kPeriods = 9;               // memory that is given back begins the count of them anew
constexpr std::uint32_t kBlocks = 1000;   // numbers that a period gives its blocks
constexpr std::size_t kMostLive = 20;
static_assert(kRequests > Recurrence::kLongestLayer);

// One period: its large blocks are numbered from 0, and all are freed in it but a few, which the
// next period frees where this one frees those of the last.
struct Period {
  std::vector<Step> steps;
  std::vector<std::uint32_t> survivors;
};

Period draw_period(Random& random) {
  Period period;
  std::vector<std::uint32_t> live;
  const auto leave = [&] {
    const std::size_t leaving = random.below(live.size());
    period.steps.push_back({kFree, live[leaving], 0, 0});
    live.erase(live.begin() + static_cast<std::ptrdiff_t>(leaving));
  };
  for (std::uint32_t block = 0; block < kRequests; ++block) {
    if (live.size() == kMostLive) leave();
    const auto stream = static_cast<std::uint32_t>(random.one_in(4) ? random.below(kStreams) : 0);
    const std::uint64_t size = Recurrence::kSmallest.count + random.below(512 << 10);
    period.steps.push_back({kAllocate, block, stream, size});
    live.push_back(block);
  }
  while (live.size() > 3) leave();
  period.survivors = live;
  return period;
}

// What is different each time, between two steps of the period.
void disturb(Random& random, std::vector<Step>& steps, std::uint32_t& next_small) {
  const auto stream = static_cast<std::uint32_t>(random.below(kStreams));
  switch (random.below(40)) {
    case 0:
    case 1:
      steps.push_back({kAllocate, next_small, stream, random.between(1, 16 << 10)});
      if (next_small % kBlocks > 8 + kRequests) steps.push_back({kFree, next_small - 8, 0, 0});
      ++next_small;
      break;
    case 2:
      steps.push_back({kSubmit, 0, stream, random.between(1, 3)});
      break;
    case 3:
    case 4:
      steps.push_back({kAdvance, 0, stream, random.between(1, 40)});
      break;
    case 5:
      if (random.one_in(40)) steps.push_back({random.one_in(2) ? kTrim : kDefragment, 0, 0, 0});
      break;
    default:
      break;
  }
}

Scenario repeated(std::uint64_t seed, bool repeats_placements) {
  Random random(seed);
  Scenario scenario;
  scenario.setup = {.capacity = Bytes{16 << 20},
                    .cross_stream = static_cast<CrossStream>(seed % 3),
                    .repeats_placements = repeats_placements,
                    .check_every = 61};
  const Period period = draw_period(random);
  for (std::uint32_t time = 1; time <= kPeriods; ++time) {
    std::uint32_t next_small = time * kBlocks + kRequests;
    for (const std::uint32_t block : period.survivors) {
      scenario.steps.push_back({kFree, (time - 1) * kBlocks + block, 0, 0});
    }
    for (Step step : period.steps) {
      step.block += time * kBlocks;
      scenario.steps.push_back(step);
      disturb(random, scenario.steps, next_small);
    }
  }
  scenario.steps.push_back({kInspect, 0, 0, 0});
  return scenario;
}

struct Ran {
  std::string failure;
  std::uint64_t placement_hash = 0;
};

Ran run(const Scenario& scenario) {
  World world(scenario.setup);
  for (const Step& step : scenario.steps) world.apply(step);
  const std::uint64_t placed = world.placement_hash();
  world.finish();
  return {world.failure(), placed};
}

bool is_sound(const Ran& ran, std::uint64_t seed) {
  if (EXPECT(ran.failure.empty())) return true;
  std::printf("  seed %llu: %s\n", static_cast<unsigned long long>(seed), ran.failure.c_str());
  return false;
}

// That blocks lie elsewhere than best fit puts them proves that it was not in vain. A program that
// best fit alone would place alike every time is one of a few.
CHECK(Nothing, every_claim_holds_while_a_program_repeats_itself) {
  const auto seeds =
      static_cast<std::uint64_t>(std::clamp<std::int64_t>(options.operations / 10'000, 2, 60));
  std::uint64_t differing = 0;
  for (std::uint64_t seed = options.first_seed; seed < options.first_seed + seeds; ++seed) {
    const Ran repeating = run(repeated(seed, true));
    const Ran plain = run(repeated(seed, false));
    if (!is_sound(repeating, seed) || !is_sound(plain, seed)) continue;
    differing += plain.placement_hash != repeating.placement_hash ? 1 : 0;
  }
  EXPECT(differing > seeds / 2);
}

}  // namespace
}  // namespace vramx::stress
