// A forked child: it inherits an allocator whose lock another thread of the parent may hold, over a
// device that it cannot reach. There it must refuse or do nothing, and never wait; the parent must
// not notice.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "stress/shrink.h"
#include "stress/suite.h"

namespace vramx::stress {
namespace {

constexpr int kForks = 20;
constexpr unsigned kChildLimitS = 20;  // then the child is killed by its alarm

// The exit code names the first thing that went wrong.
[[noreturn]] void use_in_child(DeviceAllocator& allocator, Address live) {
  alarm(kChildLimitS);
  if (allocator.allocate(Bytes{4096}, Stream{1}).status().code != StatusCode::kNotInitialized) {
    _exit(1);
  }
  if (!allocator.free(live).ok()) _exit(2);
  if (!allocator.record_stream(live, {Stream{2}}, false).ok()) _exit(3);
  if (allocator.trim().chunks_released != 0) _exit(4);
  if (allocator.defragment().chunks_released != 0) _exit(5);
  if (!allocator.owns(live)) _exit(6);
  _exit(0);
}

int exit_code_of_child(DeviceAllocator& allocator, Address live) {
  const pid_t child = fork();
  if (child == 0) use_in_child(allocator, live);
  if (child < 0) return -1;
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

CHECK(Nothing, a_forked_child_neither_allocates_nor_hangs) {
  const auto sim = contract::open_sim({.capacity = kGranularity * 64, .granularity = kGranularity});
  REQUIRE(sim != nullptr);
  auto created = DeviceAllocator::create(*sim, {.alias_addresses = kGranularity * 4096});
  REQUIRE(created.ok());
  DeviceAllocator& allocator = *created.value();
  const Result<Address> live = allocator.allocate(Bytes{100000}, Stream{1});
  REQUIRE(live.ok());
  std::atomic<bool> is_over{false};
  std::thread busy([&] {
    while (!is_over) {
      const Result<Address> block = allocator.allocate(Bytes{70000}, Stream{2});
      if (block.ok()) EXPECT(allocator.free(block.value()).ok());
    }
  });
  for (int i = 0; i < kForks; ++i) EXPECT(exit_code_of_child(allocator, live.value()) == 0);
  is_over = true;
  busy.join();
  EXPECT(allocator.check().empty());
  EXPECT(allocator.stats().allocation[0].current == 1);
  EXPECT(allocator.free(live.value()).ok());
  EXPECT(allocator.trim().chunks_released > 0);
  created.value().reset();
  EXPECT(contract::is_empty(*sim));
}

CHECK(Nothing, a_child_may_have_an_allocator_of_its_own) {
  EXPECT(first_failure_in_child({}).empty());
}

}  // namespace
}  // namespace vramx::stress
