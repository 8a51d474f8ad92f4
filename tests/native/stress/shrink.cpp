// Delta debugging over steps; see the header.
#include "stress/shrink.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>

#include "stress/world.h"

namespace vramx::stress {
namespace {

std::string kind_of(const std::string& failure) { return failure.substr(0, failure.find(':')); }

std::string read_all(int file) {
  std::string text;
  char buffer[256];
  for (ssize_t got = 0; (got = read(file, buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(got));
  }
  close(file);
  return text;
}

[[noreturn]] void report_and_leave(const std::function<std::string()>& attempt, int file) {
  std::signal(SIGABRT, SIG_DFL);
  // What an assertion or a sanitizer would print of each attempt is of no use here.
  close(STDERR_FILENO);
  const std::string failure = attempt();
  const bool is_written =
      write(file, failure.data(), failure.size()) == static_cast<ssize_t>(failure.size());
  _exit(is_written ? 0 : 1);
}

// One pass: takes out each run of `length` steps that the failure does not need.
bool take_out_runs(Scenario& scenario, std::size_t length, const std::string& kind) {
  bool is_smaller = false;
  for (std::size_t begin = 0; begin < scenario.steps.size();) {
    Scenario attempt = scenario;
    const std::size_t end = std::min(begin + length, scenario.steps.size());
    attempt.steps.erase(attempt.steps.begin() + static_cast<std::ptrdiff_t>(begin),
                        attempt.steps.begin() + static_cast<std::ptrdiff_t>(end));
    if (kind_of(first_failure_in_child(attempt)) == kind) {
      scenario = std::move(attempt);
      is_smaller = true;
    } else {
      begin = end;
    }
  }
  return is_smaller;
}

}  // namespace

std::string in_child(const std::function<std::string()>& attempt) {
  int ends[2];
  if (pipe(ends) != 0) return "crash: no pipe";
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    report_and_leave(attempt, ends[1]);
  }
  close(ends[1]);
  if (child < 0) return close(ends[0]), "crash: no child";
  std::string failure = read_all(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) return "crash: signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return "crash: exit " + std::to_string(WEXITSTATUS(status));
  return failure;
}

std::string first_failure_in_child(const Scenario& scenario) {
  return in_child([&] { return first_failure(scenario); });
}

Scenario shrink(Scenario scenario, const std::string& failure) {
  const std::string kind = kind_of(failure);
  scenario.setup.check_every = 1;
  if (kind_of(first_failure_in_child(scenario)) != kind) scenario.setup.check_every = 61;
  for (std::size_t length = scenario.steps.size() / 2; length > 0;) {
    const bool is_smaller = take_out_runs(scenario, length, kind);
    // At single steps, again until nothing can go: an early step may need a later one gone first.
    if (length > 1 || !is_smaller) length /= 2;
  }
  return scenario;
}

}  // namespace vramx::stress
