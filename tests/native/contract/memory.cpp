// The contract of reservations, chunks and mappings, for any Driver: aliasing, whole chunks, whole
// mappings, lifetime and capacity. Linked into driver_contract; below 200 MiB of device memory.
#include <array>
#include <cstdint>
#include <span>

#include "contract.h"
#include "core/driver.h"
#include "core/units.h"
#include "driver/data_path.h"

namespace vramx::contract {
namespace memory_claims {
namespace {

constexpr Stream kStream = Stream::kDefault;

bool holds(Device& device, Address address, Bytes size, std::uint32_t pattern) {
  const auto mismatches = device.bytes.count_mismatches(address, size, pattern, kStream);
  return mismatches.ok() && mismatches.value() == 0;
}

// --- mapping ------------------------------------------------------------------------------------

void two_mappings_of_a_chunk_share_its_bytes(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit);
  Range range(device, unit * 4);
  REQUIRE(chunk && range);
  REQUIRE(range.map_with_access({}, unit, chunk.handle()).ok());
  REQUIRE(range.map_with_access(unit * 2, unit, chunk.handle()).ok());
  REQUIRE(device.bytes.fill(range.at({}), unit, 0xA5A50001, kStream).ok());
  EXPECT(holds(device, range.at(unit * 2), unit, 0xA5A50001));
  REQUIRE(device.bytes.fill(range.at(unit * 2), unit, 0x5A5A0002, kStream).ok());
  EXPECT(holds(device, range.at({}), unit, 0x5A5A0002));
}

void chunks_stitched_out_of_order_read_as_one_range(Device& device) {
  const Bytes unit = device.unit();
  Chunk first(device, unit);
  Chunk second(device, unit * 2);
  Range arena(device, unit * 3);
  Range alias(device, unit * 3);
  REQUIRE(first && second && arena && alias);
  REQUIRE(arena.map({}, unit, first.handle()).ok());
  REQUIRE(arena.map(unit, unit * 2, second.handle()).ok());
  REQUIRE(device.driver.set_access(arena.at({}), unit * 3).ok());
  REQUIRE(alias.map({}, unit * 2, second.handle()).ok());
  REQUIRE(alias.map(unit * 2, unit, first.handle()).ok());
  REQUIRE(device.driver.set_access(alias.at({}), unit * 3).ok());
  REQUIRE(device.bytes.fill(alias.at({}), unit * 3, 7, kStream).ok());
  REQUIRE(device.bytes.fill(alias.at(unit * 2), unit, 8, kStream).ok());
  EXPECT(holds(device, arena.at({}), unit, 8));
  EXPECT(holds(device, arena.at(unit), unit * 2, 7));
}

void a_chunk_is_mapped_whole_or_not_at_all(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit * 2);
  Range range(device, unit * 4);
  REQUIRE(chunk && range);
  const Status part = range.map({}, unit, chunk.handle());
  EXPECT(part.code == StatusCode::kNotSupported);
  EXPECT(range.map_with_access({}, unit * 2, chunk.handle()).ok());
}

void a_mapping_is_unmapped_whole_or_not_at_all(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit * 2);
  Range range(device, unit * 2);
  REQUIRE(chunk && range);
  REQUIRE(range.map_with_access({}, unit * 2, chunk.handle()).ok());
  EXPECT(device.driver.unmap(range.at({}), unit).code == StatusCode::kInvalidValue);
  EXPECT(device.driver.unmap(range.at(unit), unit).code == StatusCode::kInvalidValue);
  REQUIRE(device.bytes.fill(range.at({}), unit * 2, 3, kStream).ok());
  EXPECT(holds(device, range.at({}), unit * 2, 3));
}

void one_unmap_covers_several_mappings(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit);
  Range range(device, unit * 4);
  REQUIRE(chunk && range);
  for (std::uint64_t i = 0; i < 4; ++i) REQUIRE(range.map(unit * i, unit, chunk.handle()).ok());
  REQUIRE(device.driver.unmap(range.at({}), unit * 4).ok());
  range.forget_mappings();
  EXPECT(range.map_with_access(unit, unit, chunk.handle()).ok());
}

void a_mapped_address_is_not_mapped_again(Device& device) {
  const Bytes unit = device.unit();
  Chunk taken(device, unit * 2);
  Chunk other(device, unit * 2);
  Range range(device, unit * 4);
  REQUIRE(taken && other && range);
  REQUIRE(range.map_with_access(unit, unit * 2, taken.handle()).ok());
  REQUIRE(device.bytes.fill(range.at(unit), unit * 2, 11, kStream).ok());
  EXPECT(!device.driver.map(range.at({}), unit * 2, other.handle()).ok());
  EXPECT(!device.driver.map(range.at(unit), unit * 2, other.handle()).ok());
  EXPECT(!device.driver.map(range.at(unit * 2), unit * 2, other.handle()).ok());
  EXPECT(holds(device, range.at(unit), unit * 2, 11));
}

void access_needs_every_address_mapped(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit);
  Range range(device, unit * 2);
  REQUIRE(chunk && range);
  EXPECT(device.driver.set_access(range.at({}), unit).code == StatusCode::kInvalidValue);
  REQUIRE(range.map({}, unit, chunk.handle()).ok());
  EXPECT(device.driver.set_access(range.at({}), unit * 2).code == StatusCode::kInvalidValue);
  EXPECT(device.driver.set_access(range.at({}), unit).ok());
}

void sizes_off_the_granularity_are_refused(Device& device) {
  const Bytes odd = device.unit() + Bytes{4096};
  EXPECT(device.driver.reserve_address(odd).status().code == StatusCode::kInvalidValue);
  EXPECT(device.driver.create_chunk(odd).status().code == StatusCode::kInvalidValue);
}

