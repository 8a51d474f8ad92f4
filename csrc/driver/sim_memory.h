// The simulated device's memory: reservations, chunks and mappings, under CUDA's rules and costs.
//
// Enforces what cuda_driver only passes on: whole chunks, whole mappings, multiples of granularity,
// the capacity and the mapping ceiling. Does not count calls (sim_calls) and does not lock
// (sim_driver). Works with bytes behind it or without: without pages the addresses are made up,
// and every rule and figure is the same. A map or unmap without pages costs some 30 ns at the high
// end of what is mapped in a reservation, where it mostly happens; below it moves what is above: 30
// us where that is 100,000 mappings, about what a real device takes. set_access and unmap visit
// each mapping in the range.
//
//   reservation   |................................................|   addresses
//   mappings          |== chunk 1 ==|== chunk 2 ==|    |== chunk 1 ==|
//   chunks        chunk 1 (2 mappings, referenced), chunk 2 (1 mapping)   capacity
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/driver.h"
#include "core/status.h"
#include "core/units.h"
#include "driver/cost_table.h"
#include "driver/sim_pages.h"

namespace vramx {

enum class SimMode : std::uint8_t {
  kBytes,       // real pages: mappings share bytes and unmapped addresses fault
  kAccounting,  // the same rules and figures, addresses made up
};

struct SimOptions {
  Bytes capacity{};
  int ordinal = 0;
  Bytes granularity{2 << 20};
  const CostTable* costs = &CostTable::h200();  // outlives the driver
  SimMode mode = SimMode::kBytes;
  // Mappings with access, of all sizes. An H200 stops after 520,192 of 2 MiB (driver 580.159).
  std::uint64_t mapping_ceiling = 520192;
  std::size_t journal_entries = 0;
  // Where addresses are made up from: apart for devices that are used together.
  Address first_address{1ULL << 46};
};

class SimMemory {
 public:
  // `pages` is null for accounting; its page size divides the granularity.
  SimMemory(const SimOptions& options, std::unique_ptr<SimPages> pages);
  ~SimMemory();
  SimMemory(const SimMemory&) = delete;
  SimMemory& operator=(const SimMemory&) = delete;

  MemoryInfo info() const { return {capacity_ - used_, capacity_}; }

  Result<Address> reserve_address(Bytes size);
  Status release_address(Address address, Bytes size);
  Result<ChunkHandle> create_chunk(Bytes size);
  Status release_chunk(ChunkHandle handle);
  Status map(Address address, Bytes size, ChunkHandle handle);
  Status unmap(Address address, Bytes size);
  Status set_access(Address address, Bytes size);
  // Every other device can be let in; the simulation does not know which there are.
  Status allow_peer(int device);

  // The mappings that a peer has access to.
  std::size_t mappings_open_to(int device) const;
  // True when every byte of the range can be read and written through a pointer.
  bool is_touchable(Address address, Bytes size) const;

  double time_us() const { return time_us_; }
  Bytes used() const { return used_; }
  std::size_t live_reservations() const { return reservations_.size(); }
  std::size_t live_chunks() const { return chunks_.size() - vacant_.size(); }
  std::size_t live_mappings() const;
  // What the host spends on the bytes of chunks: pages touched and not yet given back.
  Bytes resident() const { return pages_ ? pages_->resident() : Bytes{}; }

  // Recomputes the books; the first equation that does not hold, or an empty string:
  //   1. a chunk is referenced or mapped, and its mapping count is the mappings that name it
  //   2. used = sum of chunk sizes <= capacity
  //   3. mappings are disjoint and aligned, and each lies inside one reservation
  //   4. the access count is the mappings with access, and is at most the ceiling
  std::string check() const;

 private:
  // In a slot; an empty one has no handle.
  struct Chunk {
    ChunkHandle handle = ChunkHandle::kNone;
    Bytes size{};
    PageOffset offset{};
    std::uint64_t mappings = 0;
    bool referenced = true;
  };
  struct Mapping {
    Address begin;
    Bytes size{};
    std::uint32_t slot = 0;     // of its chunk
    std::uint32_t readers = 0;  // that have access: the device, and so many of peers_ less one

    Address end() const { return begin + size; }
    bool is_accessible() const { return readers != 0; }
  };
  using Mappings = std::vector<Mapping>;  // in address order
  struct Reservation {
    Address begin;
    Bytes size{};
    Mappings mappings{};
  };
  struct Run {  // of one reservation's mappings
    Mappings* of = nullptr;
    Mappings::iterator first{};
    Mappings::iterator last{};
  };

  bool is_multiple(Address address, Bytes size) const;
  // The reservation that holds the range, or null.
  const Reservation* reserved(Address address, Bytes size) const;
  Reservation* reserved(Address address, Bytes size) {
    return const_cast<Reservation*>(std::as_const(*this).reserved(address, size));
  }
  // The first that ends after `address`.
  static Mappings::const_iterator first_from(const Mappings& mappings, Address address);
  // The mappings that tile [address, address + size) exactly; of null where none do.
  Run tiling(Address address, Bytes size);
  // The name of a chunk says its slot, and is never given to another one: a stale name is always
  // found out.
  static constexpr std::uint64_t kSlots = std::uint64_t{1} << 24;
  static std::uint32_t slot_of(ChunkHandle handle) {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(handle) % kSlots);
  }
  // Null where there is none of that name.
  Chunk* find_chunk(ChunkHandle handle);
  void give_back_if_unused(Chunk& chunk);
  std::string check_chunks() const;
  std::string check_mappings() const;

  const Bytes capacity_;
  const Bytes granularity_;
  const std::uint64_t mapping_ceiling_;
  const CostTable& costs_;
  const std::unique_ptr<SimPages> pages_;

  std::vector<Reservation> reservations_;
  std::vector<Chunk> chunks_;
  std::vector<std::uint32_t> vacant_;  // the slots that are empty
  std::uint64_t made_ = 0;             // chunks ever
  Address next_address_;               // the next one to make up
  std::uint64_t accessible_ = 0;
  std::vector<int> peers_;  // entries are only added
  Bytes used_{};
  double time_us_ = 0.0;
};

}  // namespace vramx
