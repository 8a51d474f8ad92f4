#include "replay/caching_model.h"

#include <cassert>
#include <cstddef>

namespace vramx::replay {

CachingModel::CachingModel(const ModelOptions& options, Bytes large_remainder)
    : capacity_(min(options.capacity, kLargestCapacity)),
      costs_(*options.costs),
      large_remainder_(large_remainder),
      block_of_(options.id_count) {}

AllocateResult CachingModel::allocate(std::uint32_t id, Bytes size, std::uint8_t stream) {
  assert(id < block_of_.size() && block_of_[id] == nullptr);
  if (!size) return AllocateResult::kOk;  // torch has no block for an empty tensor
  if (size > kLargestRequest) return AllocateResult::kOutOfMemory;
  const Bytes rounded = round_up(size, kBlockUnit);
  Pool& pool = pool_for(stream, rounded);
  Block* block = take_free(pool, rounded);
  if (block == nullptr) block = grow_or_release(pool, rounded);
  if (block == nullptr) return AllocateResult::kOutOfMemory;
  if (block->size - rounded >= pool.smallest_remainder) insert_free(store_.split(block, rounded));
  block->in_use = true;
  allocated_ += block->size;
  peak_allocated_ = max(peak_allocated_, allocated_);
  block_of_[id] = block;
  return AllocateResult::kOk;
}

void CachingModel::free(std::uint32_t id) {
  Block* block = block_of_[id];
  if (block == nullptr) return;
  block_of_[id] = nullptr;
  block->in_use = false;
  allocated_ -= block->size;
  store_.merge_neighbours(block);
  insert_free(block);
}

std::string CachingModel::check() const {
  std::size_t listed = 0;
  for (const auto& streams : pools_) {
    for (const std::unique_ptr<Pool>& pool : streams) {
      if (pool != nullptr) listed += pool->free.size() + pool->unmapped.size();
    }
  }
  return store_.check(listed, reserved_);
}

FreeSet::iterator CachingModel::choose(const Pool&, FreeSet::iterator smallest) { return smallest; }

bool CachingModel::allowed(Bytes request) const {
  return reserved_ + segment_for(request) <= capacity_;
}

Bytes CachingModel::segment_for(Bytes request) {
  if (request <= kLargestSmallRequest) return kSmallSegment;
  if (request < kLeastOwnSegment) return kLargeSegment;
  return round_up(request, kOwnSegmentUnit);
}

Pool& CachingModel::pool_for(std::uint8_t stream, Bytes request) {
  const bool small = request <= kLargestSmallRequest;
  const SizeClass size_class = small ? SizeClass::kSmall : SizeClass::kLarge;
  std::unique_ptr<Pool>& pool = pools_[static_cast<std::size_t>(size_class)][stream];
  if (pool == nullptr) {
    pool = std::make_unique<Pool>(small ? kBlockUnit : large_remainder_,
                                  small ? kSmallSegment : kLargeSegment, &nodes_);
    start(*pool);
  }
  return *pool;
}

Block* CachingModel::take_free(Pool& pool, Bytes size) {
  const auto smallest = pool.free.lower_bound({size, Address{}, nullptr});
  if (smallest == pool.free.end()) return nullptr;
  Block* block = choose(pool, smallest)->block;
  remove_free(block);
  return block;
}

// Torch does not search the pool again after a release: what fitted would have been found before.
Block* CachingModel::grow_or_release(Pool& pool, Bytes size) {
  if (Block* block = grow(pool, size)) return block;
  release_all_cached();
  ++retries_;
  return grow(pool, size);
}

void CachingModel::release_all_cached() {
  for (auto& streams : pools_) {
    for (std::unique_ptr<Pool>& pool : streams) {
      if (pool != nullptr) release_cached(*pool);
    }
  }
}

}  // namespace vramx::replay
