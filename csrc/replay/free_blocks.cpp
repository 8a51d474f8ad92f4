#include "replay/free_blocks.h"

// Only the check lives here; the rest is inline, because a replay spends its time there.

namespace vramx::replay {
namespace {

bool listed(const Block& block) {
  if (!block.mapped) return block.pool->unmapped.contains(&block);
  const auto place = block.pool->free.find({block.size, block.address, nullptr});
  return place != block.pool->free.end() && place->block == &block;
}

// The equations of a block that is in a segment, in the order of free_blocks.h.
const char* broken_equation(const Block& block) {
  const Block* right = block.right;
  if (right != nullptr) {
    if (right->left != &block) return "block.right.left == block";
    if (right->address != block.end()) return "block.right.address == block.end";
    const bool both_free = !block.in_use && !right->in_use;
    if (both_free && right->mapped == block.mapped) return "free neighbours are merged";
  }
  if (block.in_use && !block.mapped) return "a block in use is mapped";
  if (!block.in_use && !listed(block)) return "a free block is in its pool's set";
  return nullptr;
}

}  // namespace

std::string BlockStore::check(std::size_t listed_blocks, Bytes reserved) const {
  std::size_t free_blocks = 0;
  Bytes mapped;
  for (const Block& block : blocks_) {
    if (block.pool == nullptr) continue;  // recycled
    if (const char* broken = broken_equation(block)) {
      return std::string(broken) + " at address " + std::to_string(block.address.value);
    }
    if (!block.in_use) ++free_blocks;
    if (block.mapped) mapped += block.size;
  }
  if (free_blocks != listed_blocks) {
    return "only free blocks are in a set: " + std::to_string(free_blocks) +
           " != " + std::to_string(listed_blocks);
  }
  if (mapped == reserved) return {};
  return "mapped bytes == reserved: " + std::to_string(mapped.count) +
         " != " + std::to_string(reserved.count);
}

}  // namespace vramx::replay
