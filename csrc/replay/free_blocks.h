// Blocks of the modelled allocators, and the free ones of a pool ordered for best fit.
//
//   segment  [ in use | free | in use |     free     ]   neighbours linked in address order
//   pool     free blocks of many segments by (size, address): the first large enough one wins
//
// Invariants: neighbours touch; two of them are never both free and in the same mapped state; a
// block in use is mapped; a free block is in its pool's set, and nothing else is; mapped bytes ==
// reserved. Blocks are recycled, and so are the sets' nodes (one memory resource a model): a warm
// model takes nothing from the heap. Not thread-safe. Insert and search are O(log free blocks),
// removal is O(1) because a free block remembers its place.
#pragma once

#include <cstddef>
#include <deque>
#include <memory_resource>
#include <set>
#include <string>

#include "core/units.h"

namespace vramx::replay {

struct Block;

struct FreeKey {
  Bytes size;
  Address address;
  Block* block;

  bool operator<(const FreeKey& other) const {
    return size != other.size ? size < other.size : address < other.address;
  }
};

using FreeSet = std::pmr::set<FreeKey>;

struct ByAddress {
  using is_transparent = void;
  bool operator()(const Block* a, const Block* b) const;
};

// Torch never gives a block to another stream, nor a small one to a large request, so each pair of
// stream and size class is a pool of its own.
struct Pool {
  Pool(Bytes remainder, Bytes segment, std::pmr::memory_resource* nodes)
      : smallest_remainder(remainder), segment_size(segment), free(nodes), unmapped(nodes) {}

  const Bytes smallest_remainder;  // a block is split when at least this would be left over
  const Bytes segment_size;        // what small segments and handles of this pool measure
  FreeSet free;
  std::pmr::set<Block*, ByAddress> unmapped;  // expandable segments only
};

struct Block {
  Address address;
  Bytes size;
  Pool* pool = nullptr;   // null: recycled
  Block* left = nullptr;  // neighbours in the segment; right is also the link of recycled blocks
  Block* right = nullptr;
  bool in_use = false;
  bool mapped = true;       // false: addresses of an expandable segment with no memory behind them
  FreeSet::iterator place;  // in pool->free, while the block is free and mapped

  bool alone() const { return left == nullptr && right == nullptr; }
  Address end() const { return address + size; }
};

inline bool ByAddress::operator()(const Block* a, const Block* b) const {
  return a->address < b->address;
}

inline void insert_free(Block* block) {
  block->place = block->pool->free.insert({block->size, block->address, block}).first;
}

inline void remove_free(Block* block) { block->pool->free.erase(block->place); }
inline void insert_unmapped(Block* block) { block->pool->unmapped.insert(block); }
inline void remove_unmapped(Block* block) { block->pool->unmapped.erase(block); }

// Owns every block, at addresses that never change.
class BlockStore {
 public:
  Block* create(Address address, Bytes size, Pool* pool) {
    Block* block = recycled_;
    if (block != nullptr) {
      recycled_ = block->right;
    } else {
      block = &blocks_.emplace_back();
    }
    *block = Block{.address = address, .size = size, .pool = pool, .place = {}};
    return block;
  }

  void destroy(Block* block) {
    block->pool = nullptr;
    block->right = recycled_;
    recycled_ = block;
  }

  // Cuts `block` at `size` and returns what lies to the right of the cut, in neither set.
  Block* split(Block* block, Bytes size) {
    Block* rest = create(block->address + size, block->size - size, block->pool);
    rest->mapped = block->mapped;
    rest->left = block;
    rest->right = block->right;
    if (rest->right != nullptr) rest->right->left = rest;
    block->right = rest;
    block->size = size;
    return rest;
  }

  // `block` swallows its left and right neighbours if they are free and mapped like itself. It must
  // be in neither set itself.
  void merge_neighbours(Block* block) {
    if (mergeable(block->left, block)) {
      Block* left = block->left;
      block->address = left->address;
      block->left = left->left;
      if (block->left != nullptr) block->left->right = block;
      absorb(block, left);
    }
    if (mergeable(block->right, block)) {
      Block* right = block->right;
      block->right = right->right;
      if (block->right != nullptr) block->right->left = block;
      absorb(block, right);
    }
  }

  // The first broken invariant of this file, or empty. `listed` counts the entries of all sets.
  std::string check(std::size_t listed, Bytes reserved) const;

 private:
  static bool mergeable(const Block* neighbour, const Block* block) {
    return neighbour != nullptr && !neighbour->in_use && neighbour->mapped == block->mapped;
  }

  void absorb(Block* block, Block* neighbour) {
    block->size += neighbour->size;
    neighbour->mapped ? remove_free(neighbour) : remove_unmapped(neighbour);
    destroy(neighbour);
  }

  std::deque<Block> blocks_;
  Block* recycled_ = nullptr;
};

}  // namespace vramx::replay
