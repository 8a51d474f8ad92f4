// The device allocators of a process, and the interface in front of them: one claim a
// check. Prints one line a check and a closing count. The checks are in process/. Needs no device;
// a second or two.
//
// Exit 0 when all hold, 1 when one does not.
#include "contract.h"

int main() {
  vramx::contract::run_checks();
  return vramx::contract::closing_line();
}
