// A forked child: every function answers, none waits, and none reaches a driver or a source; not
// even when a thread of the parent was starting a device, with the lock, at the time of the fork.
// A child of a process that had used no GPU yet is not one in this sense.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "process/process.h"

namespace vramx::process_checks::forks_claims {

constexpr unsigned kChildLimitS = 20;  // then the child is killed by its alarm

// The number of the first thing that is wrong, or zero.
int blocks_are_inert(Fixture& fixture, Address live) {
  Allocators& core = fixture.core;
  Address address;
  CoreBlock block;
  if (!core.is_in_child()) return 1;
  if (fixture.allocate(0, 1_MiB, &address) != CoreCode::kForked) return 2;
  if (fixture.allocate(1, 1_MiB, &address) != CoreCode::kForked) return 3;
  if (core.free(live, &block) != CoreCode::kForked) return 4;
  if (core.record_stream(live, {Stream{1}}, false) != CoreCode::kForked) return 5;
  if (core.find(live, &block) != CoreCode::kForked) return 6;
  if (core.allow_peer(0, 1) != CoreCode::kForked) return 7;
  return 0;
}

int the_rest_is_inert(Allocators& core) {
  int pieces = 0;
  core.trim(-1);
  core.set_limit(-1, 1_MiB);
  core.set_limit(0, 1_MiB);
  core.add_relief([](void*, std::int32_t) {}, nullptr);
  core.set_observer([](void*, const CoreEvent&) {}, nullptr);
  core.reset_peak_stats(0);
  core.reset_accumulated_stats(0);
  core.for_each_piece(
      0, [](void* context, const CorePiece&) { ++*static_cast<int*>(context); }, &pieces);
  if (core.defragment(-1).released || pieces != 0) return 8;
  if (core.held(0) || core.allocated(0)) return 9;
  if (core.largest_obtainable(0)) return 10;
  if (core.stats(0).num_device_alloc != 0) return 11;
  if (core.take_interval_stats(0).num_device_alloc != 0) return 15;
  return 0;
}

// What `act` returns in a child, or the signal that ends it, below zero.
template <class Action>
int in_child(Action act) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kChildLimitS);
    _exit(act());
  }
  int state = 0;
  if (child < 0 || waitpid(child, &state, 0) != child) return -1;
  return WIFEXITED(state) ? WEXITSTATUS(state) : -WTERMSIG(state);
}

int failure_in_child(Fixture& fixture, Address live) {
  const std::uint64_t calls = fixture.source.drivers[0]->call_count();
  const int opened = fixture.source.opened;
  return in_child([&] {
    int wrong = blocks_are_inert(fixture, live);
    if (wrong == 0) wrong = the_rest_is_inert(fixture.core);
    if (wrong == 0 && fixture.devices.capacity(0)) wrong = 12;
    if (wrong == 0 && fixture.source.drivers[0]->call_count() != calls) wrong = 13;
    if (wrong == 0 && fixture.source.opened != opened) wrong = 14;
    return wrong;
  });
}

int failure_to_serve(Fixture& fixture) {
  Address address;
  if (fixture.core.is_in_child()) return 1;
  if (fixture.allocate(0, 1_MiB, &address) != CoreCode::kOk) return 2;
  if (fixture.core.allocated(0) != 1_MiB) return 3;
  if (fixture.free(address) != CoreCode::kOk || fixture.core.allocated(0)) return 4;
  if (fixture.allocate(0, 32_MiB, &address) != CoreCode::kOutOfMemory) return 5;
  return in_child([&] { return fixture.core.is_in_child() ? 0 : 6; });
}

CHECK(Fixture, a_child_is_inert) {
  const Address live = take(0, 1_MiB);
  REQUIRE(live);
  EXPECT(failure_in_child(*this, live) == 0);
  EXPECT(free(live) == CoreCode::kOk);
}

CHECK(Fixture, a_child_does_not_wait_for_a_start_of_its_parent) {
  const Address live = take(0, 1_MiB);
  REQUIRE(live);
  source.close_gate();
  std::thread starting([&] { EXPECT(static_cast<bool>(take(1, 1_MiB))); });
  source.wait_until_held();
  EXPECT(failure_in_child(*this, live) == 0);
  // Nor does the parent, where the device is there already.
  EXPECT(take(0, 1_MiB));
  EXPECT(free(live) == CoreCode::kOk);
  core.set_limit(0, kCapacity);
  source.open_gate();
  starting.join();
}

CHECK(Fixture, a_child_of_a_process_that_used_no_gpu_is_served_with_its_settings) {
  core.set_limit(-1, 16_MiB);
  EXPECT(in_child([&] { return failure_to_serve(*this); }) == 0);
  // A child forked in between changes nothing for the next, nor for the parent.
  EXPECT(in_child([&] { return failure_to_serve(*this); }) == 0);
  EXPECT(failure_to_serve(*this) == 0);
}

CHECK(Fixture, all_threads_of_such_a_child_are_served) {
  const auto act = [&] {
    std::atomic<int> served{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] { served += take(i, 1_MiB) ? 1 : 0; });
    }
    for (std::thread& each : threads) each.join();
    return served == 4 ? 0 : 1;
  };
  for (int i = 0; i < 20; ++i) EXPECT(in_child(act) == 0);
}

CHECK(Fixture, once_cuda_is_in_use_a_child_is_inert_though_no_device_was_started) {
  core.note_use();
  EXPECT(in_child([&] { return core.is_in_child() && !take(0, 1_MiB) ? 0 : 1; }) == 0);
}

}  // namespace vramx::process_checks::forks_claims
