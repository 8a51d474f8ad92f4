#include "core/fork_guard.h"

#include <pthread.h>

namespace vramx {
namespace {

std::atomic<bool> is_registered{false};

}  // namespace

std::atomic<std::uint32_t> ForkGuard::generation_{0};

ForkGuard::ForkGuard() {
  if (!is_registered.exchange(true)) pthread_atfork(nullptr, nullptr, enter_child);
  renew();
}

}  // namespace vramx
