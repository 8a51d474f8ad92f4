// What the simulated device offers to tests: failures on request, a journal, and streams that move
// by hand with an order that can be asked for. Linked into driver_contract.
#include <array>
#include <cstdint>
#include <span>

#include "contract.h"
#include "core/units.h"
#include "driver/sim_driver.h"

namespace vramx::contract {
namespace sim_streams_claims {
namespace {

constexpr Bytes kUnit = kSimUnit;
constexpr Stream kA{1};
constexpr Stream kB{2};
constexpr Stream kC{3};

// --- failures on request ------------------------------------------------------------------------

// The multi-step operation that every failure below interrupts; undoes its finished steps.
Status grow_once(SimDriver& sim) {
  const Result<Address> address = sim.reserve_address(kUnit);
  if (!address.ok()) return address.status();
  const Result<ChunkHandle> chunk = sim.create_chunk(kUnit);
  Status status = chunk.status();
  if (status.ok()) {
    status = sim.map(address.value(), kUnit, chunk.value());
    if (status.ok()) {
      status = sim.set_access(address.value(), kUnit);
      if (!sim.unmap(address.value(), kUnit).ok()) sim.unmap(address.value(), kUnit).ignore();
    }
    if (!sim.release_chunk(chunk.value()).ok()) sim.release_chunk(chunk.value()).ignore();
  }
  if (!sim.release_address(address.value(), kUnit).ok()) {
    sim.release_address(address.value(), kUnit).ignore();
  }
  return status;
}

void every_call_can_be_made_to_fail_and_then_changes_nothing(SimDriver&) {
  const auto sim = open_sim(small_sim());
  REQUIRE(sim != nullptr);
  std::uint64_t nth = 1;
  for (;; ++nth) {
    const std::uint64_t fired = sim->faults_fired();
    sim->fail_nth_call(nth, StatusCode::kDriverError);
    const Status status = grow_once(*sim);
    EXPECT(is_empty(*sim));
    if (sim->faults_fired() == fired) break;
    EXPECT(status.ok() || status.code == StatusCode::kDriverError);
  }
  EXPECT(nth == 8);  // the seven calls of grow_once, then none is left to fail
  sim->clear_faults();
  sim->fail_call(CallKind::kCreateChunk, 2, StatusCode::kOutOfMemory);
  EXPECT(grow_once(*sim).ok());
  EXPECT(grow_once(*sim).code == StatusCode::kOutOfMemory);
  EXPECT(grow_once(*sim).ok());
}

void the_journal_keeps_the_latest_calls(SimDriver&) {
  SimOptions options = small_sim();
  options.journal_entries = 3;
  const auto sim = open_sim(options);
  REQUIRE(sim != nullptr);
  REQUIRE(grow_once(*sim).ok());
  EXPECT(!sim->unmap(Address{kUnit.count}, kUnit).ok());
  const auto journal = sim->journal();
  REQUIRE(journal.size() == 3);
  EXPECT(journal[0].kind == CallKind::kReleaseChunk && journal[0].chunk != ChunkHandle::kNone);
  EXPECT(journal[1].kind == CallKind::kReleaseAddress && journal[1].status.ok());
  EXPECT(journal[2].kind == CallKind::kUnmap && journal[2].address == Address{kUnit.count});
  EXPECT(journal[2].status.code == StatusCode::kInvalidValue);
}

// --- streams ------------------------------------------------------------------------------------

void order_is_known_only_through_waits(SimDriver& sim) {
  const StreamPoint early = sim.submit(kA).value();
  const Event event = sim.create_event().value();
  EXPECT(sim.record_event(event, kA).ok());
  const StreamPoint late = sim.submit(kA).value();
  EXPECT(sim.happens_before(late, kA));
  EXPECT(!sim.happens_before(early, kB));
  EXPECT(sim.wait_event(kB, event).ok());
  EXPECT(sim.happens_before(early, kB));
  EXPECT(!sim.happens_before(late, kB));
  // Through B to C: an event stands for all that its stream waited for, with no work of its own.
  const Event relay = sim.create_event().value();
  EXPECT(sim.record_event(relay, kB).ok());
  EXPECT(sim.wait_event(kC, relay).ok());
  EXPECT(sim.happens_before(early, kC));
  EXPECT(!sim.query_event(relay).value());
  sim.advance_all();
  EXPECT(sim.query_event(relay).value());
  EXPECT(sim.happens_before(late, kC));
  EXPECT(sim.destroy_event(event).ok() && sim.destroy_event(relay).ok());
}

void a_waiting_stream_does_not_run_ahead(SimDriver& sim) {
  const Event event = sim.create_event().value();
  EXPECT(sim.submit(kA, 3).ok());
  EXPECT(sim.record_event(event, kA).ok());
  EXPECT(sim.submit(kB, 1).ok());
  EXPECT(sim.wait_event(kB, event).ok());
  EXPECT(sim.submit(kB, 2).ok());
  EXPECT(sim.advance(kB, 10) == 1);
  EXPECT(sim.advance(kA, 2) == 2);
  EXPECT(sim.advance(kB, 10) == 0);
  EXPECT(!sim.query_event(event).value());
  EXPECT(sim.advance(kA, 1) == 1);
  EXPECT(sim.query_event(event).value());
  EXPECT(sim.advance(kB, 10) == 2);
  EXPECT(sim.destroy_event(event).ok());
}

void synchronizing_runs_only_what_the_event_stands_for(SimDriver& sim) {
  const Event first = sim.create_event().value();
  const Event second = sim.create_event().value();
  EXPECT(sim.submit(kA).ok());
  EXPECT(sim.record_event(first, kA).ok());
  EXPECT(sim.submit(kA).ok());
  EXPECT(sim.wait_event(kB, first).ok());
  EXPECT(sim.submit(kB).ok());
  EXPECT(sim.record_event(second, kB).ok());
  EXPECT(sim.synchronize_event(second).ok());
  EXPECT(sim.query_event(second).value());
  EXPECT(sim.advance(kA, 10) == 1);
  EXPECT(sim.destroy_event(first).ok() && sim.destroy_event(second).ok());
}

void a_capture_refuses_events_and_is_spoiled_by_them(SimDriver& sim) {
  const Event event = sim.create_event().value();
  EXPECT(sim.begin_capture(kA).ok());
  EXPECT(sim.is_capturing(kA).value() && !sim.is_capturing(kB).value());
  EXPECT(sim.record_event(event, kB).ok());
  EXPECT(sim.end_capture(kA).ok());
  EXPECT(sim.begin_capture(kA).ok());
  EXPECT(sim.record_event(event, kA).code == StatusCode::kDriverError);
  EXPECT(sim.end_capture(kA).code == StatusCode::kDriverError);
  EXPECT(sim.begin_capture(kA).ok());
  EXPECT(sim.wait_event(kA, event).code == StatusCode::kDriverError);
  EXPECT(sim.end_capture(kA).code == StatusCode::kDriverError);
  EXPECT(sim.begin_capture(kA).ok());
  const Result<bool> idle = sim.is_idle(kA);
  EXPECT(idle.ok() && !idle.value());
  EXPECT(sim.end_capture(kA).ok());
  EXPECT(!sim.is_capturing(kA).value());
  EXPECT(sim.destroy_event(event).ok());
}

void a_stream_that_waits_for_another_is_not_idle(SimDriver& sim) {
  const Event event = sim.create_event().value();
  EXPECT(sim.submit(kA).ok());
  EXPECT(!sim.is_idle(kA).value() && sim.is_idle(kB).value());
  EXPECT(sim.record_event(event, kA).ok() && sim.wait_event(kB, event).ok());
  EXPECT(!sim.is_idle(kB).value());
  EXPECT(sim.advance(kA, 1) == 1);
  EXPECT(sim.is_idle(kA).value() && sim.is_idle(kB).value());
  EXPECT(sim.destroy_event(event).ok());
}

void a_revived_stream_is_another_stream(SimDriver& sim) {
  const Stream stream = sim.create_stream().value();
  const Event event = sim.create_event().value();
  const StreamPoint old = sim.submit(stream).value();
  EXPECT(sim.destroy_stream(stream).ok());
  EXPECT(!sim.destroy_stream(stream).ok());
  EXPECT(!sim.record_event(event, stream).ok());
  EXPECT(!sim.wait_event(stream, event).ok());
  EXPECT(!sim.is_capturing(stream).ok());
  EXPECT(sim.revive_stream(stream).ok());
  EXPECT(sim.record_event(event, stream).ok());
  EXPECT(sim.query_event(event).value());
  EXPECT(!sim.happens_before(old, stream));
  sim.advance_all();
  EXPECT(sim.happens_before(old, stream));
  EXPECT(sim.destroy_event(event).ok() && !sim.destroy_event(event).ok());
}

constexpr std::array kChecks{
    Check<SimDriver>{"every call can be made to fail and then changes nothing",
                     every_call_can_be_made_to_fail_and_then_changes_nothing},
    Check<SimDriver>{"the journal keeps the latest calls", the_journal_keeps_the_latest_calls},
    Check<SimDriver>{"order is known only through waits", order_is_known_only_through_waits},
    Check<SimDriver>{"a waiting stream does not run ahead", a_waiting_stream_does_not_run_ahead},
    Check<SimDriver>{"synchronizing runs only what the event stands for",
                     synchronizing_runs_only_what_the_event_stands_for},
    Check<SimDriver>{"a capture refuses events and is spoiled by them",
                     a_capture_refuses_events_and_is_spoiled_by_them},
    Check<SimDriver>{"a stream that waits for another is not idle",
                     a_stream_that_waits_for_another_is_not_idle},
    Check<SimDriver>{"a revived stream is another stream", a_revived_stream_is_another_stream},
};

}  // namespace
}  // namespace sim_streams_claims

std::span<const Check<SimDriver>> sim_stream_checks() { return sim_streams_claims::kChecks; }

}  // namespace vramx::contract
