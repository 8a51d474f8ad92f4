#include "core/stats.h"

#include <algorithm>

namespace vramx {
namespace {

template <class Visit>
void for_each_counter(Visit visit) {
  for (PoolCounters AllocatorStats::* const counters :
       {&AllocatorStats::allocation, &AllocatorStats::allocated_bytes,
        &AllocatorStats::requested_bytes}) {
    for (std::size_t kind = 0; kind < kPoolKinds; ++kind) {
      visit([=](auto& stats) -> auto& { return (stats.*counters)[kind]; });
    }
  }
  for (Counter AllocatorStats::* const counter :
       {&AllocatorStats::segment, &AllocatorStats::reserved_bytes, &AllocatorStats::inactive_split,
        &AllocatorStats::inactive_split_bytes}) {
    visit([=](auto& stats) -> auto& { return stats.*counter; });
  }
}

}  // namespace

void AllocatorStats::reset_peak() {
  for_each_counter([&](auto of) { of(*this).reset_peak(); });
}

void AllocatorStats::reset_accumulated() {
  for_each_counter([&](auto of) { of(*this).reset_accumulated(); });
  num_alloc_retries = num_ooms = num_sync_all_streams = num_device_alloc = num_device_free = 0;
  num_alias_hits = num_stitches = num_growths = num_cross_stream = 0;
}

void AllocatorStats::raise_peaks(const AllocatorStats& other) {
  for_each_counter([&](auto of) { of(*this).peak = std::max(of(*this).peak, of(other).peak); });
}

}  // namespace vramx
