#include "replay/expandable_model.h"

#include <iterator>

namespace vramx::replay {
namespace {

// A multiple of both handle sizes, so that rounding an address is rounding an offset. Torch
// reserves 9/8 of the device's memory for a range and starts a second one when that is used up;
// here a range is wider than any device.
constexpr Bytes kRange = kLargeSegment * (1u << 20);
static_assert(kRange > kLargestRequest);

bool available(const Block* block) { return block != nullptr && !block->in_use; }

// What the block could grow to without moving.
Bytes extended_size(const Block* block) {
  const Block* right = block->right;
  return right != nullptr && !right->mapped ? block->size + right->size : block->size;
}

bool has_room(const Block* block, Bytes size) {
  Bytes room;
  for (; room < size && available(block); block = block->right) room += block->size;
  return room >= size;
}

// The lowest place where memory can be mapped to make `size` contiguous free bytes: an unmapped
// block or the free one before it. Null when the range is exhausted.
Block* find_room(const Pool& pool, Bytes size) {
  for (Block* block : pool.unmapped) {
    if (available(block->left)) block = block->left;
    if (has_room(block, size)) return block;
  }
  return nullptr;
}

}  // namespace

ExpandableModel::ExpandableModel(const ModelOptions& options)
    : CachingModel(options, kBlockUnit), next_range_{kRange.count} {}

void ExpandableModel::start(Pool& pool) {
  Block* range = store_.create(next_range_, kRange, &pool);
  range->mapped = false;
  insert_unmapped(range);
  next_range_ = next_range_ + kRange;
}

// A block counts for what it can grow to. The one before the unmapped tail thus counts as huge and
// is passed over for the next larger one, so that the tail is used last.
FreeSet::iterator ExpandableModel::choose(const Pool& pool, FreeSet::iterator smallest) {
  auto chosen = smallest;
  for (auto next = std::next(chosen); next != pool.free.end(); ++next) {
    if (extended_size(next->block) >= extended_size(chosen->block)) break;
    chosen = next;
  }
  return chosen;
}

Block* ExpandableModel::grow(Pool& pool, Bytes size) {
  if (!allowed(size)) return nullptr;
  Block* block = find_room(pool, size);
  if (block == nullptr) return nullptr;
  if (!block->mapped) block = map_front(block, min(block->size, size));
  while (block->size < size) {  // a free block, then an unmapped one
    Block* unmapped = block->right;
    block = map_front(unmapped, min(unmapped->size, size - block->size));
  }
  remove_free(block);
  return block;
}

// Maps the handles that hold the first `size` bytes; returns the free block that they became part
// of.
Block* ExpandableModel::map_front(Block* unmapped, Bytes size) {
  const Bytes handle = unmapped->pool->segment_size;
  const Bytes mapped = round_up(size, handle);
  charge_map(handle, mapped / handle);
  reserved_ += mapped;
  remove_unmapped(unmapped);
  if (mapped < unmapped->size) insert_unmapped(store_.split(unmapped, mapped));
  unmapped->mapped = true;
  store_.merge_neighbours(unmapped);
  insert_free(unmapped);
  return unmapped;
}

void ExpandableModel::release_cached(Pool& pool) {
  // Unmapping changes the set, so the blocks are gathered first. It never merges a mapped block
  // away, so they stay valid.
  to_unmap_.clear();
  for (auto it = pool.free.lower_bound({pool.segment_size, Address{}, nullptr});
       it != pool.free.end(); ++it) {
    to_unmap_.push_back(it->block);
  }
  for (Block* block : to_unmap_) unmap_whole_handles(block);
}

void ExpandableModel::unmap_whole_handles(Block* block) {
  const Bytes handle = block->pool->segment_size;
  const Address begin{round_up(Bytes{block->address.value}, handle).count};
  const Address end{round_down(Bytes{block->end().value}, handle).count};
  if (begin >= end) return;
  remove_free(block);
  if (begin > block->address) {
    Block* inner = store_.split(block, begin - block->address);
    insert_free(block);
    block = inner;
  }
  if (end < block->end()) insert_free(store_.split(block, end - block->address));
  charge_unmap(handle, block->size / handle);
  reserved_ -= block->size;
  block->mapped = false;
  store_.merge_neighbours(block);
  insert_unmapped(block);
}

void ExpandableModel::charge_map(Bytes handle, std::uint64_t count) {
  calls_.create += count;
  calls_.map += count;
  calls_.set_access += 1;  // one call for the whole run; its time grows with the mappings
  calls_.total_us +=
      static_cast<double>(count) *
      (costs().create.at_us(handle) + costs().map.at_us(handle) + costs().set_access.at_us(handle));
}

void ExpandableModel::charge_unmap(Bytes handle, std::uint64_t count) {
  calls_.unmap += count;
  calls_.release += count;
  calls_.total_us +=
      static_cast<double>(count) * (costs().unmap.at_us(handle) + costs().release.at_us(handle));
}

std::unique_ptr<AllocatorModel> make_expandable_model(const ModelOptions& options) {
  return std::make_unique<ExpandableModel>(options);
}

}  // namespace vramx::replay
