// Streams and their frees: which stream an entry is, and when a free leaves a mark.
#include "units/streams.h"

#include <thread>

namespace vramx::units::streams_claims {

using Fixture = StreamFixture;

// Two streams, so that frees are marked.
struct Two : StreamFixture {
  StreamIndex a = enter(on_a);
  StreamIndex b = enter(on_b);
};

// --- identity -----------------------------------------------------------------------------------

CHECK(Two, a_stream_that_lasts_keeps_its_entry) {
  EXPECT(enter(on_a) == a && enter(on_b) == b);
  EXPECT(a != b && order.count() == 2);
  EXPECT(order.handle_of(b) == on_b);
}

CHECK(Fixture, the_default_stream_has_one_entry_under_both_its_names) {
  EXPECT(enter(Stream::kLegacy) == enter(Stream::kDefault));
  EXPECT(order.is_single());
}

CHECK(Fixture, the_default_streams_of_two_devices_have_two_entries) {
  const StreamIndex here = enter(Stream::kDefault);
  EXPECT(order.index_of({Stream::kDefault, 1}, false) != here);
  EXPECT(enter(Stream::kDefault) == here);
}

CHECK(Fixture, a_lasting_stream_is_found_without_a_driver_call) {
  enter(on_a);
  enter(on_a);
  EXPECT(sim->call_count() == 0);
}

CHECK(Fixture, the_per_thread_stream_of_two_threads_has_two_entries) {
  const StreamIndex here = enter(Stream::kPerThread);
  StreamIndex there = here;
  std::thread([&] { there = enter(Stream::kPerThread); }).join();
  EXPECT(there != here && enter(Stream::kPerThread) == here);
}

CHECK(Fixture, a_revived_handle_has_another_entry) {
  const Stream foreign = sim->create_stream(0);
  const StreamIndex first = enter_foreign(foreign);
  order.hold(first);
  REQUIRE(sim->destroy_stream(foreign).ok() && sim->revive_stream(foreign).ok());
  EXPECT(enter_foreign(foreign) != first);
}

CHECK(Fixture, a_recorded_stream_that_is_said_to_last_does_so_from_then_on) {
  const Stream pooled = sim->create_stream(0);
  const StreamIndex index = order.index_of({pooled, 0}, true);
  EXPECT(enter(pooled) == index && count(CallKind::kStreamId) == 0);
}

// The driver numbers no stream that is captured.
CHECK(Fixture, a_captured_stream_has_an_entry_of_its_own) {
  const Stream foreign = sim->create_stream(0);
  const StreamIndex before = enter_foreign(foreign);
  REQUIRE(sim->begin_capture(foreign).ok());
  const StreamIndex during = enter_foreign(foreign);
  EXPECT(during != before && enter_foreign(foreign) == during);
  REQUIRE(sim->end_capture(foreign).ok());
  EXPECT(enter_foreign(foreign) == before);
}

// --- marks --------------------------------------------------------------------------------------

CHECK(Fixture, a_program_of_one_stream_makes_no_driver_call) {
  const StreamIndex only = enter(Stream::kDefault);
  for (int i = 0; i < 5; ++i) EXPECT(free(only, 1_GiB).number == 1);
  EXPECT(sim->call_count() == 0);
}

CHECK(Fixture, the_second_stream_has_the_first_one_marked_once) {
  const StreamIndex first = enter(Stream::kDefault);
  const Tag before = work_and_free(first);
  enter(on_a);
  EXPECT(record_count() == 1 && order.has_marks(TagSet(before), enter(on_a)));
  enter(on_b);
  EXPECT(record_count() == 1);
}

CHECK(Two, a_large_free_is_marked_at_the_free) {
  const std::uint64_t records = record_count();
  const Tag tag = free(a, kMarkedFree);
  EXPECT(record_count() == records + 1);
  EXPECT(order.has_marks(TagSet(tag), b));
}

CHECK(Two, one_unit_less_is_not_marked) {
  const std::uint64_t records = record_count();
  const Tag tag = free(a, kMarkedFree - kBlockUnit);
  EXPECT(record_count() == records && !order.has_marks(TagSet(tag), b));
}

// Others want a buffer of that size as soon as it is over.
CHECK(Two, a_large_free_is_of_no_group_with_others) {
  const auto group_of = [&](Bytes size) { return free(a, size).number / kTagGroup; };
  const std::uint64_t small = group_of(kMarkedFree), large = group_of(64_MiB);
  EXPECT(group_of(kMarkedFree) != large && small != large);
  EXPECT(group_of(64_MiB) != group_of(64_MiB));
  EXPECT(group_of(kMarkedFree) == group_of(kMarkedFree));
}

// As of the room that is left: a mark for each 4096th, of 1 to 32 MiB.
CHECK(Two, the_more_room_the_fewer_frees_are_marked) {
  const auto marks_of = [&](Bytes room) {
    order.note_room(room);
    const std::uint64_t before = record_count();
    for (int i = 0; i < 64; ++i) free(a, kMarkedFree);
    return record_count() - before;
  };
  EXPECT(marks_of({}) == 64 && marks_of(4_GiB) == 64);
  EXPECT(marks_of(32_GiB) == 8);
  EXPECT(marks_of(1024_GiB) == 2);
}

CHECK(Two, small_frees_share_the_next_mark) {
  const Tag first = free(a, kSmallFree);
  const Tag second = free(a, kSmallFree);
  const Tag marked = free(a, kMarkedFree);
  EXPECT(first == second && second == marked);
  EXPECT(free(a, kSmallFree).number == marked.number + 1);
}

// Each counts for 4 KiB at least.
CHECK(Nothing, small_frees_are_marked_after_a_mebibyte_of_them) {
  const struct {
    Bytes size;
    int frees;
  } kCases[] = {{512_B, 256}, {4_KiB, 256}, {64_KiB, 16}, {512_KiB, 2}};
  for (const auto& each : kCases) {
    Two fixture;
    const std::uint64_t records = fixture.record_count();
    for (int i = 0; i < each.frees - 1; ++i) fixture.free(fixture.a, each.size);
    EXPECT(fixture.record_count() == records);
    fixture.free(fixture.a, each.size);
    EXPECT(fixture.record_count() == records + 1);
    fixture.free(fixture.a, each.size);
    EXPECT(fixture.record_count() == records + 1);
  }
}

CHECK(Two, every_free_of_a_stream_that_may_end_is_marked) {
  const StreamIndex foreign = enter_foreign(sim->create_stream(0));
  const std::uint64_t records = record_count();
  free(foreign, kSmallFree);
  EXPECT(record_count() == records + 1);
  order.note_askers(false);
  free(foreign, kSmallFree);
  EXPECT(record_count() == records + 2);
  free(a, kMarkedFree);
  EXPECT(record_count() == records + 2);
}

CHECK(Two, tags_of_several_streams_have_marks_where_each_does) {
  TagSet tags(order.mark(a, lock));
  tags.add(order.mark(b, lock));
  EXPECT(tags.size() == 2 && tags[0].stream != tags[1].stream);
  EXPECT(order.has_marks(tags, enter(Stream::kDefault)));
}

CHECK(Nothing, a_mark_that_fails_leaves_its_frees_to_the_next) {
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

// A request that finds nothing may wait for it.
CHECK(Two, a_mark_that_is_being_recorded_is_one_to_wait_for) {
  order.ask(lock);
  bool was_unfinished = false;
  driver.at_mark = [&] { was_unfinished = order.has_unfinished(); };
  EXPECT(!order.has_unfinished());
  free(a);
  EXPECT(was_unfinished && order.has_unfinished());
  order.ask(lock);
  EXPECT(!order.has_unfinished());
}

// --- captures -----------------------------------------------------------------------------------

// It may begin between the driver's answer that there is none and the mark.
CHECK(Two, a_stream_of_another_thread_is_not_marked_while_a_graph_is_captured) {
  known.is_capturing = true;
  const std::uint64_t records = record_count();
  const Tag tag = free(a);
  order.ask(lock);
  EXPECT(record_count() == records && !order.has_marks(TagSet(tag), b));
  known.is_capturing = false;
  order.ask(lock);
  EXPECT(order.is_over(tag) && record_count() == records + 1 && known.calls == 0);
}

CHECK(Two, the_stream_that_the_thread_works_on_is_marked_beside_a_capture) {
  known.is_capturing = true;
  known.current = on_a;
  const Tag tag = free(a);
  EXPECT(order.has_marks(TagSet(tag), b) && known.calls == 0);
}

CHECK(Two, a_device_is_neither_marked_nor_waited_for_while_a_graph_is_captured) {
  const StreamIndex foreign = enter_foreign(sim->create_stream(0));
  known.current = Stream::kDefault;  // so that it may be gone
  const Tag tag = free(foreign);
  known.is_capturing = true;
  order.cover(lock);
  order.settle(lock);
  EXPECT(!order.is_over(tag) && known.calls == 0);
  EXPECT(sim->call_count(CallKind::kRecordDevice) + sim->call_count(CallKind::kSynchronize) == 0);
  known.is_capturing = false;
  order.settle(lock);
  EXPECT(order.is_over(tag) && known.calls == 0);
}

CHECK(Two, a_capture_that_begins_is_held_off_by_a_mark_that_is_being_recorded) {
  int calls = 0;
  driver.at_mark = [&] { calls = known.calls; };
  free(a);
  EXPECT(calls == 1 && known.calls == 0);
}

CHECK(Two, what_is_freed_in_a_capture_is_covered_by_the_first_mark_after_it) {
  REQUIRE(sim->begin_capture(on_a).ok());
  const Tag tag = free(a);
  EXPECT(!order.has_marks(TagSet(tag), b));
  sim->advance_all();
  order.ask(lock);
  EXPECT(!order.is_over(tag));
  REQUIRE(sim->end_capture(on_a).ok());
  free(a);
  EXPECT(order.has_marks(TagSet(tag), b));
  order.ask(lock);
  EXPECT(order.is_over(tag));
}

// --- devices ------------------------------------------------------------------------------------

// A free on a stream that the thread does not work on, so that only its device can be marked.
Tag free_from_afar(Fixture& fixture, StreamIndex index) {
  fixture.known.current = Stream::kDefault;
  return fixture.free(index);
}

CHECK(Fixture, what_another_devices_stream_uses_is_over_when_that_device_is) {
  enter(on_a);
  const Stream there = sim->create_stream(1);
  const StreamIndex index = order.index_of({there, 1}, false);
  REQUIRE(sim->submit(StreamName{there, 1}).ok());
  const Tag tag = free_from_afar(*this, index);
  order.cover(lock);
  order.ask(lock);
  EXPECT(!order.is_over(tag) && order.has_marks(TagSet(tag), enter(on_a)));
  sim->advance_all();
  order.ask(lock);
  EXPECT(order.is_over(tag));
}

// A program that makes a stream for each request and destroys it would reserve more for each.
CHECK(Fixture, what_destroyed_streams_leave_is_over_without_being_asked_for_once_it_is_much) {
  enter(on_a);
  const StreamIndex used = enter_foreign(sim->create_stream(0));
  const Tag little = free_from_afar(*this, used);
  order.ask(lock);
  EXPECT(count(CallKind::kRecordDevice) == 0 && !order.is_over(little));
  order.count_free(used, 16_MiB);
  const Stream ended = sim->create_stream(0);
  known.current = Stream::kDefault;
  const Tag much = free(enter(ended), 16_MiB);
  REQUIRE(sim->destroy_stream(ended).ok());
  order.ask(lock);
  EXPECT(count(CallKind::kRecordDevice) == 1);
  EXPECT(order.is_over(little) && order.is_over(much));
}

// Its event is used again for the next one.
CHECK(Fixture, an_answer_about_a_device_is_not_for_its_next_mark) {
  enter(on_a);
  const StreamIndex foreign = enter_foreign(sim->create_stream(0));
  order.ask(lock);
  free_from_afar(*this, foreign);
  order.cover(lock);
  Tag later;
  when_asked([&] {
    order.ask(lock);
    REQUIRE(sim->submit(order.name_of(foreign)).ok());
    later = free_from_afar(*this, foreign);
    order.cover(lock);
  });
  order.ask(lock);
  EXPECT(count(CallKind::kRecordDevice) == 2 && count(CallKind::kCreateEvent) == 1);
  EXPECT(!order.is_over(later));
  sim->advance_all();
  order.ask(lock);
  EXPECT(order.is_over(later));
}

CHECK(Fixture, a_capture_of_another_library_is_not_spoiled_until_it_must_be) {
  enter(on_a);
  const Stream foreign = sim->create_stream(0);
  const Tag tag = free_from_afar(*this, enter_foreign(foreign));
  REQUIRE(sim->begin_capture(foreign).ok());
  enter_foreign(foreign);
  order.cover(lock);
  EXPECT(count(CallKind::kRecordDevice) == 0);
  REQUIRE(sim->end_capture(foreign).ok());
  EXPECT(order.forget_captures() && !order.forget_captures());
  order.cover(lock);
  order.ask(lock);
  EXPECT(order.is_over(tag));
}

}  // namespace vramx::units::streams_claims
