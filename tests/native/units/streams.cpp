// Streams and their frees: which stream an entry is, and when a free leaves a mark.
#include "units/streams.h"

#include <thread>

namespace vramx::units {
namespace streams_claims {
namespace {

using Fixture = StreamFixture;

// Two streams, so that frees are marked.
struct Two : StreamFixture {
  StreamIndex a = enter(on_a);
  StreamIndex b = enter(on_b);
};

// --- identity -----------------------------------------------------------------------------------

void a_stream_that_lasts_keeps_its_entry(Two& fixture) {
  EXPECT(fixture.enter(fixture.on_a) == fixture.a && fixture.enter(fixture.on_b) == fixture.b);
  EXPECT(fixture.a != fixture.b && fixture.order.count() == 2);
  EXPECT(fixture.order.handle_of(fixture.b) == fixture.on_b);
}

void the_default_stream_has_one_entry_under_both_its_names(Fixture& fixture) {
  EXPECT(fixture.enter(Stream::kLegacy) == fixture.enter(Stream::kDefault));
  EXPECT(fixture.order.is_single());
}

void the_default_streams_of_two_devices_have_two_entries(Fixture& fixture) {
  const StreamIndex here = fixture.enter(Stream::kDefault);
  EXPECT(fixture.order.index_of({Stream::kDefault, 1}, false) != here);
  EXPECT(fixture.enter(Stream::kDefault) == here);
}

void a_lasting_stream_is_found_without_a_driver_call(Fixture& fixture) {
  fixture.enter(fixture.on_a);
  fixture.enter(fixture.on_a);
  EXPECT(fixture.sim->call_count() == 0);
}

void the_per_thread_stream_of_two_threads_has_two_entries(Fixture& fixture) {
  const StreamIndex here = fixture.enter(Stream::kPerThread);
  StreamIndex there = here;
  std::thread([&] { there = fixture.enter(Stream::kPerThread); }).join();
  EXPECT(there != here && fixture.enter(Stream::kPerThread) == here);
}

void a_revived_handle_has_another_entry(Fixture& fixture) {
  const Stream foreign = fixture.sim->create_stream(0);
  const StreamIndex first = fixture.enter_foreign(foreign);
  fixture.order.hold(first);
  REQUIRE(fixture.sim->destroy_stream(foreign).ok() && fixture.sim->revive_stream(foreign).ok());
  EXPECT(fixture.enter_foreign(foreign) != first);
}

void a_recorded_stream_that_is_said_to_last_does_so_from_then_on(Fixture& fixture) {
  const Stream pooled = fixture.sim->create_stream(0);
  const StreamIndex index = fixture.order.index_of({pooled, 0}, true);
  EXPECT(fixture.enter(pooled) == index && fixture.count(CallKind::kStreamId) == 0);
}

// The driver numbers no stream that is captured.
void a_captured_stream_has_an_entry_of_its_own(Fixture& fixture) {
  const Stream foreign = fixture.sim->create_stream(0);
  const StreamIndex before = fixture.enter_foreign(foreign);
  REQUIRE(fixture.sim->begin_capture(foreign).ok());
  const StreamIndex during = fixture.enter_foreign(foreign);
  EXPECT(during != before && fixture.enter_foreign(foreign) == during);
  REQUIRE(fixture.sim->end_capture(foreign).ok());
  EXPECT(fixture.enter_foreign(foreign) == before);
}

// --- marks --------------------------------------------------------------------------------------

void a_program_of_one_stream_makes_no_driver_call(Fixture& fixture) {
  const StreamIndex only = fixture.enter(Stream::kDefault);
  for (int i = 0; i < 5; ++i) EXPECT(fixture.free(only, 1_GiB).number == 1);
  EXPECT(fixture.sim->call_count() == 0);
}

void the_second_stream_has_the_first_one_marked_once(Fixture& fixture) {
  const StreamIndex first = fixture.enter(Stream::kDefault);
  const Tag before = fixture.work_and_free(first);
  fixture.enter(fixture.on_a);
  EXPECT(fixture.records() == 1 &&
         fixture.order.has_marks(TagSet(before), fixture.enter(fixture.on_a)));
  fixture.enter(fixture.on_b);
  EXPECT(fixture.records() == 1);
}

void a_large_free_is_marked_at_the_free(Two& fixture) {
  const std::uint64_t records = fixture.records();
  const Tag tag = fixture.free(fixture.a, kMarkedFree);
  EXPECT(fixture.records() == records + 1);
  EXPECT(fixture.order.has_marks(TagSet(tag), fixture.b));
}

void one_unit_less_is_not_marked(Two& fixture) {
  const std::uint64_t records = fixture.records();
  const Tag tag = fixture.free(fixture.a, kMarkedFree - kBlockUnit);
  EXPECT(fixture.records() == records && !fixture.order.has_marks(TagSet(tag), fixture.b));
}

void small_frees_share_the_next_mark(Two& fixture) {
  const Tag first = fixture.free(fixture.a, kSmallFree);
  const Tag second = fixture.free(fixture.a, kSmallFree);
  const Tag marked = fixture.free(fixture.a, kMarkedFree);
  EXPECT(first == second && second == marked);
  EXPECT(fixture.free(fixture.a, kSmallFree).number == marked.number + 1);
}

// Each counts for 4 KiB at least.
void small_frees_are_marked_after_a_mebibyte_of_them(Nothing&) {
  const struct {
    Bytes size;
    int frees;
  } kCases[] = {{512_B, 256}, {4_KiB, 256}, {64_KiB, 16}, {512_KiB, 2}};
  for (const auto& each : kCases) {
    Two fixture;
    const std::uint64_t records = fixture.records();
    for (int i = 0; i < each.frees - 1; ++i) fixture.free(fixture.a, each.size);
    EXPECT(fixture.records() == records);
    fixture.free(fixture.a, each.size);
    EXPECT(fixture.records() == records + 1);
    fixture.free(fixture.a, each.size);
    EXPECT(fixture.records() == records + 1);
  }
}

void every_free_of_a_stream_that_may_end_is_marked(Two& fixture) {
  const StreamIndex foreign = fixture.enter_foreign(fixture.sim->create_stream(0));
  const std::uint64_t records = fixture.records();
  fixture.free(foreign, kSmallFree);
  EXPECT(fixture.records() == records + 1);
}

void a_free_of_memory_of_several_streams_marks_each(Two& fixture) {
  const TagSet tags = fixture.order.mark({fixture.a, fixture.b}, fixture.lock);
  EXPECT(tags.size() == 2 && tags[0].stream != tags[1].stream);
  EXPECT(fixture.order.has_marks(tags, fixture.enter(Stream::kDefault)));
}

void a_mark_that_fails_leaves_its_frees_to_the_next(Nothing&) {
  for (const CallKind kind : {CallKind::kCreateEvent, CallKind::kRecordEvent}) {
    Two fixture;
    fixture.sim->fail_call(kind, 1, StatusCode::kDriverError);
    const Tag tag = fixture.work_and_free(fixture.a);
    EXPECT(fixture.sim->faults_fired() == 1 && fixture.lock.is_held());
    EXPECT(!fixture.order.has_marks(TagSet(tag), fixture.b));
    fixture.free(fixture.a);
    EXPECT(fixture.order.has_marks(TagSet(tag), fixture.b));
    EXPECT(fixture.order.check().empty());
  }
}

// --- captures -----------------------------------------------------------------------------------

void what_is_freed_in_a_capture_is_covered_by_the_first_mark_after_it(Two& fixture) {
  REQUIRE(fixture.sim->begin_capture(fixture.on_a).ok());
  const Tag tag = fixture.free(fixture.a);
  EXPECT(!fixture.order.has_marks(TagSet(tag), fixture.b));
  fixture.sim->advance_all();
  fixture.order.ask(fixture.lock);
  EXPECT(!fixture.order.is_over(tag));
  REQUIRE(fixture.sim->end_capture(fixture.on_a).ok());
  fixture.free(fixture.a);
  EXPECT(fixture.order.has_marks(TagSet(tag), fixture.b));
  fixture.order.ask(fixture.lock);
  EXPECT(fixture.order.is_over(tag));
}

// --- devices ------------------------------------------------------------------------------------

// A free on a stream that the thread does not work on, so that only its device can be marked.
Tag free_from_afar(Fixture& fixture, StreamIndex index) {
  fixture.known.current = Stream::kDefault;
  return fixture.free(index);
}

void what_another_devices_stream_uses_is_over_when_that_device_is(Fixture& fixture) {
  fixture.enter(fixture.on_a);
  const Stream there = fixture.sim->create_stream(1);
  const StreamIndex index = fixture.order.index_of({there, 1}, false);
  REQUIRE(fixture.sim->submit(StreamName{there, 1}).ok());
  const Tag tag = free_from_afar(fixture, index);
  fixture.order.cover(fixture.lock);
  fixture.order.ask(fixture.lock);
  EXPECT(!fixture.order.is_over(tag) &&
         fixture.order.has_marks(TagSet(tag), fixture.enter(fixture.on_a)));
  fixture.sim->advance_all();
  fixture.order.ask(fixture.lock);
  EXPECT(fixture.order.is_over(tag));
}

void a_capture_of_another_library_is_not_spoiled_until_it_must_be(Fixture& fixture) {
  fixture.enter(fixture.on_a);
  const Stream foreign = fixture.sim->create_stream(0);
  const Tag tag = free_from_afar(fixture, fixture.enter_foreign(foreign));
  REQUIRE(fixture.sim->begin_capture(foreign).ok());
  fixture.enter_foreign(foreign);
  fixture.order.cover(fixture.lock);
  EXPECT(fixture.count(CallKind::kRecordDevice) == 0);
  REQUIRE(fixture.sim->end_capture(foreign).ok());
  EXPECT(fixture.order.forget_captures() && !fixture.order.forget_captures());
  fixture.order.cover(fixture.lock);
  fixture.order.ask(fixture.lock);
  EXPECT(fixture.order.is_over(tag));
}

constexpr Check<Fixture> kIdentity[] = {
    {"the default stream has one entry under both its names",
     the_default_stream_has_one_entry_under_both_its_names},
    {"the default streams of two devices have two entries",
     the_default_streams_of_two_devices_have_two_entries},
    {"a lasting stream is found without a driver call",
     a_lasting_stream_is_found_without_a_driver_call},
    {"the per-thread stream of two threads has two entries",
     the_per_thread_stream_of_two_threads_has_two_entries},
    {"a revived handle has another entry", a_revived_handle_has_another_entry},
    {"a recorded stream that is said to last does so from then on",
     a_recorded_stream_that_is_said_to_last_does_so_from_then_on},
    {"a captured stream has an entry of its own", a_captured_stream_has_an_entry_of_its_own},
    {"what another device's stream uses is over when that device is",
     what_another_devices_stream_uses_is_over_when_that_device_is},
    {"a capture of another library is not spoiled until it must be",
     a_capture_of_another_library_is_not_spoiled_until_it_must_be},
    {"a program of one stream makes no driver call", a_program_of_one_stream_makes_no_driver_call},
    {"the second stream has the first one marked once",
     the_second_stream_has_the_first_one_marked_once},
};
constexpr Check<Two> kFrees[] = {
    {"a stream that lasts keeps its entry", a_stream_that_lasts_keeps_its_entry},
    {"a large free is marked at the free", a_large_free_is_marked_at_the_free},
    {"one unit less is not marked", one_unit_less_is_not_marked},
    {"small frees share the next mark", small_frees_share_the_next_mark},
    {"every free of a stream that may end is marked",
     every_free_of_a_stream_that_may_end_is_marked},
    {"a free of memory of several streams marks each",
     a_free_of_memory_of_several_streams_marks_each},
    {"what is freed in a capture is covered by the first mark after it",
     what_is_freed_in_a_capture_is_covered_by_the_first_mark_after_it},
};
constexpr Check<Nothing> kTables[] = {
    {"small frees are marked after a mebibyte of them",
     small_frees_are_marked_after_a_mebibyte_of_them},
    {"a mark that fails leaves its frees to the next",
     a_mark_that_fails_leaves_its_frees_to_the_next},
};

}  // namespace
}  // namespace streams_claims

void check_streams() {
  run_checks("streams", streams_claims::kIdentity);
  run_checks("frees of several streams", streams_claims::kFrees);
  run_checks("marks", streams_claims::kTables);
}

}  // namespace vramx::units
