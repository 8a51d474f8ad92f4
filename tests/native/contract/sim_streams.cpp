// What the simulated device offers to tests: failures on request, a journal, and streams of several
// devices that move by hand, with an order that can be asked for. Linked into driver_contract.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <span>
#include <string>
#include <thread>

#include "contract.h"
#include "core/units.h"
#include "driver/sim_driver.h"

namespace vramx::contract {
namespace sim_streams_claims {
namespace {

constexpr Bytes kUnit = kSimUnit;
constexpr Stream kA{11};
constexpr Stream kB{12};
constexpr Stream kC{13};
constexpr int kHere = 0;
constexpr int kThere = 1;

StreamName here(Stream stream) { return {stream, kHere}; }
StreamName there(Stream stream) { return {stream, kThere}; }

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
  const Event event = sim.create_event(kHere).value();
  EXPECT(sim.record_event(event, here(kA)).ok());
  const StreamPoint late = sim.submit(kA).value();
  EXPECT(sim.happens_before(late, kA));
  EXPECT(!sim.happens_before(early, kB));
  EXPECT(sim.wait_event(here(kB), event).ok());
  EXPECT(sim.happens_before(early, kB));
  EXPECT(!sim.happens_before(late, kB));
  // Through B to C: an event stands for all that its stream waited for, with no work of its own.
  const Event relay = sim.create_event(kHere).value();
  EXPECT(sim.record_event(relay, here(kB)).ok());
  EXPECT(sim.wait_event(here(kC), relay).ok());
  EXPECT(sim.happens_before(early, kC));
  EXPECT(!sim.query_event(relay).value());
  sim.advance_all();
  EXPECT(sim.query_event(relay).value());
  EXPECT(sim.happens_before(late, kC));
  EXPECT(sim.destroy_event(event).ok() && sim.destroy_event(relay).ok());
}

void a_waiting_stream_does_not_run_ahead(SimDriver& sim) {
  const Event event = sim.create_event(kHere).value();
  EXPECT(sim.submit(kA, 3).ok());
  EXPECT(sim.record_event(event, here(kA)).ok());
  EXPECT(sim.submit(kB, 1).ok());
  EXPECT(sim.wait_event(here(kB), event).ok());
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

void synchronizing_runs_one_device_and_what_that_waits_for(SimDriver& sim) {
  const Event event = sim.create_event(kThere).value();
  EXPECT(sim.submit(here(kA)).ok() && sim.submit(there(kB)).ok());
  EXPECT(sim.record_event(event, there(kB)).ok());
  EXPECT(sim.submit(there(kB)).ok());
  EXPECT(sim.wait_event(here(kA), event).ok());
  EXPECT(sim.submit(here(kA)).ok());
  EXPECT(sim.synchronize(kHere).ok());
  EXPECT(sim.query_event(event).value());
  EXPECT(sim.advance(here(kA), 10) == 0);
  EXPECT(sim.advance(there(kB), 10) == 1);
  EXPECT(sim.destroy_event(event).ok());
}

void an_event_of_the_device_covers_destroyed_streams_and_no_other_device(SimDriver& sim) {
  const Stream gone = sim.create_stream(kHere);
  const Event event = sim.create_event(kHere).value();
  const StreamPoint covered = sim.submit(gone).value();
  EXPECT(sim.destroy_stream(gone).ok());
  const StreamPoint elsewhere = sim.submit(there(kB)).value();
  EXPECT(sim.record_device(event, kHere).ok());
  EXPECT(sim.wait_event(here(kC), event).ok());
  EXPECT(!sim.query_event(event).value());
  EXPECT(sim.happens_before(covered, kC));
  EXPECT(!sim.happens_before(elsewhere, kC));
  EXPECT(sim.record_device(event, kThere).code == StatusCode::kInvalidValue);
  EXPECT(sim.destroy_event(event).ok());
}

// As CUDA's documentation says of both calls.
void a_call_about_the_whole_device_spoils_its_captures(SimDriver& sim) {
  const Event of_here = sim.create_event(kHere).value();
  const Event of_there = sim.create_event(kThere).value();
  EXPECT(sim.begin_capture(kA).ok());
  EXPECT(sim.record_device(of_there, kThere).ok() && sim.synchronize(kThere).ok());
  EXPECT(sim.end_capture(kA).ok());
  EXPECT(sim.begin_capture(kA).ok());
  EXPECT(sim.record_device(of_here, kHere).code == StatusCode::kDriverError);
  EXPECT(sim.end_capture(kA).code == StatusCode::kDriverError);
  EXPECT(sim.begin_capture(kA).ok());
  EXPECT(sim.synchronize(kHere).code == StatusCode::kDriverError);
  EXPECT(sim.end_capture(kA).code == StatusCode::kDriverError);
  EXPECT(sim.destroy_event(of_here).ok() && sim.destroy_event(of_there).ok());
}

void a_handle_is_of_one_device(SimDriver& sim) {
  const Stream stream = sim.create_stream(kThere);
  const Event event = sim.create_event(kHere).value();
  EXPECT(sim.submit(there(stream)).ok() && !sim.submit(here(stream)).ok());
  EXPECT(sim.wait_event(there(stream), event).ok());
  EXPECT(sim.wait_event(here(stream), event).code == StatusCode::kInvalidValue);
  EXPECT(sim.stream_id(here(kA)).value() != sim.stream_id(there(kB)).value());
  EXPECT(sim.stream_id(here(Stream::kDefault)).value() !=
         sim.stream_id(there(Stream::kDefault)).value());
  EXPECT(sim.destroy_event(event).ok());
}

void per_thread_streams_are_not_ordered_with_each_other(SimDriver& sim) {
  StreamPoint work;
  std::thread([&] { work = sim.submit(Stream::kPerThread).value(); }).join();
  EXPECT(!sim.happens_before(work, Stream::kPerThread));
  // In the place of the thread that has ended.
  std::thread([&] { EXPECT(!sim.happens_before(work, Stream::kPerThread)); }).join();
  EXPECT(sim.happens_before(sim.submit(Stream::kPerThread).value(), Stream::kPerThread));
}

void a_revived_stream_is_another_stream(SimDriver& sim) {
  const Stream stream = sim.create_stream(kHere);
  const Event event = sim.create_event(kHere).value();
  const StreamPoint old = sim.submit(stream).value();
  const std::uint64_t id = sim.stream_id(here(stream)).value();
  EXPECT(sim.destroy_stream(stream).ok());
  EXPECT(!sim.destroy_stream(stream).ok());
  EXPECT(!sim.submit(stream).ok());
  EXPECT(sim.revive_stream(stream).ok());
  EXPECT(sim.stream_id(here(stream)).value() != id);
  EXPECT(sim.record_event(event, here(stream)).ok());
  EXPECT(sim.query_event(event).value());
  EXPECT(!sim.happens_before(old, stream));
  sim.advance_all();
  EXPECT(sim.happens_before(old, stream));
  EXPECT(sim.destroy_event(event).ok() && !sim.destroy_event(event).ok());
}

// Whether the call aborts a child, with one line on its standard error.
template <class Call>
bool ends_the_process(Call call) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    call();
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char byte = 0;
  while (read(ends[0], &byte, 1) == 1) said += byte;
  close(ends[0]);
  int state = 0;
  const bool is_aborted = child > 0 && waitpid(child, &state, 0) == child && WIFSIGNALED(state) &&
                          WTERMSIG(state) == SIGABRT;
  return is_aborted && std::count(said.begin(), said.end(), '\n') == 1;
}

void a_call_on_a_destroyed_stream_ends_the_process(SimDriver& sim) {
  const StreamName gone = here(sim.create_stream(kHere));
  const Event event = sim.create_event(kHere).value();
  EXPECT(sim.destroy_stream(gone.handle).ok());
  EXPECT(ends_the_process([&] { sim.record_event(event, gone).ignore(); }));
  EXPECT(ends_the_process([&] { sim.wait_event(gone, event).ignore(); }));
  EXPECT(ends_the_process([&] { sim.stream_id(gone).status().ignore(); }));
  EXPECT(!ends_the_process([&] { sim.query_event(event).status().ignore(); }));
  EXPECT(sim.destroy_event(event).ok());
}

constexpr std::array kChecks{
    Check<SimDriver>{"every call can be made to fail and then changes nothing",
                     every_call_can_be_made_to_fail_and_then_changes_nothing},
    Check<SimDriver>{"the journal keeps the latest calls", the_journal_keeps_the_latest_calls},
    Check<SimDriver>{"order is known only through waits", order_is_known_only_through_waits},
    Check<SimDriver>{"a waiting stream does not run ahead", a_waiting_stream_does_not_run_ahead},
    Check<SimDriver>{"synchronizing runs one device and what that waits for",
                     synchronizing_runs_one_device_and_what_that_waits_for},
    Check<SimDriver>{"an event of the device covers destroyed streams and no other device",
                     an_event_of_the_device_covers_destroyed_streams_and_no_other_device},
    Check<SimDriver>{"a call about the whole device spoils its captures",
                     a_call_about_the_whole_device_spoils_its_captures},
    Check<SimDriver>{"a handle is of one device", a_handle_is_of_one_device},
    Check<SimDriver>{"per-thread streams are not ordered with each other",
                     per_thread_streams_are_not_ordered_with_each_other},
    Check<SimDriver>{"a revived stream is another stream", a_revived_stream_is_another_stream},
    Check<SimDriver>{"a call on a destroyed stream ends the process",
                     a_call_on_a_destroyed_stream_ends_the_process},
};

}  // namespace
}  // namespace sim_streams_claims

std::span<const Check<SimDriver>> sim_stream_checks() { return sim_streams_claims::kChecks; }

}  // namespace vramx::contract
