// What the parts of core_stress share: its options and the checks that each part adds.
//
// Checks run one after another and print a line each, with the macros of contract.h.
#pragma once

#include <cstdint>
#include <string>

#include "contract.h"
#include "stress/scenario.h"
#include "stress/world.h"

namespace vramx::stress {

struct Options {
  std::int64_t operations = 1'000'000;  // of the random part; the others follow it in size
  std::uint64_t first_seed = 1;
};

// What the command line says.
inline Options options;

using contract::Nothing;

// Takes `steps` steps from the seed and finishes; `taken` gets the steps, if it is not null.
constexpr int kStepsPerSeed = 2000;
struct SeedRun {
  std::string failure;
  Coverage coverage;
  std::uint64_t placement_hash = 0;
  Scenario scenario;
};
SeedRun run_seed(std::uint64_t seed, int steps, Defect defect = Defect::kNone);

// Runs one seed in a child process, shrinks what fails and prints it as C++. True if it passes.
bool explain_seed(std::uint64_t seed);

}  // namespace vramx::stress
