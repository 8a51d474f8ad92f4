#include "core/chunk_policy.h"

namespace vramx {
namespace {

constexpr std::uint64_t kChunksOfMemory = 512;
// In units of the granularity, 2 MiB on today's devices: 8 MiB and 64 MiB. Below the first a device
// spends more time on mappings than their bytes are worth, above the second a driver call gets
// dearer again.
constexpr std::uint64_t kSmallestUnits = 4;
constexpr std::uint64_t kLargestUnits = 32;

}  // namespace

std::vector<Bytes> chunk_sizes(Bytes growth, Bytes held, Bytes granularity) {
  const Bytes share{(held + growth).count / kChunksOfMemory};
  const Bytes largest = min(max(share, granularity * kSmallestUnits), granularity * kLargestUnits);
  std::uint64_t pieces = (growth.count + largest.count - 1) / largest.count;
  std::vector<Bytes> sizes;
  for (Bytes left = growth; left; --pieces) {
    sizes.push_back(min(left, round_up(Bytes{left.count / pieces}, granularity)));
    left -= sizes.back();
  }
  return sizes;
}

}  // namespace vramx
