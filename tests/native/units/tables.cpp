// The small parts: free address ranges, the blocks that callers hold, the ring of events,
// whether this process was forked, and the lock.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "core/adaptive_mutex.h"
#include "core/block_table.h"
#include "core/event_trace.h"
#include "core/fork_guard.h"
#include "core/range_set.h"
#include "units/units.h"

namespace vramx::units::tables_claims {

// --- range set ----------------------------------------------------------------------------------

struct Ranges {
  RangeSet set{kBase, kPage * 4};
};

CHECK(Ranges, the_first_range_that_fits_is_taken_from_its_start) {
  EXPECT(set.take(kPage) == kBase);
  EXPECT(set.take(kPage * 3) == kBase + kPage);
}

CHECK(Ranges, nothing_is_taken_where_nothing_fits) {
  EXPECT(!set.take(kPage * 4 + 1_B));
  EXPECT(set.take(kPage * 4) == kBase);
  EXPECT(!set.take(1_B));
}

CHECK(Ranges, returned_ranges_merge_with_both_neighbours) {
  for (int i = 0; i < 4; ++i) set.take(kPage);
  set.give_back(kBase, kPage);
  set.give_back(kBase + kPage * 2, kPage);
  EXPECT(!set.take(kPage + 1_B));
  set.give_back(kBase + kPage, kPage);
  EXPECT(set.take(kPage * 3) == kBase);
}

// --- block table --------------------------------------------------------------------------------

// A table and the addresses of the blocks that begin with each span.
struct Blocks {
  BlockTable table;
  std::vector<Address> addresses;

  BlockTable::Entry find(Address address) const {
    return table.find(address, [&](SpanId span) { return addresses[span] == address; });
  }
  void insert(Address address) {
    table.insert(address, static_cast<SpanId>(addresses.size()));
    addresses.push_back(address);
  }
};

// An entry has no room for the upper bits of an address.
CHECK(Blocks, addresses_that_differ_by_two_tebibytes_are_told_apart) {
  const Address far = kBase + kBlockUnit * (std::uint64_t{1} << 32);
  insert(kBase);
  EXPECT(find(far).span == kNoId);
  insert(far);
  EXPECT(find(far).span == 1 && find(kBase).span == 0);
  table.erase(find(kBase));
  EXPECT(find(kBase).span == kNoId && find(far).span == 1);
  EXPECT(find(Address{}).span == kNoId);
}

// Enough blocks to grow the table several times and to fill some buckets, with erasures of entries
// that had to go to another bucket.
CHECK(Blocks, every_answer_is_that_of_a_map) {
  std::mt19937_64 random(7);
  std::map<Address, SpanId> reference;
  for (std::uint64_t step = 0; step < 20000; ++step) {
    const Address address = kBase + kBlockUnit * (random() % 6000);
    const BlockTable::Entry found = find(address);
    const auto known = reference.find(address);
    REQUIRE((found.span != kNoId) == (known != reference.end()));
    if (found.span == kNoId) {
      reference[address] = static_cast<SpanId>(addresses.size());
      insert(address);
    } else {
      REQUIRE(found.span == known->second);
      table.erase(found);
      reference.erase(known);
    }
  }
  std::size_t visited = 0;
  table.for_each([&](SpanId span) { visited += reference.count(addresses[span]); });
  EXPECT(visited == reference.size() && table.count() == reference.size());
}

// In each bucket a block that found the one before it full, which no longer is: no bucket says that
// nothing lies behind it.
CHECK(Blocks, a_search_ends_where_every_bucket_was_passed) {
  constexpr std::size_t kBuckets = 128;
  constexpr std::size_t kRoom = 7;
  std::vector<std::vector<Address>> of_bucket(kBuckets);
  for (std::uint32_t unit = 0; unit < 4096; ++unit) {
    const Address address = kBase + kBlockUnit * unit;
    const auto key = static_cast<std::uint32_t>(address.value / kBlockUnit.count);
    of_bucket[key * 0x9E3779B9u >> 25].push_back(address);  // as the table hashes
  }
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
    const std::size_t own = bucket == 0 ? kRoom : kRoom - 1;  // beside one of the bucket before
    REQUIRE(of_bucket[bucket].size() > own + 1);
    for (std::size_t i = 0; i <= own; ++i) insert(of_bucket[bucket][i]);
    for (std::size_t i = 0; i < own; ++i) table.erase(find(of_bucket[bucket][i]));
  }
  EXPECT(table.count() == kBuckets);
  EXPECT(find(of_bucket[5].back()).span == kNoId);
  EXPECT(find(of_bucket[5][kRoom - 1]).span != kNoId);
}

// --- event trace --------------------------------------------------------------------------------

void add(EventTrace& trace, std::uint64_t size) {
  trace.add(TraceKind::kAllocate, kBase, Bytes{size}, Stream::kDefault);
}

std::vector<std::uint64_t> sizes(const EventTrace& trace) {
  std::vector<std::uint64_t> result;
  for (const TraceEvent& event : trace.events()) result.push_back(event.size.count);
  return result;
}

CHECK(Nothing, a_full_ring_forgets_the_oldest) {
  EventTrace trace(3);
  for (std::uint64_t size = 1; size <= 3; ++size) add(trace, size);
  EXPECT((sizes(trace) == std::vector<std::uint64_t>{1, 2, 3}));
  add(trace, 4);
  EXPECT((sizes(trace) == std::vector<std::uint64_t>{2, 3, 4}));
  EXPECT(trace.added() == 4);
}

CHECK(Nothing, the_time_of_events_does_not_go_back) {
  EventTrace trace(2);
  add(trace, 1);
  add(trace, 2);
  EXPECT(trace.events()[0].time_ns > 0);
  EXPECT(trace.events()[0].time_ns <= trace.events()[1].time_ns);
}

// --- fork guard ---------------------------------------------------------------------------------

CHECK(Nothing, an_object_knows_that_it_is_in_a_child) {
  const ForkGuard guard;
  EXPECT(!guard.is_in_child());
  const pid_t child = fork();
  // The child says what it saw with its exit code, and runs nothing of this program's end.
  if (child == 0) _exit(guard.is_in_child() && !ForkGuard().is_in_child() ? 0 : 1);
  int state = 0;
  REQUIRE(child > 0 && waitpid(child, &state, 0) == child);
  EXPECT(WIFEXITED(state) && WEXITSTATUS(state) == 0);
  EXPECT(!guard.is_in_child());
}

// --- adaptive mutex -----------------------------------------------------------------------------

CHECK(Nothing, no_increment_under_the_lock_is_lost) {
  constexpr int kThreads = 4;
  constexpr int kIncrements = 20'000;
  AdaptiveMutex mutex;
  int count = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < kIncrements; ++n) {
        const Lock lock(mutex);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(count == kThreads * kIncrements);
}

CHECK(Nothing, a_lock_that_is_held_is_not_taken) {
  AdaptiveMutex mutex;
  EXPECT(mutex.try_lock());
  EXPECT(!mutex.try_lock());
  mutex.unlock();
  EXPECT(mutex.try_lock());
}

// Held for far longer than a waiter tries before it sleeps.
CHECK(Nothing, a_waiter_that_sleeps_gets_the_lock_in_the_end) {
  AdaptiveMutex mutex;
  mutex.lock();
  bool is_free = false;
  bool was_free = false;
  std::thread waiter([&] {
    const Lock lock(mutex);
    was_free = is_free;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  is_free = true;
  mutex.unlock();
  waiter.join();
  EXPECT(was_free);
}

}  // namespace vramx::units::tables_claims
