#include "replay/core_benchmark.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "core/device_allocator.h"
#include "driver/sim_driver.h"

namespace vramx::replay {
namespace {

constexpr Bytes kMemory{std::uint64_t{1} << 44};

// Blackman and Vigna's splitmix64: any seed will do, and a draw costs a nanosecond.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

// Sizes drawn beforehand, so that logarithms are not part of what is measured.
std::vector<Bytes> draw_sizes(const CoreBenchmark& benchmark) {
  constexpr std::size_t kSizes = 4096;
  const double low = std::log2(static_cast<double>(benchmark.smallest.count));
  const double high = std::log2(static_cast<double>(benchmark.largest.count));
  Random random(1);
  std::vector<Bytes> sizes;
  for (std::size_t i = 0; i < kSizes; ++i) {
    const double share = static_cast<double>(random.next() >> 11) * 0x1p-53;
    sizes.push_back({static_cast<std::uint64_t>(std::exp2(low + share * (high - low)))});
  }
  return sizes;
}

class Worker {
 public:
  Worker(DeviceAllocator& allocator, const std::vector<Bytes>& sizes, std::uint64_t seed)
      : allocator_(allocator), sizes_(sizes), random_(seed) {}

  bool fill(std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      blocks_.push_back({});
      if (!allocate(blocks_.back())) return false;
    }
    return true;
  }

  bool replace(std::uint64_t pairs) {
    const auto started = std::chrono::steady_clock::now();
    for (std::uint64_t i = 0; i < pairs; ++i) {
      Address& block = blocks_[random_.next() % blocks_.size()];
      allocator_.free(block).ignore();
      if (!allocate(block)) return false;
    }
    ns_ = static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                  std::chrono::steady_clock::now() - started)
                                  .count());
    return true;
  }

  double ns() const { return ns_; }

 private:
  bool allocate(Address& block) {
    const Result<Address> made =
        allocator_.allocate(sizes_[random_.next() % sizes_.size()], Stream::kDefault);
    if (made.ok()) block = made.value();
    return made.ok();
  }

  DeviceAllocator& allocator_;
  const std::vector<Bytes>& sizes_;
  Random random_;
  std::vector<Address> blocks_;
  double ns_ = 0.0;
};

}  // namespace

CoreCost measure_core(const CoreBenchmark& benchmark) {
  const auto driver = SimDriver::open({.capacity = kMemory, .mode = SimMode::kAccounting});
  if (!driver.ok()) return {.is_out_of_memory = true};
  const auto allocator = DeviceAllocator::create(*driver.value(), AllocatorConfig{});
  if (!allocator.ok()) return {.is_out_of_memory = true};
  const std::vector<Bytes> sizes = draw_sizes(benchmark);
  std::vector<Worker> workers;
  for (std::uint32_t i = 0; i < benchmark.threads; ++i) {
    workers.emplace_back(*allocator.value(), sizes, i + 2);
    if (!workers.back().fill(benchmark.live_blocks / benchmark.threads))
      return {.is_out_of_memory = true};
  }
  const std::uint64_t pairs = benchmark.operations / benchmark.threads / 2;
  std::atomic<bool> is_out_of_memory{false};
  std::vector<std::thread> threads;
  for (Worker& worker : workers) {
    threads.emplace_back([&worker, &is_out_of_memory, pairs] {
      if (!worker.replace(pairs)) is_out_of_memory = true;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CoreCost cost;
  cost.is_out_of_memory = is_out_of_memory;
  for (const Worker& worker : workers) {
    cost.ns_per_operation += worker.ns() / static_cast<double>(2 * pairs * benchmark.threads);
  }
  cost.bytes_per_block = static_cast<double>(allocator.value()->stats().host_bytes) /
                         static_cast<double>(benchmark.live_blocks);
  return cost;
}

}  // namespace vramx::replay
