#include "replay/native_model.h"

namespace vramx::replay {
namespace {

// A large block is split only if more than a small request's worth would be left.
constexpr Bytes kLargeRemainder = kLargestSmallRequest + kBlockUnit;

}  // namespace

NativeModel::NativeModel(const ModelOptions& options) : CachingModel(options, kLargeRemainder) {}

Block* NativeModel::grow(Pool& pool, Bytes size) {
  if (!allowed(size)) return nullptr;
  const Bytes segment = segment_for(size);
  ++calls_.create;
  calls_.total_us += costs().malloc.at_us(segment);
  reserved_ += segment;
  return store_.create(addresses_.take(segment), segment, &pool);
}

void NativeModel::release_cached(Pool& pool) {
  for (auto it = pool.free.begin(); it != pool.free.end();) {
    Block* block = (it++)->block;  // releasing erases the block's own entry
    if (block->alone()) release_segment(block);
  }
}

void NativeModel::release_segment(Block* segment) {
  ++calls_.release;
  calls_.total_us += costs().free.at_us(segment->size);
  reserved_ -= segment->size;
  addresses_.give_back(segment->address, segment->size);
  remove_free(segment);
  store_.destroy(segment);
}

std::unique_ptr<AllocatorModel> make_native_model(const ModelOptions& options) {
  return std::make_unique<NativeModel>(options);
}

}  // namespace vramx::replay
