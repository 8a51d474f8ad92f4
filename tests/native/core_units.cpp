// The core, class by class: one claim a check, readable as its specification. Prints one line a
// check and a closing count. The checks are in units/, one file for each part of the core.
//
// Each invariant of core/types.h has a check that breaks it on purpose and wants it named, so that
// a clean check() elsewhere means something. Needs no device; single-threaded; a second or two.
//
// Exit 0 when all hold, 1 when one does not.
#include "contract.h"

int main() {
  vramx::contract::run_checks();
  return vramx::contract::closing_line();
}
