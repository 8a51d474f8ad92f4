// CUDA's rules for reservations, chunks and mappings, on the host; see the header.
#include "driver/sim_memory.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "driver/sim_calls.h"

namespace vramx {
namespace {

// One cuMemAddressReserve of 2^46 bytes succeeds and one of 2^47 does not (H200, driver 580.159).
constexpr Bytes kLargestReservation{1ULL << 46};

}  // namespace

SimMemory::SimMemory(const SimOptions& options, std::unique_ptr<SimPages> pages)
    : capacity_(options.capacity),
      granularity_(options.granularity),
      mapping_ceiling_(options.mapping_ceiling),
      costs_(*options.costs),
      pages_(std::move(pages)),
      next_address_(options.first_address) {}

SimMemory::~SimMemory() {
  if (!pages_) return;
  for (const auto& [address, size] : reservations_) pages_->release(address, size);
}

bool SimMemory::is_multiple(Address address, Bytes size) const {
  return size && !(size % granularity_) && !(Bytes{address.value} % granularity_);
}

bool SimMemory::is_reserved(Address address, Bytes size) const {
  auto above = reservations_.upper_bound(address);
  if (above == reservations_.begin()) return false;
  const auto& [start, length] = *std::prev(above);
  const Bytes offset = address - start;
  return offset < length && size <= length - offset;
}

SimMemory::Run SimMemory::tiling(Address address, Bytes size) {
  const Run none{mappings_.end(), mappings_.end()};
  const auto first = mappings_.find(address);
  auto last = first;
  Bytes covered{};
  for (; covered < size; ++last) {
    if (last == mappings_.end() || last->first != address + covered) return none;
    covered += size_of(last);
  }
  return covered == size ? Run{first, last} : none;
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
  reservations_.emplace(start, size);
  return start;
}

Status SimMemory::release_address(Address address, Bytes size) {
  const Status refused = failure(StatusCode::kInvalidValue, "release_address");
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != size) return refused;
  const auto mapping = mappings_.lower_bound(address);
  if (mapping != mappings_.end() && mapping->first < address + size) return refused;
  if (pages_) pages_->release(address, size);
  reservations_.erase(found);
  return ok_status();
}

Result<ChunkHandle> SimMemory::create_chunk(Bytes size) {
  if (!is_multiple({}, size)) return failure(StatusCode::kInvalidValue, "create_chunk");
  if (size > capacity_ - used_) return failure(StatusCode::kOutOfMemory, "create_chunk");
  const std::uint64_t handle = next_handle_++;
  Chunk& chunk = chunks_[handle];
  chunk.size = size;
  if (pages_) chunk.offset = pages_->take_range(size);
  used_ += size;
  time_us_ += costs_.create.at_us(size);
  return ChunkHandle{handle};
}

Status SimMemory::release_chunk(ChunkHandle handle) {
  const auto chunk = chunks_.find(static_cast<std::uint64_t>(handle));
  if (chunk == chunks_.end() || !chunk->second.referenced) {
    return failure(StatusCode::kInvalidValue, "release_chunk");
  }
  chunk->second.referenced = false;
  time_us_ += costs_.release.at_us(chunk->second.size);
  give_back_if_unused(chunk);
  return ok_status();
}

void SimMemory::give_back_if_unused(Chunks::iterator chunk) {
  if (chunk->second.referenced || chunk->second.mappings != 0) return;
  if (pages_) pages_->discard(chunk->second.offset, chunk->second.size);
  used_ -= chunk->second.size;
  chunks_.erase(chunk);
}

Status SimMemory::map(Address address, Bytes size, ChunkHandle handle) {
  const Status refused = failure(StatusCode::kInvalidValue, "map");
  if (!is_multiple(address, size) || !is_reserved(address, size)) return refused;
  const auto chunk = chunks_.find(static_cast<std::uint64_t>(handle));
  if (chunk == chunks_.end() || !chunk->second.referenced) return refused;
  if (chunk->second.size != size) return failure(StatusCode::kNotSupported, "map");
  const auto above = mappings_.lower_bound(address);
  if (above != mappings_.end() && above->first < address + size) return refused;
  if (above != mappings_.begin()) {
    const auto below = std::prev(above);
    if (address < below->first + size_of(below)) return refused;
  }
  if (pages_) {
    const Status mapped = pages_->map(address, size, chunk->second.offset);
    if (!mapped.ok()) return mapped;
  }
  mappings_.emplace_hint(above, address, Mapping{.chunk = &*chunk});
  ++chunk->second.mappings;
  time_us_ += costs_.map.at_us(size);
  return ok_status();
}

