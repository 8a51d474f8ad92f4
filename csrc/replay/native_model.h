// Torch's native caching allocator: every growth is one cudaMalloc, a segment that is never merged
// with another and goes back only when all of it is free.
//
// Under a capacity, growth that would exceed it first gives every wholly free segment of every
// stream back. Not thread-safe. Cost: see caching_model.h; growth adds one search for addresses.
#pragma once

#include "replay/caching_model.h"
#include "replay/segment_addresses.h"

namespace vramx::replay {

class NativeModel final : public CachingModel {
 public:
  explicit NativeModel(const ModelOptions& options);

 private:
  Block* grow(Pool& pool, Bytes size) override;
  void release_cached(Pool& pool) override;
  void start(Pool&) override {}
  void release_segment(Block* segment);

  SegmentAddresses addresses_;
};

}  // namespace vramx::replay
