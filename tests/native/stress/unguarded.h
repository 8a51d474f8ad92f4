// Takes away, for as long as it lives, what keeps others off while a call of the allocator is under
// way: the planted defects that a driver cannot have.
//
// Made and destroyed by whoever comes in the middle of the call, without the lock: one thread runs
// at a time. Reads every live block.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "contract.h"
#include "core/device_allocator.h"
#include "stress/scenario.h"

namespace vramx::stress {

REVEAL(BlocksOfAllocator, &DeviceAllocator::blocks_);
REVEAL(StateOfAllocator, &DeviceAllocator::state_);
REVEAL(EntriesOfOrder, &StreamOrder::streams_);

class Unguarded {
  auto& entries() { return state_.order.*member(EntriesOfOrder{}); }

 public:
  Unguarded(DeviceAllocator& allocator, Defect defect)
      : blocks_(allocator.*member(BlocksOfAllocator{})),
        state_(allocator.*member(StateOfAllocator{})) {
    if (defect == Defect::kEntryNotHeld) let_entries_go();
    if (defect == Defect::kGrowthNotCounted) growth_ = std::exchange(state_.building, Bytes{});
  }
  ~Unguarded() {
    for (std::size_t i = 0; i < holds_.size(); ++i) entries()[i].blocks += holds_[i];
    state_.building += growth_;
  }
  Unguarded(const Unguarded&) = delete;
  Unguarded& operator=(const Unguarded&) = delete;

 private:
  // All holds but those of live blocks. The first stream's are not counted from the start.
  void let_entries_go() {
    std::vector<std::uint64_t> by_blocks(entries().size());
    blocks_.for_each([&](SpanId first) {
      ++by_blocks[state_.arena.used(first).stream];
      for (const StreamIndex user : blocks_.users_of(first)) ++by_blocks[user];
    });
    holds_.resize(by_blocks.size());
    for (std::size_t i = 1; i < by_blocks.size(); ++i) {
      holds_[i] = entries()[i].blocks - by_blocks[i];
      entries()[i].blocks = by_blocks[i];
    }
  }

  BlockBook& blocks_;
  DeviceState& state_;
  std::vector<std::uint64_t> holds_;  // of calls, by entry
  Bytes growth_;
};

}  // namespace vramx::stress
