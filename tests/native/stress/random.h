// The random numbers of the stress: one 64-bit state, the same sequence on every machine.
//
// splitmix64, and the few distributions that a scenario is drawn from. The standard library's
// distributions are not used because their results differ between implementations, and a seed that
// fails has to fail everywhere. Not thread-safe: one generator a thread.
#pragma once

#include <cstdint>

namespace vramx::stress {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

  // In [0, bound). The bias of the remainder is far below anything that matters here.
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  std::uint64_t between(std::uint64_t low, std::uint64_t high) {
    return low + below(high - low + 1);
  }
  bool one_in(std::uint64_t n) { return below(n) == 0; }
  bool percent(std::uint64_t p) { return below(100) < p; }

  // In [1, high]; each power of two is as likely as the next.
  std::uint64_t log_uniform(std::uint64_t high) {
    std::uint64_t bits = 0;
    while ((high >> bits) > 1) ++bits;
    const std::uint64_t top = std::uint64_t{1} << below(bits + 1);
    const std::uint64_t value = top + below(top);
    return value > high ? high : value;
  }

 private:
  std::uint64_t state_;
};

}  // namespace vramx::stress
