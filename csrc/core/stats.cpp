#include "core/stats.h"

namespace vramx {
namespace {

template <class Visit>
void for_each_counter(AllocatorStats& stats, Visit visit) {
  for (PoolCounters* counters :
       {&stats.allocation, &stats.allocated_bytes, &stats.requested_bytes}) {
    for (Counter& counter : *counters) visit(counter);
  }
  for (Counter* counter : {&stats.segment, &stats.reserved_bytes, &stats.inactive_split,
                           &stats.inactive_split_bytes}) {
    visit(*counter);
  }
}

}  // namespace

void AllocatorStats::reset_peak() {
  for_each_counter(*this, [](Counter& counter) { counter.reset_peak(); });
}

void AllocatorStats::reset_accumulated() {
  for_each_counter(*this, [](Counter& counter) { counter.reset_accumulated(); });
  num_alloc_retries = num_ooms = num_sync_all_streams = num_device_alloc = num_device_free = 0;
  num_alias_hits = num_stitches = num_growths = num_cross_stream = 0;
}

}  // namespace vramx
