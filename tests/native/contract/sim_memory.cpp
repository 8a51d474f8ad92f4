// What the simulated device's memory promises beyond the contract: faults, exact limits, and the
// same figures with bytes and without. Linked into driver_contract.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>

#include "contract.h"

namespace vramx::contract::sim_memory_claims {

using namespace vramx::literals;

constexpr Bytes kUnit = kSimUnit;
constexpr Stream kA{11};

// --- memory -------------------------------------------------------------------------------------

bool touching_kills(Address address) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);
    *reinterpret_cast<volatile char*>(address.value) = 1;
    _exit(0);
  }
  int state = 0;
  return child > 0 && waitpid(child, &state, 0) == child && WIFSIGNALED(state) &&
         WTERMSIG(state) == SIGSEGV;
}

// With a chunk of a unit, and addresses for eight of them.
struct Mapped : SimAlone {
  Chunk chunk{device, kUnit};
  Range range{device, kUnit * 8};

  Mapped() { EXPECT(chunk && range); }
};

CHECK(Mapped, an_address_faults_until_it_has_access) {
  EXPECT(touching_kills(range.at({})));
  REQUIRE(sim.map(range.at({}), kUnit, chunk.handle()).ok());
  EXPECT(touching_kills(range.at({})));
  EXPECT(sim.fill(range.at({}), kUnit, 1, kA).code == StatusCode::kInvalidValue);
  REQUIRE(sim.set_access(range.at({}), kUnit).ok());
  EXPECT(!touching_kills(range.at({})));
  REQUIRE(sim.unmap(range.at({}), kUnit).ok());
  EXPECT(touching_kills(range.at({})));
}

CHECK(SimAlone, freed_chunks_return_their_pages_to_the_host) {
  Range range(device, kUnit * 4);
  Chunk chunk(device, kUnit * 4);
  REQUIRE(range && chunk && range.map_with_access({}, kUnit * 4, chunk.handle()).ok());
  REQUIRE(sim.fill(range.at({}), kUnit * 4, 9, kA).ok());
  EXPECT(sim.resident() >= kUnit * 4);
  chunk.release();
  EXPECT(sim.used() == kUnit * 4);
  REQUIRE(sim.unmap(range.at({}), kUnit * 4).ok());
  range.forget_mappings();
  EXPECT(!sim.used());
  EXPECT(!sim.resident());
}

CHECK(SimAlone, capacity_is_exact) {
  Chunk most(device, kUnit * 15);
  Chunk last(device, kUnit);
  REQUIRE(most && last);
  EXPECT(sim.create_chunk(kUnit).status().code == StatusCode::kOutOfMemory);
  EXPECT(!sim.memory_info().value().free);
  last.release();
  EXPECT(sim.memory_info().value().free == kUnit);
  Chunk again(device, kUnit);
  EXPECT(again);
}

CHECK(Nothing, the_mapping_ceiling_stops_access_and_not_mapping) {
  SimOptions options = small_sim();
  options.mapping_ceiling = 3;
  SimAlone other(options);
  Chunk chunk(other.device, kUnit);
  Range range(other.device, kUnit * 4);
  REQUIRE(chunk && range);
  for (std::uint64_t i = 0; i < 4; ++i) REQUIRE(range.map(kUnit * i, kUnit, chunk.handle()).ok());
  EXPECT(other.sim.set_access(range.at({}), kUnit * 4).code == StatusCode::kOutOfMemory);
  EXPECT(other.sim.fill(range.at({}), kUnit, 1, kA).code == StatusCode::kInvalidValue);
  EXPECT(other.sim.set_access(range.at({}), kUnit * 3).ok());
  EXPECT(other.sim.set_access(range.at({}), kUnit * 3).ok());
  EXPECT(other.sim.set_access(range.at(kUnit * 3), kUnit).code == StatusCode::kOutOfMemory);
  EXPECT(other.sim.check().empty());
}

CHECK(Nothing, accounting_has_the_same_figures_as_bytes) {
  SimOptions options = small_sim();
  std::array<DriverCalls, 2> calls;
  for (const SimMode mode : {SimMode::kBytes, SimMode::kAccounting}) {
    options.mode = mode;
    SimAlone other(options);
    {
      Chunk chunk(other.device, kUnit * 2);
      Range range(other.device, kUnit * 4);
      REQUIRE(chunk && range && range.map_with_access(kUnit, kUnit * 2, chunk.handle()).ok());
      EXPECT(!other.sim.map(range.at({}), kUnit, chunk.handle()).ok());
      EXPECT(other.sim.check().empty());
    }
    calls[static_cast<std::size_t>(mode)] = other.sim.calls();
  }
  EXPECT(calls[0].total() == calls[1].total());
  EXPECT(calls[0].total() == 6);
  EXPECT(calls[0].total_us == calls[1].total_us);
}

