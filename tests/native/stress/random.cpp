// The random part: scenarios from consecutive seeds until enough steps were taken.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>

#include "stress/generate.h"
#include "stress/shrink.h"
#include "stress/suite.h"

namespace vramx::stress {
namespace {

// For the handler below, which may use nothing but plain memory.
char crash_text[96];

void name_seed_and_die(int number) {
  const auto written = write(STDOUT_FILENO, crash_text, std::strlen(crash_text));
  static_cast<void>(written);
  std::signal(number, SIG_DFL);
  raise(number);
}

// A crash is told with the seed that it came from.
class CrashNote {
 public:
  explicit CrashNote(std::uint64_t seed) {
    std::snprintf(crash_text, sizeof crash_text, "crashed: run core_stress seed %llu\n",
                  static_cast<unsigned long long>(seed));
    std::signal(SIGABRT, name_seed_and_die);
  }
  ~CrashNote() { std::signal(SIGABRT, SIG_DFL); }
  CrashNote(const CrashNote&) = delete;
  CrashNote& operator=(const CrashNote&) = delete;
};

void print_shrunk(const Scenario& scenario, const std::string& failure) {
  const Scenario small = shrink(scenario, failure);
  std::printf("  %s\n  %zu steps of %zu:\n%s", failure.c_str(), small.steps.size(),
              scenario.steps.size(), as_test_body(small, "test_that_it_holds").c_str());
}

CHECK(Nothing, every_claim_holds_after_every_step) {
  constexpr int kReported = 3;
  Coverage total;
  int failed = 0;
  std::uint64_t seed = options.first_seed;
  for (; total.steps < options.operations && failed < kReported; ++seed) {
    const CrashNote note(seed);
    const SeedRun run = run_seed(seed, kStepsPerSeed);
    total.add(run.coverage);
    if (EXPECT(run.failure.empty())) continue;
    ++failed;
    std::printf("  seed %llu\n", static_cast<unsigned long long>(seed));
    print_shrunk(run.scenario, run.failure);
  }
  std::printf("%s", total.text().c_str());
  EXPECT(total.is_complete());
}

CHECK(Nothing, the_same_seed_places_blocks_at_the_same_addresses) {
  for (std::uint64_t seed = options.first_seed; seed < options.first_seed + 4; ++seed) {
    const SeedRun one = run_seed(seed, kStepsPerSeed / 2);
    const SeedRun other = run_seed(seed, kStepsPerSeed / 2);
    EXPECT(one.coverage.allocations > 0 && one.placement_hash == other.placement_hash);
    EXPECT(one.coverage.text() == other.coverage.text());
  }
}

// The first steps that the seed leads to; all but the last were taken when they were drawn.
Scenario first_steps(std::uint64_t seed, int count) {
  Scenario scenario{draw_setup(seed), {}};
  World world(scenario.setup);
  Generator generator(seed, scenario.setup);
  while (static_cast<int>(scenario.steps.size()) < count && world.failure().empty()) {
    if (!scenario.steps.empty()) world.apply(scenario.steps.back());
    scenario.steps.push_back(generator.next(world));
  }
  return scenario;
}

// Each step is drawn from what the ones before it led to. So where one crashes, the last one that
// can still be drawn is looked for, in child processes.
Scenario steps_until_crash(std::uint64_t seed) {
  int known = 1;
  int too_many = kStepsPerSeed + 1;
  while (too_many - known > 1) {
    const int middle = known + (too_many - known) / 2;
    const std::string crash = in_child([&] { return first_steps(seed, middle), std::string(); });
    (crash.empty() ? known : too_many) = middle;
  }
  return first_steps(seed, known);
}

}  // namespace

SeedRun run_seed(std::uint64_t seed, int steps, Defect defect) {
  SeedRun run;
  run.scenario.setup = draw_setup(seed);
  run.scenario.setup.defect = defect;
  World world(run.scenario.setup);
  Generator generator(seed, run.scenario.setup);
  for (int i = 0; i < steps && world.failure().empty(); ++i) {
    run.scenario.steps.push_back(generator.next(world));
    world.apply(run.scenario.steps.back());
  }
  world.finish();
  run.failure = world.failure();
  run.coverage = world.coverage();
  run.placement_hash = world.placement_hash();
  return run;
}

bool explain_seed(std::uint64_t seed) {
  const Scenario scenario = steps_until_crash(seed);
  const std::string failure = first_failure_in_child(scenario);
  if (!failure.empty()) print_shrunk(scenario, failure);
  return failure.empty();
}

}  // namespace vramx::stress
