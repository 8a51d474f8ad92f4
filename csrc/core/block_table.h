// From the address that a caller holds to its block: open addressing, linear probing, no
// tombstones.
//
// Entries are 32 bytes and the table is at least a third full after it has grown once. Not
// thread-safe. O(1); growing to twice the size copies every entry, once in as many insertions.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"

namespace vramx {

struct Block {
  Address address;
  Bytes requested;
  SpanId first_span = kNoId;
  StreamIndex stream = kNoId;   // of the allocation
  AliasId alias = kNoId;        // that makes its spans contiguous
  std::uint32_t users = kNoId;  // entry in the table of further streams

  bool is_empty() const { return !address; }
};

class BlockTable {
 public:
  BlockTable() : slots_(kInitialSlots) {}

  void insert(const Block& block) {
    if (count_ >= most_) [[unlikely]] {
      grow();
    }
    place(block);
    ++count_;
  }

  Block* find(Address address) {
    if (!address) return nullptr;  // as empty slots have it
    for (std::size_t slot = home(address);; slot = next(slot)) {
      if (slots_[slot].address == address) return &slots_[slot];
      if (slots_[slot].is_empty()) return nullptr;
    }
  }

  const Block* find(Address address) const { return const_cast<BlockTable*>(this)->find(address); }

  // `block` is one that find returned; later entries may move.
  void erase(Block* block) {
    auto hole = static_cast<std::size_t>(block - slots_.data());
    // Closes the gap: an entry moves back unless that would put it before its home.
    for (std::size_t slot = next(hole); !slots_[slot].is_empty(); slot = next(slot)) {
      const std::size_t from_home = (slot - home(slots_[slot].address)) & mask_;
      const std::size_t from_hole = (slot - hole) & mask_;
      if (from_home < from_hole) continue;
      slots_[hole] = slots_[slot];
      hole = slot;
    }
    slots_[hole].address = {};
    --count_;
  }

  template <class Visit>
  void for_each(Visit visit) const {
    for (const Block& block : slots_) {
      if (!block.is_empty()) visit(block);
    }
  }

  std::size_t count() const { return count_; }
  std::size_t host_bytes() const { return slots_.capacity() * sizeof(Block); }

 private:
  static constexpr std::size_t kInitialSlots = 1024;  // a power of two, as every size after it

  std::size_t next(std::size_t slot) const { return (slot + 1) & mask_; }
  // Fibonacci hashing: addresses at any regular distance fall evenly over the slots.
  std::size_t home(Address address) const {
    return static_cast<std::size_t>(address.value / kBlockUnit.count * 0x9E3779B97F4A7C15ull >>
                                    shift_);
  }

  void place(const Block& block) {
    std::size_t slot = home(block.address);
    while (!slots_[slot].is_empty()) slot = next(slot);
    slots_[slot] = block;
  }

  void grow() {
    std::vector<Block> old(slots_.size() * 2);
    old.swap(slots_);
    --shift_;
    mask_ = slots_.size() - 1;
    most_ = slots_.size() / 4 * 3;
    for (const Block& block : old) {
      if (!block.is_empty()) place(block);
    }
  }

  std::vector<Block> slots_;
  std::size_t mask_ = kInitialSlots - 1;
  std::size_t most_ = kInitialSlots / 4 * 3;          // blocks that it holds before it grows
  int shift_ = 64 - std::countr_zero(kInitialSlots);  // leaves as many bits as number the slots
  std::size_t count_ = 0;
};

}  // namespace vramx
