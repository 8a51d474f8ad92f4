// Runs a trace through an allocator and measures it.
//
// One loop for every policy. Free of state; each run builds its allocator anew. The time per event
// is that of the allocator's calls and the loop around them, sampled clocks and timelines left out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/driver.h"
#include "replay/allocator_model.h"
#include "replay/core_model.h"
#include "replay/trace.h"

namespace vramx::replay {

enum class Policy : std::uint8_t { kLive, kNative, kExpandable, kVramx };

// Called now and then with events done and events in all; false stops the run.
using Progress = std::function<bool(std::uint64_t, std::uint64_t)>;

struct RunOptions {
  Policy policy = Policy::kVramx;
  Bytes capacity{UINT64_MAX};
  CoreOptions::Device device = CoreOptions::Device::kSimulated;
  int ordinal = 0;
  std::uint32_t pattern_streams = 0;
  // How long after a free the simulated GPU is done with the work before it; without one at once.
  std::optional<std::uint32_t> gpu_lag_us{};
  std::size_t samples = 0;  // of the timeline; 0 takes none
  Progress progress;
};

// The highest values in each of equal parts of the run.
struct Timeline {
  std::vector<double> time_us;
  std::vector<Bytes> live;
  std::vector<Bytes> reserved;
};

struct RunResult {
  Status status = ok_status();  // not ok where no run took place
  bool is_stopped = false;
  Bytes peak_reserved{};
  Bytes peak_allocated{};  // by blocks, which may be larger than their requests
  bool is_out_of_memory = false;
  std::int64_t out_of_memory_event = -1;  // its index in the trace's arrays
  double ns_per_event = 0.0;
  DriverCalls calls;
  double driver_us_second_half = 0.0;  // of the span in time
  std::uint64_t calls_second_half = 0;
  std::uint64_t retries = 0;
  std::uint64_t mismatches = 0;
  std::uint64_t waits = 0;  // of one stream for another, made by the allocator
  // The highest sum of live bytes and those in flight: what other streams than that of the
  // allocation have freed and the GPU has not finished with.
  Bytes peak_in_use{};
  std::uint64_t host_bytes = 0;  // of the core's books at the end, when they are largest
  Timeline timeline;
};

RunResult run(const Trace& trace, const RunOptions& options);

// The smallest capacity at which the trace still runs, by bisection between the highest live bytes
// and what the policy reserves when it has no limit (or more, where that is not enough), to one
// chunk of 2 MiB. Torch's allocator is not monotone in its limit, so this is the boundary that
// those two ends lead to.
struct Capacity {
  Status status = ok_status();
  bool is_stopped = false;
  Bytes bytes{};
};
Capacity min_capacity(const Trace& trace, const RunOptions& options);

// Where the core has everything after `event`, an index into events().
Result<std::vector<Placed>> layout_after(const Trace& trace, std::size_t event);

}  // namespace vramx::replay
