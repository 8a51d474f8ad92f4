#include "core/fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace vramx {
namespace {

std::atomic<std::uint32_t> generation{0};
std::atomic<bool> is_registered{false};

void enter_child() { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

ForkGuard::ForkGuard() {
  if (!is_registered.exchange(true)) pthread_atfork(nullptr, nullptr, enter_child);
  born_ = generation.load(std::memory_order_relaxed);
}

bool ForkGuard::is_in_child() const { return generation.load(std::memory_order_relaxed) != born_; }

}  // namespace vramx
