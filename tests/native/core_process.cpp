// The device allocators of a process, and the interface in front of them: one claim a
// check. Prints one line a check and a closing count. The checks are in process/. Needs no device;
// a second or two.
//
// Exit 0 when all hold, 1 when one does not.
#include <cstdio>

#include "contract.h"
#include "process/process.h"

int main() {
  namespace checks = vramx::process_checks;
  checks::check_devices();
  checks::check_allocators();
  checks::check_plain();
  checks::check_forks();
  checks::check_threads();
  const auto& tally = vramx::contract::tally();
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed == 0 ? 0 : 1;
}
