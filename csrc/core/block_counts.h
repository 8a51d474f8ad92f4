// How many blocks live and were made, and their bytes: the counts that change with every call.
//
// A store in each of them would take a tenth of a call, so those are kept that others follow from:
// what was freed is what was made and does not live, and what holds of all blocks is the sum of
// small and large ones. Plain data; not thread-safe: the device allocator holds the lock. Counting
// an allocation is nine stores at most, a free three.
#pragma once

#include <algorithm>
#include <array>

#include "core/stats.h"

namespace vramx {

class BlockCounts {
 public:
  void count_allocation(Bytes requested, Bytes size) {
    const bool is_large = is_large_request(requested);
    Pool& pool = pools_[is_large];
    const Pool& other = pools_[!is_large];
    const Sums by{1, static_cast<std::int64_t>(size.count),
                  static_cast<std::int64_t>(requested.count)};
    for (std::size_t i = 0; i < by.size(); ++i) {
      pool.made[i] += by[i];
      const std::int64_t lives = pool.live[i] += by[i];
      if (lives > pool.peak[i]) pool.peak[i] = lives;
      if (lives + other.live[i] > peak_[i]) peak_[i] = lives + other.live[i];
    }
  }
  void count_free(Bytes requested, Bytes size) {
    Pool& pool = pools_[is_large_request(requested)];
    pool.live[kCount] -= 1;
    pool.live[kBytes] -= static_cast<std::int64_t>(size.count);
    pool.live[kRequested] -= static_cast<std::int64_t>(requested.count);
  }

  Bytes live_bytes() const {
    return Bytes{static_cast<std::uint64_t>(pools_[0].live[kBytes] + pools_[1].live[kBytes])};
  }
  void reset_peak() {
    for (Pool& pool : pools_) pool.peak = pool.live;
    peak_ = sum_of(&Pool::live);
  }
  void reset_accumulated() {
    for (Pool& pool : pools_) {
      pool.made = {};
      pool.lived = pool.live;
    }
  }
  // What torch reports of them.
  void report(AllocatorStats* stats) const {
    PoolCounters* const counters[] = {&stats->allocation, &stats->allocated_bytes,
                                      &stats->requested_bytes};
    const Pool all{sum_of(&Pool::live), peak_, sum_of(&Pool::made), sum_of(&Pool::lived)};
    for (std::size_t i = 0; i < std::size(counters); ++i) {
      *counters[i] = {counter_of(all, i), counter_of(pools_[0], i), counter_of(pools_[1], i)};
    }
  }

 private:
  enum : std::size_t { kCount, kBytes, kRequested, kSums };
  using Sums = std::array<std::int64_t, kSums>;
  struct Pool {
    Sums live{};
    Sums peak{};
    Sums made{};   // since reset_accumulated()
    Sums lived{};  // then
  };

  static bool is_large_request(Bytes requested) { return requested > kSmallRequest; }
  static Counter counter_of(const Pool& pool, std::size_t i) {
    return {pool.live[i], pool.peak[i], pool.made[i], pool.lived[i] + pool.made[i] - pool.live[i]};
  }
  Sums sum_of(Sums Pool::* member) const {
    Sums sum{};
    for (std::size_t i = 0; i < kSums; ++i) {
      sum[i] = (pools_[0].*member)[i] + (pools_[1].*member)[i];
    }
    return sum;
  }

  std::array<Pool, 2> pools_{};  // of small requests and of large ones
  Sums peak_{};                  // of all together
};

}  // namespace vramx
