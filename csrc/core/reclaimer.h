// Gives memory back to the device: whole free chunks, once what was freed there is over, and the
// aliases over them.
//
// Waits for the device, so only what the user asks for comes here. The lock is let go around every
// driver call.
#pragma once

#include <vector>

#include "core/device_state.h"
#include "core/executor.h"
#include "core/planner.h"

namespace vramx {

struct DefragmentReport {
  std::size_t aliases_collected = 0;
  Bytes alias_addresses{};  // that those took
  std::size_t extents_before = 0;
  std::size_t extents_after = 0;
  std::size_t chunks_released = 0;
  Bytes released{};
};

class Reclaimer {
 public:
  Reclaimer(DeviceState& state, const Planner& planner, Executor& executor)
      : state_(state), planner_(planner), executor_(executor) {}

  // With `all_aliases` the idle ones over memory that stays go, too.
  DefragmentReport run(bool all_aliases, Lock& lock);

 private:
  std::vector<ChunkId> releasable(std::vector<AliasId>* aliases) const;
  bool is_releasable(ChunkId id) const;
  bool waits_for_nothing(const Chunk& chunk) const;
  void collect(const std::vector<AliasId>& ids, Lock& lock, DefragmentReport* report);
  void release_whole_chunks(Lock& lock, DefragmentReport* report);
  bool release(const Chunk& chunk, Lock& lock);

  DeviceState& state_;
  const Planner& planner_;
  Executor& executor_;
};

}  // namespace vramx
