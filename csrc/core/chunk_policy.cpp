#include "core/chunk_policy.h"

namespace vramx {
namespace {

constexpr std::uint64_t kChunksOfMemory = 768;
constexpr std::uint64_t kChunksOfRequest = 32;
// In units of the granularity, 2 MiB on today's devices: 8 MiB and 64 MiB. Below the first a device
// spends more time on mappings than their bytes are worth, above the second a driver call gets
// dearer again.
constexpr std::uint64_t kSmallestUnits = 4;
constexpr std::uint64_t kLargestUnits = 12;

}  // namespace

std::vector<Bytes> chunk_sizes(const Growth& growth, Bytes granularity) {
  const Bytes of_memory{(growth.held + growth.bytes).count / kChunksOfMemory};
  const Bytes of_request{growth.request.count / kChunksOfRequest};
  const Bytes largest = min(max(max(of_memory, of_request), granularity * kSmallestUnits),
                            granularity * kLargestUnits);
  std::uint64_t pieces = (growth.bytes.count + largest.count - 1) / largest.count;
  std::vector<Bytes> sizes;
  for (Bytes left = growth.bytes; left; --pieces) {
    sizes.push_back(min(left, round_up(Bytes{left.count / pieces}, granularity)));
    left -= sizes.back();
  }
  return sizes;
}

}  // namespace vramx
