// The allocator's core under random use, on the simulated device: model-based scenarios with a
// shadow of every byte, planted defects that the shadow must see, a failure at every driver call,
// threads, and a forked child. Prints one line a check and a closing count. The parts are in
// stress/.
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
#include <string_view>

#include "stress/suite.h"

namespace vramx::stress {
namespace {

struct Part {
  std::string_view name;
  std::span<const Check> (*checks)();
};

constexpr Part kParts[] = {
    {"regressions", regression_checks},
    {"random", random_checks},
    {"repeats", repeat_checks},
    {"defects", defect_checks},
    {"failures", failure_checks},
    {"threads", thread_checks},
    {"forks", fork_checks},
};

bool is_part(std::string_view name) {
  return std::ranges::any_of(kParts, [&](const Part& part) { return part.name == name; });
}

// The parts of these names, or all.
int run_parts(const Options& options, std::span<const char* const> names) {
  for (const Part& part : kParts) {
    if (!names.empty() && std::ranges::find(names, part.name) == names.end()) continue;
    for (const Check& check : part.checks()) {
      contract::run_check(check, options);
      std::fflush(stdout);
    }
  }
  const contract::Tally& tally = contract::tally();
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed == 0 ? 0 : 1;
}

bool is_number(const std::string& text, std::uint64_t* value) {
  char* end = nullptr;
  *value = std::strtoull(text.c_str(), &end, 10);
  return !text.empty() && *end == '\0';
}

int usage() {
  std::fprintf(stderr, "usage: core_stress [operations [first seed [part...]]] | seed N\nparts:");
  for (const Part& part : kParts) {
    std::fprintf(stderr, " %.*s", static_cast<int>(part.name.size()), part.name.data());
  }
  std::fprintf(stderr, "\n");
  return 2;
}

int run(std::span<const char* const> arguments) {
  Options options;
  std::uint64_t operations = 0;
  if (arguments.size() == 2 && std::string(arguments[0]) == "seed") {
    if (!is_number(arguments[1], &options.first_seed)) return usage();
    return explain_seed(options.first_seed) ? 0 : 1;
  }
  if (!arguments.empty()) {
    if (!is_number(arguments[0], &operations)) return usage();
    options.operations = static_cast<std::int64_t>(operations);
  }
  if (arguments.size() > 1 && !is_number(arguments[1], &options.first_seed)) return usage();
  const auto names = arguments.subspan(std::min<std::size_t>(arguments.size(), 2));
  return std::ranges::all_of(names, is_part) ? run_parts(options, names) : usage();
}

}  // namespace
}  // namespace vramx::stress

int main(int argc, char** argv) {
  return vramx::stress::run({const_cast<const char* const*>(argv) + 1,
                             static_cast<std::size_t>(argc > 0 ? argc - 1 : 0)});
}
