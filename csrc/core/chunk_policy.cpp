#include "core/chunk_policy.h"

#include <algorithm>

namespace vramx {
namespace {

constexpr std::uint64_t kChunksOfMemory = 512;
constexpr std::uint64_t kChunksOfRequest = 48;
constexpr std::uint64_t kChunksOfRoom = 3072;
// In units of the granularity, 2 MiB on today's devices: 6 MiB and 24 MiB. Below the first a device
// spends more time on mappings than their bytes are worth; above the second the heads and tails
// that stitching leaves behind outgrow what fewer mappings save.
constexpr std::uint64_t kSmallestUnits = 3;
constexpr std::uint64_t kLargestUnits = 12;
// Chunks that were stitched n times on average cost n times what they cost at first, so the next
// ones are n times as large, up to this. Of twenty recorded programs a graph network whose peak
// grows to its end stitches each of its chunks sixteen times: 2.6 % of its time in the driver, 2.9
// with half this ceiling. The others hardly change, and a higher ceiling changes nothing.
constexpr std::uint64_t kMostTimesAsLarge = 8;

}  // namespace

std::vector<Bytes> chunk_sizes(const ChunkDemand& demand, Bytes granularity) {
  const Bytes share{(demand.held + demand.bytes).count / kChunksOfMemory};
  const Bytes of_request{demand.request.count / kChunksOfRequest};
  const Bytes of_room{demand.room.count / kChunksOfRoom};
  const Bytes wanted = max(max(share, of_request), granularity * kSmallestUnits);
  const std::uint64_t times = std::clamp<std::uint64_t>(demand.mapped_again, 1, kMostTimesAsLarge);
  const Bytes in_proportion = min(wanted, granularity * kLargestUnits) * times;
  const Bytes largest = max(min(in_proportion, of_room), granularity);
  const std::uint64_t pieces = (demand.bytes.count + largest.count - 1) / largest.count;
  if (pieces == 0) return {};
  const std::uint64_t units = demand.bytes / granularity;
  std::vector<Bytes> sizes(pieces, granularity * (units / pieces));
  for (std::uint64_t i = 0; i < units % pieces; ++i) sizes[i] += granularity;
  return sizes;
}

}  // namespace vramx
