// The part of DeviceAllocator that lets another device in: kernels and copies of a peer may touch
// every mapping, those that are there, those that are being made, and those to come.
//
// The driver is told first, so that every set_access from then on includes the peer. A mapping that
// a thread is making meanwhile may have missed it: the thread sees, once it has the lock again,
// that the generation of access has changed, and sets access again before anybody gets the address.
#include <algorithm>

#include "core/device_allocator.h"

namespace vramx {

Status DeviceAllocator::allow_peer(int peer) {
  if (fork_guard_.is_in_child()) return {StatusCode::kNotInitialized, 0, "used in a forked child"};
  if (const Status allowed = state_.driver.allow_peer(peer); !allowed.ok()) return allowed;
  Lock lock(mutex_);
  ++state_.access_generation;
  for (const Piece& mapping : mappings()) {
    lock.unlock();
    const Status status = state_.driver.set_access(mapping.begin, mapping.size);
    lock.lock();
    // Memory that was given back meanwhile has no access to set.
    if (!status.ok() && is_mapping(mapping)) return status;
  }
  return ok_status();
}

// Those that are about to go are among them: the driver may refuse to unmap them.
std::vector<Piece> DeviceAllocator::mappings() const {
  std::vector<Piece> found;
  state_.arena.chunks().for_each(
      [&](ChunkId, const Chunk& chunk) { found.push_back({chunk.begin, chunk.size}); });
  for (const AliasId id : state_.aliases.all())
    found.push_back({state_.aliases[id].base, state_.aliases[id].size});
  return found;
}

bool DeviceAllocator::is_mapping(const Piece& range) const {
  if (state_.arena.contains(range.begin)) {
    const ChunkId id = state_.arena.chunks().find(range.begin);
    if (id == kNoId) return false;
    const Chunk& chunk = state_.arena.chunks()[id];
    const bool is_going =
        state_.arena.span(state_.arena.span_at(chunk.begin)).state == SpanState::kBuilding;
    return chunk.begin == range.begin && chunk.size == range.size && !is_going;
  }
  const std::vector<AliasId> aliases = state_.aliases.all();
  return std::any_of(aliases.begin(), aliases.end(), [&](AliasId id) {
    const Alias& alias = state_.aliases[id];
    return alias.base == range.begin && alias.size == range.size && !alias.is_leaving;
  });
}

}  // namespace vramx