CHECK(Nothing, set_access_is_charged_for_each_mapping) {
  SimAlone other({.capacity = 64_MiB, .mode = SimMode::kAccounting});
  Chunk chunk(other.device, 2_MiB);
  Range range(other.device, 16_MiB);
  REQUIRE(chunk && range);
  for (std::uint64_t i = 0; i < 8; ++i) REQUIRE(range.map(2_MiB * i, 2_MiB, chunk.handle()).ok());
  const double before_us = other.sim.calls().total_us;
  REQUIRE(other.sim.set_access(range.at({}), 16_MiB).ok());
  const double expected_us = 8 * CostTable::h200().set_access.at_us(2_MiB);
  // Sums of a few hundred microseconds in doubles: exact to far below a nanosecond.
  const double error_us = other.sim.calls().total_us - before_us - expected_us;
  EXPECT(error_us > -1e-6 && error_us < 1e-6);
}

CHECK(Mapped, a_mapping_is_open_to_the_peers_of_its_last_access) {
  REQUIRE(range.map_with_access({}, kUnit, chunk.handle()).ok());
  REQUIRE(sim.allow_peer(3).ok() && sim.allow_peer(5).ok());
  EXPECT(sim.mappings_open_to(3) == 0);
  REQUIRE(range.map_with_access(kUnit, kUnit, chunk.handle()).ok());
  EXPECT(sim.mappings_open_to(3) == 1 && sim.mappings_open_to(5) == 1);
  REQUIRE(sim.set_access(range.at({}), kUnit).ok());
  EXPECT(sim.mappings_open_to(3) == 2 && sim.mappings_open_to(4) == 0);
}

CHECK(SimAlone, the_name_of_a_chunk_that_is_gone_stays_unknown) {
  const Result<ChunkHandle> gone = sim.create_chunk(kUnit);
  REQUIRE(gone.ok() && sim.release_chunk(gone.value()).ok());
  Chunk later(device, kUnit);
  Range range(device, kUnit);
  REQUIRE(later && range);
  EXPECT(later.handle() != gone.value());
  EXPECT(sim.release_chunk(gone.value()).code == StatusCode::kInvalidValue);
  EXPECT(sim.map(range.at({}), kUnit, gone.value()).code == StatusCode::kInvalidValue);
  EXPECT(sim.release_chunk(ChunkHandle::kNone).code == StatusCode::kInvalidValue);
}

// Between two others, before them and behind them, and out of their midst.
CHECK(Mapped, mappings_come_and_go_in_any_order) {
  for (const std::uint64_t at : {5, 1, 3, 7, 0, 2, 4}) {
    REQUIRE(range.map_with_access(kUnit * at, kUnit, chunk.handle()).ok());
    EXPECT(sim.check().empty());
  }
  EXPECT(!sim.map(range.at(kUnit * 3), kUnit, chunk.handle()).ok());
  EXPECT(sim.set_access(range.at(kUnit * 4), kUnit * 4).code == StatusCode::kInvalidValue);
  EXPECT(sim.set_access(range.at(kUnit * 4), {}).code == StatusCode::kInvalidValue);
  EXPECT(sim.unmap(range.at(kUnit * 4), {}).code == StatusCode::kInvalidValue);
  REQUIRE(sim.unmap(range.at(kUnit * 2), kUnit * 3).ok());
  EXPECT(sim.live_mappings() == 4 && sim.check().empty());
  EXPECT(sim.unmap(range.at(kUnit), kUnit * 2).code == StatusCode::kInvalidValue);
  REQUIRE(range.map_with_access(kUnit * 3, kUnit, chunk.handle()).ok());
  EXPECT(sim.fill(range.at(kUnit * 3), kUnit, 6, kA).ok());
  EXPECT(sim.fill(range.at(kUnit * 3), kUnit * 2, 6, kA).code == StatusCode::kInvalidValue);
  for (const std::uint64_t at : {0, 1, 3, 5, 7}) {
    REQUIRE(sim.unmap(range.at(kUnit * at), kUnit).ok());
  }
  range.forget_mappings();
  EXPECT(sim.live_mappings() == 0);
}

}  // namespace vramx::contract::sim_memory_claims
