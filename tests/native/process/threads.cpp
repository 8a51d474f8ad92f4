// Threads that meet at the start of devices and go on to use them, beside one that changes and
// looks at everything. The thread sanitizer makes this a proof of what is read without a lock.
#include <atomic>
#include <thread>
#include <vector>

#include "process/process.h"
#include "stress/random.h"

namespace vramx::process_checks::threads_claims {

constexpr int kThreads = 4;
constexpr int kDevices = 4;
constexpr int kSteps = 2000;
constexpr int kTurns = 64;  // of looking, at least
constexpr int kPeer = 8;

// Blocks of every device, freed by whoever comes to them.
void work(Fixture& fixture, int number, std::atomic<int>& broken) {
  stress::Random random(static_cast<std::uint64_t>(number));
  std::vector<std::pair<Address, int>> held;
  for (int step = 0; step < kSteps; ++step) {
    if (held.size() > 24 || (!held.empty() && random.percent(45))) {
      const std::size_t which = random.below(held.size());
      CoreBlock freed;
      broken += fixture.core.free(held[which].first, &freed) != CoreCode::kOk;
      broken += freed.device != held[which].second;
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
      continue;
    }
    const int device = static_cast<int>(random.below(kDevices));
    // Each device's peer comes while it is in use.
    if (step >= kSteps / 4 && step < kSteps / 4 + 4 * kDevices) {
      fixture.core.allow_peer(step % kDevices, kPeer);
    }
    const Bytes size{random.log_uniform(1 << 20)};
    if (const Address made = fixture.take(device, size)) held.emplace_back(made, device);
  }
  for (const auto& [address, device] : held) broken += fixture.free(address) != CoreCode::kOk;
}

void look(Fixture& fixture, const std::atomic<bool>& is_over) {
  Allocators& core = fixture.core;
  for (int turn = 0; turn < kTurns || !is_over; ++turn) {
    const int device = turn % kDevices;
    static_cast<void>(core.held(-1));
    static_cast<void>(core.stats(device));
    static_cast<void>(core.largest_obtainable(device));
    core.set_limit(turn % 8 == 0 ? -1 : device, kCapacity);
    core.allow_peer(device, kPeer + turn % 3);
    if (turn % 16 == 0) core.trim(device);
    if (turn % 16 == 8) core.defragment(-1);
    std::this_thread::yield();
  }
}

CHECK(Fixture, threads_may_start_and_use_devices_at_once) {
  std::atomic<int> broken{0};
  std::atomic<bool> is_over{false};
  std::atomic<std::int64_t> balance{0};
  core.set_observer(
      [](void* context, const CoreEvent& event) {
        const auto size = static_cast<std::int64_t>(event.size.count);
        *static_cast<std::atomic<std::int64_t>*>(context) +=
            event.kind == CoreEventKind::kMapped ? size : -size;
      },
      &balance);
  std::vector<std::thread> threads;
  for (int i = 1; i <= kThreads; ++i) {
    threads.emplace_back([&, i] { work(*this, i, broken); });
  }
  std::thread looking([&] { look(*this, is_over); });
  for (std::thread& thread : threads) thread.join();
  is_over = true;
  looking.join();
  EXPECT(broken == 0 && source.opened == kDevices);
  EXPECT(balance == static_cast<std::int64_t>(core.held(-1).count));
  EXPECT(core.allocated(-1) == Bytes{});
  for (int device = 0; device < kDevices; ++device) {
    REQUIRE(devices.started(device) != nullptr);
    EXPECT(devices.started(device)->check().empty());
    const SimDriver& sim = *source.drivers[static_cast<std::size_t>(device)];
    EXPECT(sim.check().empty());
    EXPECT(sim.mappings_open_to(kPeer) == sim.live_mappings());
  }
}

}  // namespace vramx::process_checks::threads_claims
