// Four threads that allocate, fill, compare and free at once, beside one that trims, defragments,
// changes the limit and looks. Under the thread sanitizer this is the proof that one lock guards
// everything and that driver calls are made without it; under the others, that no two threads ever
// hold the same bytes.
#include <atomic>
#include <thread>
#include <vector>

#include "stress/random.h"
#include "stress/suite.h"

namespace vramx::stress {
namespace {

constexpr std::uint32_t kThreads = 4;
constexpr Bytes kCapacity{24 << 20};

// Apart from the handles that mean something to CUDA.
Stream stream_of(std::uint64_t thread) { return Stream{16 + thread}; }

struct Held {
  Address address;
  Bytes size;
  std::uint64_t pattern = 0;
};

std::uint64_t& word(Address at) { return *reinterpret_cast<std::uint64_t*>(at.value); }

void fill(const Held& block) {
  for (Bytes at{}; at < block.size; at += kBlockUnit) word(block.address + at) = block.pattern;
}

bool is_intact(const Held& block) {
  for (Bytes at{}; at < block.size; at += kBlockUnit) {
    if (word(block.address + at) != block.pattern) return false;
  }
  return true;
}

// What the threads of one run share.
struct Arena {
  SimDriver& sim;
  DeviceAllocator& allocator;
  std::atomic<std::uint64_t> broken{0};
  std::atomic<std::uint64_t> allocations{0};
  std::atomic<std::uint64_t> ooms{0};
  std::atomic<std::uint32_t> working{kThreads};

  void require(bool holds) {
    if (!holds) ++broken;
  }
};

void free_one(Arena& arena, std::vector<Held>& held, std::size_t which) {
  const Held block = held[which];
  held[which] = held.back();
  held.pop_back();
  arena.require(is_intact(block));
  arena.require(arena.allocator.free(block.address).ok());
}

void allocate_one(Arena& arena, std::vector<Held>& held, Random& random, Stream stream) {
  const Bytes size{random.log_uniform(kCapacity.count / 8)};
  const Result<Address> made = arena.allocator.allocate(size, stream);
  if (!made.ok()) {
    ++arena.ooms;
    arena.require(made.status().code == StatusCode::kOutOfMemory);
    return;
  }
  ++arena.allocations;
  held.push_back({made.value(), rounded(size), random.next()});
  fill(held.back());
}

void work(Arena& arena, std::uint32_t number, std::int64_t steps) {
  Random random(number);
  std::vector<Held> held;
  const Stream own = stream_of(number);
  for (std::int64_t i = 0; i < steps; ++i) {
    const std::uint64_t roll = random.below(100);
    if (roll < 48 || held.empty()) {
      allocate_one(arena, held, random, own);
    } else if (roll < 90) {
      free_one(arena, held, random.below(held.size()));
    } else {
      const Stream other = stream_of(random.between(1, kThreads));
      arena.require(
          arena.allocator.record_stream(held[random.below(held.size())].address, {other}, true)
              .ok());
      arena.require(arena.sim.submit(other).ok());
    }
  }
  while (!held.empty()) free_one(arena, held, held.size() - 1);
  --arena.working;
}

// Until the others are done, and at least once each.
void maintain(Arena& arena) {
  for (std::uint64_t turn = 0; turn < 8 || arena.working != 0; ++turn) {
    if (turn % 4 == 0) arena.allocator.trim();
    if (turn % 4 == 1) arena.allocator.defragment();
    if (turn % 4 == 2)
      arena.allocator.set_limit(turn % 8 == 2 ? kCapacity : Bytes{kCapacity.count / 2});
    arena.sim.advance_all();
    arena.require(arena.allocator.check().empty());
    arena.require(arena.allocator.stats().allocation[0].current >= 0);
    arena.require(arena.allocator.held() <= kCapacity);
    static_cast<void>(arena.allocator.layout());
    static_cast<void>(arena.allocator.last_out_of_memory().message());
    std::this_thread::yield();
  }
}

CHECK(Nothing, threads_never_share_bytes) {
  const auto sim = contract::open_sim({.capacity = kCapacity, .granularity = kGranularity});
  REQUIRE(sim != nullptr);
  auto created = DeviceAllocator::create(*sim, {.alias_addresses = kCapacity * 64,
                                                .patience = std::chrono::milliseconds{20},
                                                .trace_events = 64});
  REQUIRE(created.ok());
  DeviceAllocator& allocator = *created.value();
  const LastingStreams surroundings;
  allocator.set_surroundings(&surroundings);
  std::atomic<int> reliefs{0};
  allocator.add_relief([&] {
    ++reliefs;
    static_cast<void>(allocator.stats());  // the lock is free meanwhile
    return false;
  });
  Arena arena{*sim, allocator};
  std::vector<std::thread> threads;
  for (std::uint32_t i = 1; i <= kThreads; ++i) {
    threads.emplace_back([&, i] { work(arena, i, options.operations / 40 + 500); });
  }
  threads.emplace_back([&] { maintain(arena); });
  for (std::thread& thread : threads) thread.join();
  EXPECT(arena.broken == 0);
  EXPECT(arena.allocations > 0 && arena.ooms > 0 && reliefs > 0);
  EXPECT(allocator.check().empty());
  sim->advance_all();
  allocator.trim();
  EXPECT(allocator.stats().allocated_bytes[0].current == 0 && sim->live_chunks() == 0);
  created.value().reset();
  EXPECT(contract::is_empty(*sim));
}

}  // namespace
}  // namespace vramx::stress
