// The contract of reservations, chunks and mappings, for any Driver: aliasing, whole chunks, whole
// mappings, lifetime and capacity. Linked into driver_contract; below 200 MiB of device memory.
#include <cstdint>

#include "contract.h"

namespace vramx::contract::memory_claims {

constexpr Stream kStream = Stream::kDefault;

struct Fixture : OnDevice {
  Status fill(Address address, Bytes size, std::uint32_t pattern) {
    return bytes.fill(address, size, pattern, kStream);
  }
  bool holds(Address address, Bytes size, std::uint32_t pattern) {
    const auto mismatches = bytes.count_mismatches(address, size, pattern, kStream);
    return mismatches.ok() && mismatches.value() == 0;
  }
};

// With a chunk of a unit, and addresses for four of them.
struct Mapped : Fixture {
  Chunk chunk{device, unit};
  Range range{device, unit * 4};

  Mapped() { EXPECT(chunk && range); }
};

// --- mapping ------------------------------------------------------------------------------------

CHECK(Mapped, two_mappings_of_a_chunk_share_its_bytes) {
  REQUIRE(range.map_with_access({}, unit, chunk.handle()).ok());
  REQUIRE(range.map_with_access(unit * 2, unit, chunk.handle()).ok());
  REQUIRE(fill(range.at({}), unit, 0xA5A50001).ok());
  EXPECT(holds(range.at(unit * 2), unit, 0xA5A50001));
  REQUIRE(fill(range.at(unit * 2), unit, 0x5A5A0002).ok());
  EXPECT(holds(range.at({}), unit, 0x5A5A0002));
}

CHECK(Fixture, chunks_stitched_out_of_order_read_as_one_range) {
  Chunk first(device, unit);
  Chunk second(device, unit * 2);
  Range arena(device, unit * 3);
  Range alias(device, unit * 3);
  REQUIRE(first && second && arena && alias);
  REQUIRE(arena.map({}, unit, first.handle()).ok());
  REQUIRE(arena.map(unit, unit * 2, second.handle()).ok());
  REQUIRE(driver.set_access(arena.at({}), unit * 3).ok());
  REQUIRE(alias.map({}, unit * 2, second.handle()).ok());
  REQUIRE(alias.map(unit * 2, unit, first.handle()).ok());
  REQUIRE(driver.set_access(alias.at({}), unit * 3).ok());
  REQUIRE(fill(alias.at({}), unit * 3, 7).ok());
  REQUIRE(fill(alias.at(unit * 2), unit, 8).ok());
  EXPECT(holds(arena.at({}), unit, 8));
  EXPECT(holds(arena.at(unit), unit * 2, 7));
}

CHECK(Fixture, a_chunk_is_mapped_whole_or_not_at_all) {
  Chunk chunk(device, unit * 2);
  Range range(device, unit * 4);
  REQUIRE(chunk && range);
  const Status part = range.map({}, unit, chunk.handle());
  EXPECT(part.code == StatusCode::kNotSupported);
  EXPECT(range.map_with_access({}, unit * 2, chunk.handle()).ok());
}

CHECK(Fixture, a_mapping_is_unmapped_whole_or_not_at_all) {
  Chunk chunk(device, unit * 2);
  Range range(device, unit * 2);
  REQUIRE(chunk && range);
  REQUIRE(range.map_with_access({}, unit * 2, chunk.handle()).ok());
  EXPECT(driver.unmap(range.at({}), unit).code == StatusCode::kInvalidValue);
  EXPECT(driver.unmap(range.at(unit), unit).code == StatusCode::kInvalidValue);
  REQUIRE(fill(range.at({}), unit * 2, 3).ok());
  EXPECT(holds(range.at({}), unit * 2, 3));
}

CHECK(Mapped, one_unmap_covers_several_mappings) {
  for (std::uint64_t i = 0; i < 4; ++i) REQUIRE(range.map(unit * i, unit, chunk.handle()).ok());
  REQUIRE(driver.unmap(range.at({}), unit * 4).ok());
  range.forget_mappings();
  EXPECT(range.map_with_access(unit, unit, chunk.handle()).ok());
}

CHECK(Fixture, a_mapped_address_is_not_mapped_again) {
  Chunk taken(device, unit * 2);
  Chunk other(device, unit * 2);
  Range range(device, unit * 4);
  REQUIRE(taken && other && range);
  REQUIRE(range.map_with_access(unit, unit * 2, taken.handle()).ok());
  REQUIRE(fill(range.at(unit), unit * 2, 11).ok());
  EXPECT(!driver.map(range.at({}), unit * 2, other.handle()).ok());
  EXPECT(!driver.map(range.at(unit), unit * 2, other.handle()).ok());
  EXPECT(!driver.map(range.at(unit * 2), unit * 2, other.handle()).ok());
  EXPECT(holds(range.at(unit), unit * 2, 11));
}

CHECK(Mapped, access_needs_every_address_mapped) {
  EXPECT(driver.set_access(range.at({}), unit).code == StatusCode::kInvalidValue);
  REQUIRE(range.map({}, unit, chunk.handle()).ok());
  EXPECT(driver.set_access(range.at({}), unit * 2).code == StatusCode::kInvalidValue);
  EXPECT(driver.set_access(range.at({}), unit).ok());
}

CHECK(Fixture, sizes_off_the_granularity_are_refused) {
  const Bytes odd = unit + Bytes{4096};
  EXPECT(driver.reserve_address(odd).status().code == StatusCode::kInvalidValue);
  EXPECT(driver.create_chunk(odd).status().code == StatusCode::kInvalidValue);
}

CHECK(Fixture, a_chunk_is_mapped_at_many_addresses) {
  constexpr std::uint64_t kMappings = 256;
  Chunk chunk(device, unit);
  Range range(device, unit * kMappings);
  REQUIRE(chunk && range);
  for (std::uint64_t i = 0; i < kMappings; ++i) {
    REQUIRE(range.map(unit * i, unit, chunk.handle()).ok());
  }
  REQUIRE(driver.set_access(range.at({}), unit * kMappings).ok());
  REQUIRE(fill(range.at(unit * 100), unit, 0xC0FFEE).ok());
  EXPECT(holds(range.at({}), unit, 0xC0FFEE));
  EXPECT(holds(range.at(unit * (kMappings - 1)), unit, 0xC0FFEE));
}

// --- lifetime and capacity ----------------------------------------------------------------------

CHECK(Mapped, a_released_chunk_lives_until_its_last_mapping_goes) {
  REQUIRE(range.map_with_access({}, unit, chunk.handle()).ok());
  REQUIRE(range.map_with_access(unit, unit, chunk.handle()).ok());
  REQUIRE(fill(range.at({}), unit, 21).ok());
  chunk.release();
  EXPECT(holds(range.at(unit), unit, 21));
  REQUIRE(driver.unmap(range.at({}), unit * 2).ok());
  range.forget_mappings();
}

CHECK(Fixture, bytes_stay_with_the_chunk_when_it_moves) {
  Chunk chunk(device, unit);
  Range from(device, unit);
  Range to(device, unit);
  REQUIRE(chunk && from && to);
  REQUIRE(from.map_with_access({}, unit, chunk.handle()).ok());
  REQUIRE(fill(from.at({}), unit, 34).ok());
  EXPECT(holds(from.at({}), unit, 34));
  REQUIRE(driver.unmap(from.at({}), unit).ok());
  from.forget_mappings();
  REQUIRE(to.map_with_access({}, unit, chunk.handle()).ok());
  EXPECT(holds(to.at({}), unit, 34));
}

CHECK(Fixture, more_than_the_capacity_is_out_of_memory) {
  const Result<MemoryInfo> before = driver.memory_info();
  REQUIRE(before.ok());
  EXPECT(before.value().free <= before.value().total);
  const Bytes too_much = round_up(before.value().total, unit) + unit;
  EXPECT(driver.create_chunk(too_much).status().code == StatusCode::kOutOfMemory);
  Chunk chunk(device, unit);
  EXPECT(chunk);
}

// One-sided, since other processes may use a GPU meanwhile; sim_checks has the exact figures.
CHECK(Fixture, memory_info_follows_chunks) {
  Chunk chunk(device, unit * 32);
  REQUIRE(chunk);
  const Result<MemoryInfo> held = driver.memory_info();
  chunk.release();
  const Result<MemoryInfo> freed = driver.memory_info();
  REQUIRE(held.ok() && freed.ok());
  EXPECT(freed.value().total == held.value().total);
  EXPECT(freed.value().free > held.value().free);
}

CHECK(Fixture, calls_are_counted_and_timed) {
  const DriverCalls before = driver.calls();
  {
    Chunk chunk(device, unit);
    Range range(device, unit);
    REQUIRE(chunk && range);
    REQUIRE(range.map_with_access({}, unit, chunk.handle()).ok());
  }
  const DriverCalls after = driver.calls();
  EXPECT(after.create == before.create + 1);
  EXPECT(after.map == before.map + 1);
  EXPECT(after.set_access == before.set_access + 1);
  EXPECT(after.unmap == before.unmap + 1);
  EXPECT(after.release == before.release + 1);
  EXPECT(after.total_us > before.total_us);
}

}  // namespace vramx::contract::memory_claims
