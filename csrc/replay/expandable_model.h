// Torch with expandable_segments:True: one range of addresses a pool, which memory is mapped into
// from the lowest address up, one handle at a time.
//
//   range   [ in use | free | in use | free |  unmapped ........................ ]
//   handles |   20 MiB    |   20 MiB   |  20 MiB |          (2 MiB in the small pool)
//
// Growth extends the free block at the end of mapped memory by the handles that are missing. Under
// a capacity, handles that lie wholly inside free blocks are unmapped and released, and the holes
// are mapped again later, lowest address first. Not thread-safe. Cost: see caching_model.h; growth
// visits the unmapped ranges below the one that it uses.
#pragma once

#include <vector>

#include "replay/caching_model.h"

namespace vramx::replay {

class ExpandableModel final : public CachingModel {
 public:
  explicit ExpandableModel(const ModelOptions& options);

 private:
  FreeSet::iterator choose(const Pool& pool, FreeSet::iterator smallest) override;
  Block* grow(Pool& pool, Bytes size) override;
  void release_cached(Pool& pool) override;
  void start(Pool& pool) override;

  Block* map_front(Block* unmapped, Bytes size);
  void unmap_whole_handles(Block* block);
  void charge_map(Bytes handle, std::uint64_t count);
  void charge_unmap(Bytes handle, std::uint64_t count);

  Address next_range_;
  std::vector<Block*> to_unmap_;  // scratch of release_cached
};

}  // namespace vramx::replay
