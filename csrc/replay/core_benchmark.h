// What one call of the core costs: random replacement at a steady number of live blocks.
//
// On the simulated device without bytes, so that the policy alone is measured. Free of state.
#pragma once

#include <cstdint>

#include "core/units.h"

namespace vramx::replay {

struct CoreBenchmark {
  std::uint64_t live_blocks = 0;
  std::uint64_t operations = 0;  // frees and allocations, over all threads
  Bytes smallest{};              // sizes are drawn log-uniformly
  Bytes largest{};
  std::uint32_t threads = 1;
};

struct CoreCost {
  bool is_out_of_memory = false;
  double ns_per_operation = 0.0;  // wall time of a thread over the calls that it made
  double bytes_per_block = 0.0;   // of the core's own bookkeeping, at the end
};

CoreCost measure_core(const CoreBenchmark& benchmark);

}  // namespace vramx::replay
