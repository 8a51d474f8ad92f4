#include "torch/snapshot.h"

#include <algorithm>
#include <iterator>

namespace vramx {
namespace {

// The core knows neither pools nor streams' own memory, and maps piece by piece: so a segment is
// large and expandable.
torch_cuda::SegmentInfo empty_segment(DeviceIndex device, const CorePiece& piece) {
  torch_cuda::SegmentInfo segment;
  segment.device = device;
  segment.address = piece.begin.value;
  segment.stream = nullptr;
  segment.is_large = true;
  segment.is_expandable = true;
  return segment;
}

// A segment has one stream: that of its live blocks. Free pieces belong to whatever lies before.
bool fits(const CorePiece& piece, const torch_cuda::SegmentInfo& segment) {
  if (piece.begins_segment) return false;
  return !piece.block.address || segment.allocated_size == 0 ||
         segment.stream == cuda_stream(piece.block.stream);
}

torch_cuda::BlockInfo block_of(const CorePiece& piece, const History& history) {
  torch_cuda::BlockInfo block;
  block.size = piece.size.count;
  if (!piece.block.address) return block;
  block.requested_size = piece.block.requested.count;
  block.allocated = true;
  block.active = true;
  block.context_when_allocated = history.context_of(pointer_to(piece.block.address));
  return block;
}

void append(const torch_cuda::BlockInfo& block, torch_cuda::SegmentInfo* segment) {
  segment->total_size += block.size;
  if (block.allocated) {
    segment->requested_size += block.requested_size;
    segment->allocated_size += block.size;
    segment->active_size += block.size;
  }
  segment->blocks.push_back(block);
}

}  // namespace

void append_segments(const Allocators& core, const History& history, DeviceIndex device,
                     Segments* segments) {
  // Taken first and looked at after: a visit runs under the device's lock.
  std::vector<CorePiece> pieces;
  const auto visit = [](void* context, const CorePiece& piece) {
    static_cast<std::vector<CorePiece>*>(context)->push_back(piece);
  };
  core.for_each_piece(device, visit, &pieces);
  bool is_open = false;
  for (const CorePiece& piece : pieces) {
    if (!is_open || !fits(piece, segments->back())) {
      segments->push_back(empty_segment(device, piece));
    }
    is_open = true;
    if (piece.block.address) segments->back().stream = cuda_stream(piece.block.stream);
    append(block_of(piece, history), &segments->back());
  }
}

Trace join_traces(Trace core, Trace native, const ToUnixTime& to_nanoseconds) {
  constexpr c10::time_t kNanosecondsPerMicrosecond = 1000;
  // A joint snapshot is one event, recorded on the core's side with the size of both.
  std::erase_if(native, [](const TraceEntry& e) { return e.action_ == TraceEntry::SNAPSHOT; });
  for (TraceEntry& entry : core) {
    entry.time_.t_ = to_nanoseconds(entry.time_.approx_t_) / kNanosecondsPerMicrosecond;
  }
  std::move(native.begin(), native.end(), std::back_inserter(core));
  std::stable_sort(core.begin(), core.end(), [](const TraceEntry& a, const TraceEntry& b) {
    return a.time_.t_ < b.time_.t_;
  });
  return core;
}

}  // namespace vramx
