// The core, class by class: one claim a check, readable as its specification. Prints one line a
// check and a closing count. The checks are in units/, one file for each part of the core.
//
// Each invariant of core/types.h has a check that breaks it on purpose and wants it named, so that
// a clean check() elsewhere means something. Needs no device; single-threaded; a second or two.
//
// Exit 0 when all hold, 1 when one does not.
#include <cstdio>

#include "contract.h"
#include "units/units.h"

int main() {
  namespace units = vramx::units;
  units::check_free_index();
  units::check_chunk_table();
  units::check_arena();
  units::check_arena_tags();
  units::check_arena_invariants();
  units::check_zones();
  units::check_tag_table();
  units::check_stitch_plan();
  units::check_alias_cache();
  units::check_recurrence();
  units::check_quick_placement();
  units::check_planner();
  units::check_lifetimes();
  units::check_tables();
  units::check_streams();
  units::check_stream_order();
  units::check_mapper();
  units::check_device_allocator();
  units::check_handed_over();
  units::check_holdings();
  units::check_peers();
  const auto& tally = vramx::contract::tally();
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed == 0 ? 0 : 1;
}
