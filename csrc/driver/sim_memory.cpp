// CUDA's rules for reservations, chunks and mappings, on the host; see the header.
#include "driver/sim_memory.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "driver/sim_calls.h"

namespace vramx {
namespace {

// One cuMemAddressReserve of 2^46 bytes succeeds and one of 2^47 does not (H200, driver 580.159).
constexpr Bytes kLargestReservation{1ULL << 47};
// Room for most programs' mappings and chunks, so that it need not move.
constexpr std::size_t kFew = 1024;

}  // namespace

SimMemory::SimMemory(const SimOptions& options, std::unique_ptr<SimPages> pages)
    : capacity_(options.capacity),
      granularity_(options.granularity),
      mapping_ceiling_(options.mapping_ceiling),
      costs_(*options.costs),
      pages_(std::move(pages)),
      next_address_(options.first_address) {
  chunks_.reserve(kFew);
}

SimMemory::~SimMemory() {
  if (!pages_) return;
  for (const Reservation& each : reservations_) pages_->release(each.begin, each.size);
}

bool SimMemory::is_multiple(Address address, Bytes size) const {
  return size && !(size % granularity_) && !(Bytes{address.value} % granularity_);
}

const SimMemory::Reservation* SimMemory::reserved(Address address, Bytes size) const {
  for (const Reservation& each : reservations_) {
    const Bytes offset = address - each.begin;  // huge for an address below
    if (offset < each.size && size <= each.size - offset) return &each;
  }
  return nullptr;
}

SimMemory::Mappings::const_iterator SimMemory::first_from(const Mappings& mappings,
                                                          Address address) {
  if (mappings.empty() || mappings.back().end() <= address) return mappings.end();
  return std::partition_point(mappings.begin(), mappings.end(),
                              [address](const Mapping& each) { return each.end() <= address; });
}

SimMemory::Run SimMemory::tiling(Address address, Bytes size) {
  Reservation* const reservation = size ? reserved(address, size) : nullptr;
  if (reservation == nullptr) return {};
  Mappings& mappings = reservation->mappings;
  const auto first = mappings.begin() + (first_from(mappings, address) - mappings.cbegin());
  auto last = first;
  Address covered = address;
  for (; covered < address + size; ++last) {
    if (last == mappings.end() || last->begin != covered) return {};
    covered = last->end();
  }
  return covered == address + size ? Run{&mappings, first, last} : Run{};
}

SimMemory::Chunk* SimMemory::find_chunk(ChunkHandle handle) {
  const std::uint32_t slot = slot_of(handle);
  const bool is_there =
      handle != ChunkHandle::kNone && slot < chunks_.size() && chunks_[slot].handle == handle;
  return is_there ? &chunks_[slot] : nullptr;
}

Result<Address> SimMemory::reserve_address(Bytes size) {
  if (!is_multiple({}, size)) return failure(StatusCode::kInvalidValue, "reserve_address");
  if (size > kLargestReservation) return failure(StatusCode::kOutOfMemory, "reserve_address");
  Address start = next_address_;
  if (pages_) {
    Result<Address> reserved = pages_->reserve(size, granularity_);
    if (!reserved.ok()) return reserved;
    start = reserved.value();
  } else {
    start = {round_up({start.value}, granularity_).count};
    next_address_ = start + size + granularity_;  // a gap, so that no two reservations touch
  }
  reservations_.push_back({start, size});
  reservations_.back().mappings.reserve(kFew);
  return start;
}

Status SimMemory::release_address(Address address, Bytes size) {
  const auto found = std::find_if(
      reservations_.begin(), reservations_.end(),
      [&](const Reservation& each) { return each.begin == address && each.size == size; });
  if (found == reservations_.end() || !found->mappings.empty()) {
    return failure(StatusCode::kInvalidValue, "release_address");
  }
  if (pages_) pages_->release(address, size);
  reservations_.erase(found);
  return ok_status();
}

Result<ChunkHandle> SimMemory::create_chunk(Bytes size) {
  if (!is_multiple({}, size)) return failure(StatusCode::kInvalidValue, "create_chunk");
  const bool has_slot = !vacant_.empty() || chunks_.size() < kSlots;
  if (size > capacity_ - used_ || !has_slot) {
    return failure(StatusCode::kOutOfMemory, "create_chunk");
  }
  std::uint64_t slot = chunks_.size();
  if (vacant_.empty()) {
    chunks_.emplace_back();
  } else {
    slot = vacant_.back();
    vacant_.pop_back();
  }
  const ChunkHandle handle{++made_ * kSlots + slot};
  chunks_[slot] = {.handle = handle, .size = size};
  if (pages_) chunks_[slot].offset = pages_->take_range(size);
  used_ += size;
  time_us_ += costs_.create.at_us(size);
  return handle;
}

Status SimMemory::release_chunk(ChunkHandle handle) {
  Chunk* const chunk = find_chunk(handle);
  if (chunk == nullptr || !chunk->referenced) {
    return failure(StatusCode::kInvalidValue, "release_chunk");
  }
  chunk->referenced = false;
  time_us_ += costs_.release.at_us(chunk->size);
  give_back_if_unused(*chunk);
  return ok_status();
}

void SimMemory::give_back_if_unused(Chunk& chunk) {
  if (chunk.referenced || chunk.mappings != 0) return;
  if (pages_) pages_->discard(chunk.offset, chunk.size);
  used_ -= chunk.size;
  vacant_.push_back(slot_of(chunk.handle));
  chunk = Chunk{};
}

Status SimMemory::map(Address address, Bytes size, ChunkHandle handle) {
  Reservation* const reservation = is_multiple(address, size) ? reserved(address, size) : nullptr;
  Chunk* const chunk = find_chunk(handle);
  if (reservation == nullptr || chunk == nullptr || !chunk->referenced) {
    return failure(StatusCode::kInvalidValue, "map");
  }
  if (chunk->size != size) return failure(StatusCode::kNotSupported, "map");
  Mappings& mappings = reservation->mappings;
  const auto above = first_from(mappings, address);
  if (above != mappings.end() && above->begin < address + size) {
    return failure(StatusCode::kInvalidValue, "map");
  }
  if (pages_) {
    const Status mapped = pages_->map(address, size, chunk->offset);
    if (!mapped.ok()) return mapped;
  }
  mappings.insert(above, Mapping{.begin = address, .size = size, .slot = slot_of(handle)});
  ++chunk->mappings;
  time_us_ += costs_.map.at_us(size);
  return ok_status();
}

Status SimMemory::unmap(Address address, Bytes size) {
  const Run run = tiling(address, size);
  if (run.of == nullptr) return failure(StatusCode::kInvalidValue, "unmap");
  if (pages_) {
    const Status unmapped = pages_->unmap(address, size);
    if (!unmapped.ok()) return unmapped;
  }
  for (auto mapping = run.first; mapping != run.last; ++mapping) {
    time_us_ += costs_.unmap.at_us(mapping->size);
    accessible_ -= mapping->is_accessible() ? 1 : 0;
    --chunks_[mapping->slot].mappings;
    give_back_if_unused(chunks_[mapping->slot]);
  }
  run.of->erase(run.first, run.last);
  return ok_status();
}

Status SimMemory::set_access(Address address, Bytes size) {
  const Run run = tiling(address, size);
  if (run.of == nullptr) return failure(StatusCode::kInvalidValue, "set_access");
  std::uint64_t added = 0;
  for (auto mapping = run.first; mapping != run.last; ++mapping) added += !mapping->is_accessible();
  if (added > mapping_ceiling_ - accessible_) {
    return failure(StatusCode::kOutOfMemory, "set_access");
  }
  const Status allowed = pages_ ? pages_->allow(address, size) : ok_status();
  for (auto mapping = run.first; mapping != run.last; ++mapping) {
    if (allowed.ok()) {
      mapping->readers = static_cast<std::uint32_t>(1 + peers_.size());
      time_us_ += costs_.set_access.at_us(mapping->size);
    } else if (!mapping->is_accessible()) {
      // mprotect stops where it fails and leaves what came before: take that back.
      pages_->forbid(mapping->begin, mapping->size);
    }
  }
  if (allowed.ok()) accessible_ += added;
  return allowed;
}

Status SimMemory::allow_peer(int device) {
  if (device < 0) return failure(StatusCode::kInvalidValue, "allow_peer");
  if (std::find(peers_.begin(), peers_.end(), device) == peers_.end()) peers_.push_back(device);
  return ok_status();
}

std::size_t SimMemory::live_mappings() const {
  std::size_t count = 0;
  for (const Reservation& each : reservations_) count += each.mappings.size();
  return count;
}

std::size_t SimMemory::mappings_open_to(int device) const {
  const auto at = std::find(peers_.begin(), peers_.end(), device);
  const auto before = static_cast<std::size_t>(1 + (at - peers_.begin()));
  std::ptrdiff_t count = 0;
  for (const Reservation& each : reservations_) {
    count += std::count_if(each.mappings.begin(), each.mappings.end(),
                           [&](const Mapping& mapping) { return mapping.readers > before; });
  }
  return static_cast<std::size_t>(count);
}

bool SimMemory::is_touchable(Address address, Bytes size) const {
  const Reservation* const reservation = size ? reserved(address, size) : nullptr;
  if (!pages_ || reservation == nullptr) return false;
  const Mappings& mappings = reservation->mappings;
  Address covered = address;
  for (auto at = first_from(mappings, address); covered < address + size; ++at) {
    if (at == mappings.end() || !at->is_accessible() || covered < at->begin) return false;
    covered = at->end();
  }
  return true;
}

std::string SimMemory::check() const {
  const std::string broken = check_chunks();
  return broken.empty() ? check_mappings() : broken;
}

std::string SimMemory::check_chunks() const {
  Bytes sum{};
  std::vector<std::uint64_t> mappings_of(chunks_.size());
  for (const Reservation& each : reservations_) {
    for (const Mapping& mapping : each.mappings) ++mappings_of[mapping.slot];
  }
  for (std::size_t slot = 0; slot < chunks_.size(); ++slot) {
    const Chunk& chunk = chunks_[slot];
    if (chunk.handle == ChunkHandle::kNone) continue;
    sum += chunk.size;
    const std::string name = "chunk " + std::to_string(static_cast<std::uint64_t>(chunk.handle));
    if (!chunk.referenced && chunk.mappings == 0) return name + " is neither referenced nor mapped";
    if (chunk.mappings != mappings_of[slot]) {
      return name + " counts " + std::to_string(chunk.mappings) + " mappings and has " +
             std::to_string(mappings_of[slot]);
    }
  }
  if (sum != used_ || used_ > capacity_) {
    return "used " + std::to_string(used_.count) + " of " + std::to_string(capacity_.count) +
           ", chunks " + std::to_string(sum.count);
  }
  return {};
}

std::string SimMemory::check_mappings() const {
  std::uint64_t accessible = 0;
  for (const Reservation& each : reservations_) {
    Address end = each.begin;
    for (const Mapping& mapping : each.mappings) {
      const std::string name = "mapping at " + std::to_string(mapping.begin.value);
      if (mapping.begin < end) return name + " overlaps what is to its left";
      if (!is_multiple(mapping.begin, mapping.size)) return name + " is not aligned";
      if (mapping.end() > each.begin + each.size) return name + " leaves its reservation";
      const Chunk& chunk = chunks_[mapping.slot];
      if (chunk.handle == ChunkHandle::kNone || chunk.size != mapping.size) {
        return name + " is not of its chunk";
      }
      end = mapping.end();
      accessible += mapping.is_accessible() ? 1 : 0;
    }
  }
  if (accessible != accessible_ || accessible_ > mapping_ceiling_) {
    return "access count " + std::to_string(accessible_) + ", mappings with access " +
           std::to_string(accessible) + ", ceiling " + std::to_string(mapping_ceiling_);
  }
  return {};
}

}  // namespace vramx
