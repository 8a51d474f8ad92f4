// The part that torch's native and expandable allocators have in common: rounding, pools, best fit,
// splitting, merging, and the order of attempts when no free block fits.
//
//   best fit in the pool -> grow -> give cached memory back, grow again -> out of memory
//
// A model adds how it grows and what it can give back. The rules are those of torch 2.11,
// c10/cuda/CUDACachingAllocator.cpp, with its default settings (no max_split_size, no garbage
// collection threshold, no rounding to divisions of powers of two), outside of graph capture and of
// private pools. Not thread-safe. An event costs O(log free blocks).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <string>
#include <vector>

#include "replay/allocator_model.h"
#include "replay/free_blocks.h"

namespace vramx::replay {

// Requests are rounded up to blocks. Up to 1 MiB they share small segments, below 10 MiB large
// ones; from there each growth is as large as its request. Handles have the sizes of the shared
// segments.
inline constexpr Bytes kBlockUnit{512};
inline constexpr Bytes kLargestSmallRequest{1u << 20};
inline constexpr Bytes kSmallSegment{2u << 20};
inline constexpr Bytes kLargeSegment{20u << 20};
inline constexpr Bytes kLeastOwnSegment{10u << 20};
inline constexpr Bytes kOwnSegmentUnit{2u << 20};

// Beyond any device; they keep all sums of sizes and addresses below 2^64.
inline constexpr Bytes kLargestRequest{std::uint64_t{1} << 44};
inline constexpr Bytes kLargestCapacity{std::uint64_t{1} << 56};

enum class SizeClass : std::uint8_t { kLarge, kSmall };  // in the order in which torch releases

class CachingModel : public AllocatorModel {
 public:
  AllocateResult allocate(std::uint32_t id, Bytes size, std::uint8_t stream) final;
  void free(std::uint32_t id) final;
  Bytes reserved() const final { return reserved_; }
  Bytes peak_allocated() const final { return peak_allocated_; }
  DriverCalls driver_calls() const final { return calls_; }
  std::uint64_t retries() const final { return retries_; }
  std::string check() const final;

 protected:
  // `large_remainder` is the smallest rest for which a block of the large pool is split.
  CachingModel(const ModelOptions& options, Bytes large_remainder);

  // The free block to use, given the smallest that is large enough.
  virtual FreeSet::iterator choose(const Pool& pool, FreeSet::iterator smallest);
  // A free block of at least `size`, in neither set, backed by new memory; null if refused.
  virtual Block* grow(Pool& pool, Bytes size) = 0;
  // Gives the pool's cached memory back, as far as it can.
  virtual void release_cached(Pool& pool) = 0;
  // Called once for a pool, before its first use.
  virtual void start(Pool& pool) = 0;

  // Whether torch would ask the driver at all. It compares the segment that a request would need
  // with the limit, also where an expandable segment then maps more or less than that.
  bool allowed(Bytes request) const;
  static Bytes segment_for(Bytes request);

  const CostTable& costs() const { return costs_; }

  BlockStore store_;
  Bytes reserved_;
  DriverCalls calls_;

 private:
  Pool& pool_for(std::uint8_t stream, Bytes request);
  Block* take_free(Pool& pool, Bytes size);
  Block* grow_or_release(Pool& pool, Bytes size);
  void release_all_cached();

  const Bytes capacity_;
  const CostTable& costs_;
  const Bytes large_remainder_;
  std::pmr::unsynchronized_pool_resource nodes_;
  std::array<std::array<std::unique_ptr<Pool>, 256>, 2> pools_;  // by size class, then stream
  std::vector<Block*> block_of_;                                 // by id
  Bytes allocated_;
  Bytes peak_allocated_;
  std::uint64_t retries_ = 0;
};

}  // namespace vramx::replay
