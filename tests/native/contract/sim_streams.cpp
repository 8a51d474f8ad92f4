// What the simulated device offers to tests: failures on request, a journal, and streams of several
// devices that move by hand, with an order that can be asked for. Linked into driver_contract.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <string>
#include <thread>

#include "contract.h"

namespace vramx::contract::sim_streams_claims {

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

CHECK(SimAlone, every_call_can_be_made_to_fail_and_then_changes_nothing) {
  std::uint64_t nth = 1;
  for (;; ++nth) {
    const std::uint64_t fired = sim.faults_fired();
    sim.fail_nth_call(nth, StatusCode::kDriverError);
    const Status status = grow_once(sim);
    EXPECT(is_empty(sim));
    if (sim.faults_fired() == fired) break;
    EXPECT(status.ok() || status.code == StatusCode::kDriverError);
  }
  EXPECT(nth == 8);  // the seven calls of grow_once, then none is left to fail
  sim.clear_faults();
  sim.fail_call(CallKind::kCreateChunk, 2, StatusCode::kOutOfMemory);
  EXPECT(grow_once(sim).ok());
  EXPECT(grow_once(sim).code == StatusCode::kOutOfMemory);
  EXPECT(grow_once(sim).ok());
}

CHECK(Nothing, the_journal_keeps_the_latest_calls) {
  SimOptions options = small_sim();
  options.journal_entries = 3;
  SimAlone other(options);
  REQUIRE(grow_once(other.sim).ok());
  EXPECT(!other.sim.unmap(Address{kUnit.count}, kUnit).ok());
  const auto journal = other.sim.journal();
  REQUIRE(journal.size() == 3);
  EXPECT(journal[0].kind == CallKind::kReleaseChunk && journal[0].chunk != ChunkHandle::kNone);
  EXPECT(journal[1].kind == CallKind::kReleaseAddress && journal[1].status.ok());
  EXPECT(journal[2].kind == CallKind::kUnmap && journal[2].address == Address{kUnit.count});
  EXPECT(journal[2].status.code == StatusCode::kInvalidValue);
}

// --- streams ------------------------------------------------------------------------------------

CHECK(SimAlone, order_is_known_only_through_waits) {
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

CHECK(SimAlone, a_waiting_stream_does_not_run_ahead) {
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

CHECK(SimAlone, synchronizing_runs_one_device_and_what_that_waits_for) {
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

CHECK(SimAlone, an_event_of_the_device_covers_destroyed_streams_and_no_other_device) {
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
CHECK(SimAlone, a_call_about_the_whole_device_spoils_its_captures) {
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

CHECK(SimAlone, a_handle_is_of_one_device) {
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

CHECK(SimAlone, per_thread_streams_are_not_ordered_with_each_other) {
  StreamPoint work;
  std::thread([&] { work = sim.submit(Stream::kPerThread).value(); }).join();
  EXPECT(!sim.happens_before(work, Stream::kPerThread));
  // In the place of the thread that has ended.
  std::thread([&] { EXPECT(!sim.happens_before(work, Stream::kPerThread)); }).join();
  EXPECT(sim.happens_before(sim.submit(Stream::kPerThread).value(), Stream::kPerThread));
}

CHECK(SimAlone, a_revived_stream_is_another_stream) {
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

CHECK(SimAlone, a_call_on_a_destroyed_stream_ends_the_process) {
  const StreamName gone = here(sim.create_stream(kHere));
  const Event event = sim.create_event(kHere).value();
  EXPECT(sim.destroy_stream(gone.handle).ok());
  EXPECT(ends_the_process([&] { sim.record_event(event, gone).ignore(); }));
  EXPECT(ends_the_process([&] { sim.wait_event(gone, event).ignore(); }));
  EXPECT(ends_the_process([&] { sim.stream_id(gone).status().ignore(); }));
  EXPECT(!ends_the_process([&] { sim.query_event(event).status().ignore(); }));
  EXPECT(sim.destroy_event(event).ok());
}

}  // namespace vramx::contract::sim_streams_claims
