// Ownership and order of physical units; see the header.
#include "stress/shadow.h"

#include <algorithm>

#include "core/types.h"

namespace vramx::stress {
namespace {

// A name that no stream has: nothing is queued before it, so only work that has run precedes it.
constexpr StreamName kNoStream{Stream{~std::uint64_t{0}}};

}  // namespace

template <class Visit>
void Shadow::for_each_unit(const std::vector<PhysicalPiece>& pieces, Visit visit) {
  for (const PhysicalPiece& piece : pieces) {
    std::vector<Unit>& units = units_[static_cast<std::uint64_t>(piece.chunk)];
    const std::uint64_t first = piece.offset / kBlockUnit;
    const std::uint64_t end = (piece.offset + piece.size) / kBlockUnit;
    if (units.size() < end) units.resize(end);
    for (std::uint64_t i = first; i < end; ++i) visit(units[i]);
  }
}

bool Shadow::comes_before(const Use& use, StreamName stream) const {
  return std::all_of(use.begin(), use.end(),
                     [&](const StreamPoint& point) { return sim_.happens_before(point, stream); });
}

bool Shadow::is_done(const Use& use) const { return comes_before(use, kNoStream); }

std::string Shadow::claim(const std::vector<PhysicalPiece>& pieces, std::uint32_t owner,
                          StreamName stream) {
  std::uint32_t taken_from = kNobody;
  std::uint32_t too_early = 0;
  std::uint32_t last_seen = 0;
  for_each_unit(pieces, [&](Unit& unit) {
    if (unit.owner != kNobody) taken_from = unit.owner;
    if (unit.last_use != last_seen && !comes_before(uses_[unit.last_use], stream)) {
      too_early = unit.last_use;
    }
    last_seen = unit.last_use;
    unit.owner = owner;
  });
  if (taken_from != kNobody) {
    return "shared bytes: with block " + std::to_string(taken_from);
  }
  if (too_early != 0) {
    return "stream safety: given out before the work of free number " + std::to_string(too_early) +
           " is over";
  }
  return {};
}

void Shadow::give_back(const std::vector<PhysicalPiece>& pieces, Address at, Bytes size,
                       const Use& use) {
  const auto number = static_cast<std::uint32_t>(uses_.size());
  uses_.push_back(use);
  trails_.push_back({at, size, number});
  for_each_unit(pieces, [&](Unit& unit) { unit = {kNobody, number}; });
  if (trails_.size() > trails_before_drop_) drop_finished_trails();
}

// Amortised: the next time comes when there are twice as many as are left.
void Shadow::drop_finished_trails() {
  std::erase_if(trails_, [&](const Trail& trail) { return is_done(uses_[trail.use]); });
  trails_before_drop_ = std::max<std::size_t>(256, trails_.size() * 2);
}

std::string Shadow::on_unmap(Address at, Bytes size) {
  std::string broken;
  std::erase_if(trails_, [&](const Trail& trail) {
    if (trail.at >= at + size || at >= trail.at + trail.size) return false;
    if (!is_done(uses_[trail.use])) {
      broken = "unmapped in use: by the work of free number " + std::to_string(trail.use);
    }
    return true;
  });
  return broken;
}

std::string Shadow::on_chunk_gone(ChunkHandle chunk) {
  const auto found = units_.find(static_cast<std::uint64_t>(chunk));
  if (found == units_.end()) return {};
  std::string broken;
  for (const Unit& unit : found->second) {
    if (unit.owner != kNobody) broken = "released in use: block " + std::to_string(unit.owner);
    if (unit.last_use != 0 && !is_done(uses_[unit.last_use])) {
      broken = "released in use: by the work of free number " + std::to_string(unit.last_use);
    }
  }
  units_.erase(found);
  return broken;
}

Bytes Shadow::unowned_chunks(const ObservedDriver::Chunks& chunks) const {
  Bytes sum{};
  for (const auto& [handle, chunk] : chunks) {
    const auto found = units_.find(static_cast<std::uint64_t>(handle));
    const bool is_unowned = found == units_.end() ||
                            std::all_of(found->second.begin(), found->second.end(),
                                        [](const Unit& unit) { return unit.owner == kNobody; });
    if (is_unowned && chunk.is_referenced) sum += chunk.size;
  }
  return sum;
}

}  // namespace vramx::stress