Status SimMemory::unmap(Address address, Bytes size) {
  const auto [first, last] = tiling(address, size);
  if (first == last) return failure(StatusCode::kInvalidValue, "unmap");
  if (pages_) {
    const Status unmapped = pages_->unmap(address, size);
    if (!unmapped.ok()) return unmapped;
  }
  for (auto mapping = first; mapping != last; mapping = mappings_.erase(mapping)) {
    const Mapping& gone = mapping->second;
    time_us_ += costs_.unmap.at_us(size_of(mapping));
    accessible_ -= gone.accessible ? 1 : 0;
    if (--gone.chunk->second.mappings == 0 && !gone.chunk->second.referenced) {
      give_back_if_unused(chunks_.find(gone.chunk->first));
    }
  }
  return ok_status();
}

Status SimMemory::set_access(Address address, Bytes size) {
  const auto [first, last] = tiling(address, size);
  if (first == last) return failure(StatusCode::kInvalidValue, "set_access");
  std::uint64_t added = 0;
  for (auto mapping = first; mapping != last; ++mapping) added += !mapping->second.accessible;
  if (added > mapping_ceiling_ - accessible_) {
    return failure(StatusCode::kOutOfMemory, "set_access");
  }
  const Status allowed = pages_ ? pages_->allow(address, size) : ok_status();
  for (auto mapping = first; mapping != last; ++mapping) {
    if (allowed.ok()) {
      mapping->second.accessible = true;
      mapping->second.peers = peers_.size();
      time_us_ += costs_.set_access.at_us(size_of(mapping));
    } else if (!mapping->second.accessible) {
      // mprotect stops where it fails and leaves what came before: take that back.
      pages_->forbid(mapping->first, size_of(mapping));
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

std::size_t SimMemory::mappings_open_to(int device) const {
  const auto at = std::find(peers_.begin(), peers_.end(), device);
  const auto index = static_cast<std::size_t>(at - peers_.begin());
  return static_cast<std::size_t>(
      std::count_if(mappings_.begin(), mappings_.end(),
                    [&](const auto& mapping) { return mapping.second.peers > index; }));
}

bool SimMemory::is_touchable(Address address, Bytes size) const {
  auto mapping = mappings_.upper_bound(address);
  const Address end = address + size;
  if (!pages_ || end <= address || mapping == mappings_.begin()) return false;
  Address covered = address;
  for (--mapping; covered < end; ++mapping) {
    if (mapping == mappings_.end() || !mapping->second.accessible) return false;
    const Address mapping_end = mapping->first + size_of(mapping);
    if (covered < mapping->first || mapping_end <= covered) return false;
    covered = mapping_end;
  }
  return true;
}

std::string SimMemory::check() const {
  const std::string broken = check_chunks();
  return broken.empty() ? check_mappings() : broken;
}

std::string SimMemory::check_chunks() const {
  Bytes sum{};
  std::unordered_map<std::uint64_t, std::uint64_t> mappings_of;
  for (const auto& [address, mapping] : mappings_) ++mappings_of[mapping.chunk->first];
  for (const auto& [handle, chunk] : chunks_) {
    sum += chunk.size;
    const std::string name = "chunk " + std::to_string(handle);
    if (!chunk.referenced && chunk.mappings == 0) return name + " is neither referenced nor mapped";
    if (chunk.mappings != mappings_of[handle]) {
      return name + " counts " + std::to_string(chunk.mappings) + " mappings and has " +
             std::to_string(mappings_of[handle]);
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
  Address end{};
  for (auto mapping = mappings_.begin(); mapping != mappings_.end(); ++mapping) {
    const Address address = mapping->first;
    const std::string name = "mapping at " + std::to_string(address.value);
    if (address < end) return name + " overlaps its left neighbour";
    if (!is_multiple(address, size_of(mapping))) return name + " is not aligned";
    if (!is_reserved(address, size_of(mapping))) return name + " leaves its reservation";
    end = address + size_of(mapping);
    accessible += mapping->second.accessible ? 1 : 0;
  }
  if (accessible != accessible_ || accessible_ > mapping_ceiling_) {
    return "access count " + std::to_string(accessible_) + ", mappings with access " +
           std::to_string(accessible) + ", ceiling " + std::to_string(mapping_ceiling_);
  }
  return {};
}

}  // namespace vramx