void a_chunk_is_mapped_at_many_addresses(Device& device) {
  constexpr std::uint64_t kMappings = 256;
  const Bytes unit = device.unit();
  Chunk chunk(device, unit);
  Range range(device, unit * kMappings);
  REQUIRE(chunk && range);
  for (std::uint64_t i = 0; i < kMappings; ++i) {
    REQUIRE(range.map(unit * i, unit, chunk.handle()).ok());
  }
  REQUIRE(device.driver.set_access(range.at({}), unit * kMappings).ok());
  REQUIRE(device.bytes.fill(range.at(unit * 100), unit, 0xC0FFEE, kStream).ok());
  EXPECT(holds(device, range.at({}), unit, 0xC0FFEE));
  EXPECT(holds(device, range.at(unit * (kMappings - 1)), unit, 0xC0FFEE));
}

// --- lifetime and capacity ----------------------------------------------------------------------

void a_released_chunk_lives_until_its_last_mapping_goes(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit);
  Range range(device, unit * 2);
  REQUIRE(chunk && range);
  REQUIRE(range.map_with_access({}, unit, chunk.handle()).ok());
  REQUIRE(range.map_with_access(unit, unit, chunk.handle()).ok());
  REQUIRE(device.bytes.fill(range.at({}), unit, 21, kStream).ok());
  chunk.release();
  EXPECT(holds(device, range.at(unit), unit, 21));
  REQUIRE(device.driver.unmap(range.at({}), unit * 2).ok());
  range.forget_mappings();
}

void bytes_stay_with_the_chunk_when_it_moves(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit);
  Range from(device, unit);
  Range to(device, unit);
  REQUIRE(chunk && from && to);
  REQUIRE(from.map_with_access({}, unit, chunk.handle()).ok());
  REQUIRE(device.bytes.fill(from.at({}), unit, 34, kStream).ok());
  EXPECT(holds(device, from.at({}), unit, 34));
  REQUIRE(device.driver.unmap(from.at({}), unit).ok());
  from.forget_mappings();
  REQUIRE(to.map_with_access({}, unit, chunk.handle()).ok());
  EXPECT(holds(device, to.at({}), unit, 34));
}

void more_than_the_capacity_is_out_of_memory(Device& device) {
  const Result<MemoryInfo> before = device.driver.memory_info();
  REQUIRE(before.ok());
  EXPECT(before.value().free <= before.value().total);
  const Bytes too_much = round_up(before.value().total, device.unit()) + device.unit();
  EXPECT(device.driver.create_chunk(too_much).status().code == StatusCode::kOutOfMemory);
  Chunk chunk(device, device.unit());
  EXPECT(static_cast<bool>(chunk));
}

// One-sided, since other processes may use a GPU meanwhile; sim_checks has the exact figures.
void memory_info_follows_chunks(Device& device) {
  Chunk chunk(device, device.unit() * 32);
  REQUIRE(chunk);
  const Result<MemoryInfo> held = device.driver.memory_info();
  chunk.release();
  const Result<MemoryInfo> freed = device.driver.memory_info();
  REQUIRE(held.ok() && freed.ok());
  EXPECT(freed.value().total == held.value().total);
  EXPECT(freed.value().free > held.value().free);
}

void calls_are_counted_and_timed(Device& device) {
  const DriverCalls before = device.driver.calls();
  {
    Chunk chunk(device, device.unit());
    Range range(device, device.unit());
    REQUIRE(chunk && range);
    REQUIRE(range.map_with_access({}, device.unit(), chunk.handle()).ok());
  }
  const DriverCalls after = device.driver.calls();
  EXPECT(after.create == before.create + 1);
  EXPECT(after.map == before.map + 1);
  EXPECT(after.set_access == before.set_access + 1);
  EXPECT(after.unmap == before.unmap + 1);
  EXPECT(after.release == before.release + 1);
  EXPECT(after.total_us > before.total_us);
}

constexpr std::array kChecks{
    Check<Device>{"two mappings of a chunk share its bytes",
                  two_mappings_of_a_chunk_share_its_bytes},
    Check<Device>{"chunks stitched out of order read as one range",
                  chunks_stitched_out_of_order_read_as_one_range},
    Check<Device>{"a chunk is mapped whole or not at all", a_chunk_is_mapped_whole_or_not_at_all},
    Check<Device>{"a mapping is unmapped whole or not at all",
                  a_mapping_is_unmapped_whole_or_not_at_all},
    Check<Device>{"one unmap covers several mappings", one_unmap_covers_several_mappings},
    Check<Device>{"a mapped address is not mapped again", a_mapped_address_is_not_mapped_again},
    Check<Device>{"access needs every address mapped", access_needs_every_address_mapped},
    Check<Device>{"sizes off the granularity are refused", sizes_off_the_granularity_are_refused},
    Check<Device>{"a chunk is mapped at many addresses", a_chunk_is_mapped_at_many_addresses},
    Check<Device>{"a released chunk lives until its last mapping goes",
                  a_released_chunk_lives_until_its_last_mapping_goes},
    Check<Device>{"bytes stay with the chunk when it moves",
                  bytes_stay_with_the_chunk_when_it_moves},
    Check<Device>{"more than the capacity is out of memory",
                  more_than_the_capacity_is_out_of_memory},
    Check<Device>{"memory info follows chunks", memory_info_follows_chunks},
    Check<Device>{"calls are counted and timed", calls_are_counted_and_timed},
};

}  // namespace
}  // namespace memory_claims

std::span<const Check<Device>> memory_checks() { return memory_claims::kChecks; }

}  // namespace vramx::contract
