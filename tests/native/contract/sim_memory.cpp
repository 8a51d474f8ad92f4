// What the simulated device's memory promises beyond the contract: faults, exact limits, and the
// same figures with bytes and without. Linked into driver_contract.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>

#include "contract.h"
#include "core/units.h"
#include "driver/sim_driver.h"

namespace vramx::contract {
namespace sim_memory_claims {
namespace {

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

void an_address_faults_until_it_has_access(SimDriver&) {
  const auto sim = open_sim(small_sim());
  REQUIRE(sim != nullptr);
  Device device{*sim, *sim};
  Chunk chunk(device, kUnit);
  Range range(device, kUnit);
  REQUIRE(chunk && range);
  EXPECT(touching_kills(range.at({})));
  REQUIRE(sim->map(range.at({}), kUnit, chunk.handle()).ok());
  EXPECT(touching_kills(range.at({})));
  EXPECT(sim->fill(range.at({}), kUnit, 1, kA).code == StatusCode::kInvalidValue);
  REQUIRE(sim->set_access(range.at({}), kUnit).ok());
  EXPECT(!touching_kills(range.at({})));
  REQUIRE(sim->unmap(range.at({}), kUnit).ok());
  EXPECT(touching_kills(range.at({})));
}

void freed_chunks_return_their_pages_to_the_host(SimDriver&) {
  const auto sim = open_sim(small_sim());
  REQUIRE(sim != nullptr);
  Device device{*sim, *sim};
  Range range(device, kUnit * 4);
  Chunk chunk(device, kUnit * 4);
  REQUIRE(range && chunk && range.map_with_access({}, kUnit * 4, chunk.handle()).ok());
  REQUIRE(sim->fill(range.at({}), kUnit * 4, 9, kA).ok());
  EXPECT(sim->resident() >= kUnit * 4);
  chunk.release();
  EXPECT(sim->used() == kUnit * 4);
  REQUIRE(sim->unmap(range.at({}), kUnit * 4).ok());
  range.forget_mappings();
  EXPECT(!sim->used());
  EXPECT(!sim->resident());
}

void capacity_is_exact(SimDriver&) {
  const auto sim = open_sim(small_sim());
  REQUIRE(sim != nullptr);
  Device device{*sim, *sim};
  Chunk most(device, kUnit * 15);
  Chunk last(device, kUnit);
  REQUIRE(most && last);
  EXPECT(sim->create_chunk(kUnit).status().code == StatusCode::kOutOfMemory);
  EXPECT(!sim->memory_info().value().free);
  last.release();
  EXPECT(sim->memory_info().value().free == kUnit);
  Chunk again(device, kUnit);
  EXPECT(static_cast<bool>(again));
}

void the_mapping_ceiling_stops_access_and_not_mapping(SimDriver&) {
  SimOptions options = small_sim();
  options.mapping_ceiling = 3;
  const auto sim = open_sim(options);
  REQUIRE(sim != nullptr);
  Device device{*sim, *sim};
  Chunk chunk(device, kUnit);
  Range range(device, kUnit * 4);
  REQUIRE(chunk && range);
  for (std::uint64_t i = 0; i < 4; ++i) REQUIRE(range.map(kUnit * i, kUnit, chunk.handle()).ok());
  EXPECT(sim->set_access(range.at({}), kUnit * 4).code == StatusCode::kOutOfMemory);
  EXPECT(sim->fill(range.at({}), kUnit, 1, kA).code == StatusCode::kInvalidValue);
  EXPECT(sim->set_access(range.at({}), kUnit * 3).ok());
  EXPECT(sim->set_access(range.at({}), kUnit * 3).ok());
  EXPECT(sim->set_access(range.at(kUnit * 3), kUnit).code == StatusCode::kOutOfMemory);
  EXPECT(sim->check().empty());
}

void accounting_has_the_same_figures_as_bytes(SimDriver&) {
  SimOptions options = small_sim();
  std::array<DriverCalls, 2> calls;
  for (const SimMode mode : {SimMode::kBytes, SimMode::kAccounting}) {
    options.mode = mode;
    const auto sim = open_sim(options);
    REQUIRE(sim != nullptr);
    Device device{*sim, *sim};
    {
      Chunk chunk(device, kUnit * 2);
      Range range(device, kUnit * 4);
      REQUIRE(chunk && range && range.map_with_access(kUnit, kUnit * 2, chunk.handle()).ok());
      EXPECT(!sim->map(range.at({}), kUnit, chunk.handle()).ok());
      EXPECT(sim->check().empty());
    }
    EXPECT(is_empty(*sim));
    calls[static_cast<std::size_t>(mode)] = sim->calls();
  }
  EXPECT(calls[0].total() == calls[1].total());
  EXPECT(calls[0].total() == 6);
  EXPECT(calls[0].total_us == calls[1].total_us);
}

void set_access_is_charged_for_each_mapping(SimDriver&) {
  const auto sim = open_sim({.capacity = 64_MiB, .mode = SimMode::kAccounting});
  REQUIRE(sim != nullptr);
  Device device{*sim, *sim};
  Chunk chunk(device, 2_MiB);
  Range range(device, 16_MiB);
  REQUIRE(chunk && range);
  for (std::uint64_t i = 0; i < 8; ++i) REQUIRE(range.map(2_MiB * i, 2_MiB, chunk.handle()).ok());
  const double before_us = sim->calls().total_us;
  REQUIRE(sim->set_access(range.at({}), 16_MiB).ok());
  const double expected_us = 8 * CostTable::h200().set_access.at_us(2_MiB);
  // Sums of a few hundred microseconds in doubles: exact to far below a nanosecond.
  const double error_us = sim->calls().total_us - before_us - expected_us;
  EXPECT(error_us > -1e-6 && error_us < 1e-6);
}

void a_mapping_is_open_to_the_peers_of_its_last_access(SimDriver& sim) {
  Device device{sim, sim};
  Chunk chunk(device, kUnit);
  Range range(device, kUnit * 2);
  REQUIRE(chunk && range);
  REQUIRE(range.map_with_access({}, kUnit, chunk.handle()).ok());
  REQUIRE(sim.allow_peer(3).ok() && sim.allow_peer(5).ok());
  EXPECT(sim.mappings_open_to(3) == 0);
  REQUIRE(range.map_with_access(kUnit, kUnit, chunk.handle()).ok());
  EXPECT(sim.mappings_open_to(3) == 1 && sim.mappings_open_to(5) == 1);
  REQUIRE(sim.set_access(range.at({}), kUnit).ok());
  EXPECT(sim.mappings_open_to(3) == 2 && sim.mappings_open_to(4) == 0);
}

void the_name_of_a_chunk_that_is_gone_stays_unknown(SimDriver& sim) {
  const Result<ChunkHandle> gone = sim.create_chunk(kUnit);
  REQUIRE(gone.ok() && sim.release_chunk(gone.value()).ok());
  Device device{sim, sim};
  Chunk later(device, kUnit);
  Range range(device, kUnit);
  REQUIRE(later && range);
  EXPECT(later.handle() != gone.value());
  EXPECT(sim.release_chunk(gone.value()).code == StatusCode::kInvalidValue);
  EXPECT(sim.map(range.at({}), kUnit, gone.value()).code == StatusCode::kInvalidValue);
  EXPECT(sim.release_chunk(ChunkHandle::kNone).code == StatusCode::kInvalidValue);
}

// Between two others, before them and behind them, and out of their midst.
void mappings_come_and_go_in_any_order(SimDriver& sim) {
  Device device{sim, sim};
  Chunk chunk(device, kUnit);
  Range range(device, kUnit * 8);
  REQUIRE(chunk && range);
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

constexpr std::array kChecks{
    Check<SimDriver>{"an address faults until it has access",
                     an_address_faults_until_it_has_access},
    Check<SimDriver>{"freed chunks return their pages to the host",
                     freed_chunks_return_their_pages_to_the_host},
    Check<SimDriver>{"capacity is exact", capacity_is_exact},
    Check<SimDriver>{"the mapping ceiling stops access and not mapping",
                     the_mapping_ceiling_stops_access_and_not_mapping},
    Check<SimDriver>{"accounting has the same figures as bytes",
                     accounting_has_the_same_figures_as_bytes},
    Check<SimDriver>{"set_access is charged for each mapping",
                     set_access_is_charged_for_each_mapping},
    Check<SimDriver>{"a mapping is open to the peers of its last access",
                     a_mapping_is_open_to_the_peers_of_its_last_access},
    Check<SimDriver>{"the name of a chunk that is gone stays unknown",
                     the_name_of_a_chunk_that_is_gone_stays_unknown},
    Check<SimDriver>{"mappings come and go in any order", mappings_come_and_go_in_any_order},
};

}  // namespace
}  // namespace sim_memory_claims

std::span<const Check<SimDriver>> sim_memory_checks() { return sim_memory_claims::kChecks; }

}  // namespace vramx::contract
