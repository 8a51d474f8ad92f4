// The allocator's core under random use, on the simulated device: model-based scenarios with a
// shadow of every byte, in which threads come in the middle of each other's driver calls, planted
// defects that the shadow must see, a failure at every driver call, threads that run at once, and a
// forked child. Prints one line a check and a closing count. The parts are in stress/.
//
// Build and run, from the repository's root:
//   g++ -std=c++20 -O2 -g -Wall -Wextra -Werror -Icsrc -Itests/native -pthread csrc/core/*.cpp
//       csrc/driver/*.cpp tests/native/core_stress.cpp tests/native/stress/*.cpp -ldl
//       -o core_stress
//       (one line; add -fsanitize=address,undefined or -fsanitize=thread)
//   ./core_stress [operations [first seed [part...]]]    (all parts, 1,000,000 from seed 1)
//   ./core_stress seed N                  shrinks what fails in seed N and prints it as C++
// Exit 0 when all hold, 1 when one does not, 2 on wrong usage.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "stress/suite.h"

namespace vramx::stress {
namespace {

// The files of checks.
const std::string kParts[] = {"regressions", "random",  "repeats", "defects",
                              "failures",    "threads", "forks"};

bool is_part(const std::string& name) { return std::ranges::count(kParts, name) != 0; }

bool is_number(const std::string& text, std::uint64_t* value) {
  char* end = nullptr;
  *value = std::strtoull(text.c_str(), &end, 10);
  return !text.empty() && *end == '\0';
}

int usage() {
  std::fprintf(stderr, "usage: core_stress [operations [first seed [part...]]] | seed N\nparts:");
  for (const std::string& part : kParts) std::fprintf(stderr, " %s", part.c_str());
  std::fprintf(stderr, "\n");
  return 2;
}

int run(const std::vector<std::string>& arguments) {
  std::uint64_t operations = 0;
  if (arguments.size() == 2 && arguments[0] == "seed") {
    if (!is_number(arguments[1], &options.first_seed)) return usage();
    return explain_seed(options.first_seed) ? 0 : 1;
  }
  if (!arguments.empty()) {
    if (!is_number(arguments[0], &operations)) return usage();
    options.operations = static_cast<std::int64_t>(operations);
  }
  if (arguments.size() > 1 && !is_number(arguments[1], &options.first_seed)) return usage();
  const auto parts = std::span(arguments).subspan(std::min<std::size_t>(arguments.size(), 2));
  if (!std::ranges::all_of(parts, is_part)) return usage();
  contract::run_checks(parts.empty() ? std::span<const std::string>(kParts) : parts);
  return contract::closing_line();
}

}  // namespace
}  // namespace vramx::stress

int main(int argc, char** argv) {
  return vramx::stress::run({argv + std::min(argc, 1), argv + argc});
}
