// From the address that a caller holds to the first span of its block: open addressing, linear
// probing, no tombstones.
//
// An entry is eight bytes: the span's number and as much of the address as fits beside it. Whether
// the span's block has the whole address is for the caller to say, who has the spans and looks at
// this one anyway. The table is a quarter to a half full once it has grown, so that a probe mostly
// ends on the line of the cache where it began. Not thread-safe. O(1); growing to twice the size
// copies every entry, once in as many insertions.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"

namespace vramx {

class BlockTable {
 public:
  struct Slot {
    std::uint32_t key = 0;  // of the address: its block units, less what is above 2 TiB
    SpanId span = kNoId;    // kNoId: the slot is empty
  };

  BlockTable() : slots_(kInitialSlots) {}

  void insert(Address address, SpanId span) {
    if (count_ * 2 >= slots_.size()) [[unlikely]] {
      grow();
    }
    place({key_of(address), span});
    ++count_;
  }

  // The slot of the span for which is_at(span) says that its block begins at `address`; null where
  // there is none.
  template <class IsAt>
  const Slot* find(Address address, IsAt is_at) const {
    const std::uint32_t key = key_of(address);
    for (std::size_t slot = home(key); slots_[slot].span != kNoId; slot = next(slot)) {
      if (slots_[slot].key == key && is_at(slots_[slot].span)) return &slots_[slot];
    }
    return nullptr;
  }

  // `found` is what find returned; later entries may move.
  void erase(const Slot* found) {
    auto hole = static_cast<std::size_t>(found - slots_.data());
    // Closes the gap: an entry moves back unless that would put it before its home.
    for (std::size_t slot = next(hole); slots_[slot].span != kNoId; slot = next(slot)) {
      const std::size_t from_home = (slot - home(slots_[slot].key)) & mask_;
      const std::size_t from_hole = (slot - hole) & mask_;
      if (from_home < from_hole) continue;
      slots_[hole] = slots_[slot];
      hole = slot;
    }
    slots_[hole].span = kNoId;
    --count_;
  }

  // Calls visit(span) for the first span of every block.
  template <class Visit>
  void for_each(Visit visit) const {
    for (const Slot& slot : slots_) {
      if (slot.span != kNoId) visit(slot.span);
    }
  }

  std::size_t count() const { return count_; }
  std::size_t host_bytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  static constexpr std::size_t kInitialSlots = 1024;  // a power of two, as every size after it

  static std::uint32_t key_of(Address address) {
    return static_cast<std::uint32_t>(address.value / kBlockUnit.count);
  }
  std::size_t next(std::size_t slot) const { return (slot + 1) & mask_; }
  // Fibonacci hashing: addresses at any regular distance fall evenly over the slots.
  std::size_t home(std::uint32_t key) const { return key * 0x9E3779B9u >> shift_; }

  void place(const Slot& entry) {
    std::size_t slot = home(entry.key);
    while (slots_[slot].span != kNoId) slot = next(slot);
    slots_[slot] = entry;
  }

  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    --shift_;
    mask_ = slots_.size() - 1;
    for (const Slot& entry : old) {
      if (entry.span != kNoId) place(entry);
    }
  }

  std::vector<Slot> slots_;
  std::size_t mask_ = kInitialSlots - 1;
  int shift_ = 32 - std::countr_zero(kInitialSlots);  // leaves as many bits as number the slots
  std::size_t count_ = 0;
};

}  // namespace vramx
