#include "replay/trace.h"

#include <algorithm>

namespace vramx::replay {
namespace {

constexpr std::uint64_t kLargestSize = std::uint64_t{1} << 48;
// Ids number the allocations; beyond this a file is not a trace but an attempt at our memory.
constexpr std::uint64_t kMostIds = std::uint64_t{1} << 30;

std::string at(std::size_t event) { return "event " + std::to_string(event) + ": "; }

}  // namespace

Trace Trace::build(const TraceArrays& arrays, std::string* error) {
  const std::size_t length = arrays.op.size();
  if (arrays.id.size() != length || arrays.size.size() != length ||
      arrays.stream.size() != length || arrays.time_us.size() != length) {
    *error = "the arrays have unequal lengths";
    return {};
  }
  if (length == 0 || length > UINT32_MAX) {
    *error = length == 0 ? "the trace has no event" : "the trace has more than 2^32 events";
    return {};
  }
  const std::uint64_t ids =
      std::uint64_t{*std::max_element(arrays.id.begin(), arrays.id.end())} + 1;
  if (ids > kMostIds) {
    *error = "id " + std::to_string(ids - 1) + " is above 2^30";
    return {};
  }
  Trace trace;
  trace.id_count_ = ids;
  trace.events_.reserve(length);
  std::vector<Allocation> allocations(ids);
  for (std::size_t i = 0; i < length; ++i) {
    *error = trace.add(arrays, i, allocations[arrays.id[i]]);
    if (!error->empty()) return {};
  }
  if (trace.events_.empty()) *error = "the trace has no allocation";
  return error->empty() ? std::move(trace) : Trace{};
}

void Trace::note_allocation(Bytes size) {
  live_ += size;
  if (live_ <= peak_live_) return;
  peak_live_ = live_;
  peak_event_ = events_.size();
}

std::string Trace::add(const TraceArrays& arrays, std::size_t i, Allocation& allocation) {
  using Life = Allocation::Life;
  const std::string id = "id " + std::to_string(arrays.id[i]);
  if (arrays.op[i] > 2) return at(i) + "op " + std::to_string(arrays.op[i]) + " is unknown";
  if (arrays.size[i] > kLargestSize) {
    return at(i) + "size " + std::to_string(arrays.size[i]) + " is above 2^48";
  }
  const bool is_allocation = arrays.op[i] == 0;
  if (is_allocation && allocation.life != Life::kUnknown) {
    return at(i) + id + " is allocated a second time";
  }
  if (!is_allocation && allocation.life == Life::kUnknown) {
    return at(i) + "free of the unknown " + id;
  }
  if (!is_allocation && allocation.life == Life::kFreed) {
    return at(i) + id + " is freed a second time";
  }
  if (arrays.op[i] == 1) return {};
  if (is_allocation) {
    allocation = {Bytes{arrays.size[i]}, Life::kLive};
    note_allocation(allocation.size);
  } else {
    allocation.life = Life::kFreed;
    live_ -= allocation.size;
  }
  events_.push_back({is_allocation ? Event::Kind::kAllocate : Event::Kind::kFree, arrays.stream[i],
                     arrays.id[i], std::max(arrays.time_us[i], span_us()),
                     static_cast<std::uint32_t>(i), allocation.size});
  return {};
}

}  // namespace vramx::replay
