// Order between streams: which waits are queued, which are not, and that each is sufficient. The
// simulated device says whether one stream's work really comes before another's.
#include "core/stream_clocks.h"

#include <memory>

#include "driver/sim_driver.h"
#include "units/units.h"

namespace vramx::units {

struct ClockStates {
  friend auto member(ClockStates);
};
template struct Reveal<ClockStates, &StreamClocks::streams_>;

namespace stream_clocks_claims {
namespace {

constexpr Stream kA{11};
constexpr Stream kB{12};
constexpr Stream kC{13};

struct Fixture {
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = kPage, .mode = SimMode::kAccounting});
  StreamClocks clocks{*sim};
  AdaptiveMutex mutex;
  Lock lock{mutex};
  StreamIndex a = clocks.index_of(kA);
  StreamIndex b = clocks.index_of(kB);
  StreamIndex c = clocks.index_of(kC);

  // Work on the stream, and a free behind it.
  Tag work_and_free(StreamIndex index) {
    last_work = sim->submit(clocks.stream_of(index)).value();
    return clocks.stamp(index);
  }
  bool order(StreamIndex reader, const TagSet& tags) {
    return clocks.order(reader, tags, lock).ok();
  }
  bool order(StreamIndex reader, Tag tag) { return order(reader, TagSet(tag)); }
  std::uint64_t records() const { return sim->call_count(CallKind::kRecordEvent); }
  std::uint64_t waits() const { return sim->call_count(CallKind::kWaitEvent); }

  StreamPoint last_work;
};

void a_stream_keeps_its_number(Fixture& fixture) {
  EXPECT(fixture.clocks.index_of(kA) == fixture.a);
  EXPECT(fixture.clocks.stream_of(fixture.b) == kB);
  EXPECT(fixture.a != fixture.b && fixture.b != fixture.c);
}

void a_free_makes_no_driver_call(Fixture& fixture) {
  const Tag first = fixture.clocks.stamp(fixture.a);
  EXPECT(fixture.clocks.stamp(fixture.a).sequence == first.sequence + 1);
  EXPECT(fixture.sim->call_count() == 0);
}

void a_stream_is_ordered_behind_itself(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  EXPECT(fixture.clocks.is_ordered(tag, fixture.a));
  EXPECT(!fixture.clocks.is_ordered(tag, fixture.b));
}

void a_wait_puts_the_readers_work_behind_the_free(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  EXPECT(!fixture.sim->happens_before(fixture.last_work, kB));
  REQUIRE(fixture.order(fixture.b, tag));
  EXPECT(fixture.sim->happens_before(fixture.last_work, kB));
  EXPECT(fixture.clocks.is_ordered(tag, fixture.b));
}

void a_wait_covers_every_earlier_free(Fixture& fixture) {
  const Tag early = fixture.work_and_free(fixture.a);
  REQUIRE(fixture.order(fixture.b, fixture.work_and_free(fixture.a)));
  EXPECT(fixture.clocks.is_ordered(early, fixture.b));
  EXPECT(fixture.order(fixture.b, early));
  EXPECT(fixture.waits() == 1);
}

void a_wait_does_not_cover_a_later_free(Fixture& fixture) {
  REQUIRE(fixture.order(fixture.b, fixture.work_and_free(fixture.a)));
  const Tag later = fixture.work_and_free(fixture.a);
  EXPECT(!fixture.clocks.is_ordered(later, fixture.b));
  REQUIRE(fixture.order(fixture.b, later));
  EXPECT(fixture.sim->happens_before(fixture.last_work, kB));
  EXPECT(fixture.waits() == 2);
}

void a_second_reader_uses_the_event_that_is_there(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  REQUIRE(fixture.order(fixture.b, tag) && fixture.order(fixture.c, tag));
  EXPECT(fixture.records() == 1 && fixture.waits() == 2);
  EXPECT(fixture.sim->happens_before(fixture.last_work, kC));
}

void order_is_passed_on_from_stream_to_stream(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  const StreamPoint work = fixture.last_work;
  REQUIRE(fixture.order(fixture.b, tag));
  REQUIRE(fixture.order(fixture.c, fixture.work_and_free(fixture.b)));
  EXPECT(fixture.clocks.is_ordered(tag, fixture.c));
  EXPECT(fixture.sim->happens_before(work, kC));
}

void every_stream_that_used_a_block_is_waited_for(Fixture& fixture) {
  TagSet tags(fixture.work_and_free(fixture.a));
  const StreamPoint work_on_a = fixture.last_work;
  tags.add(fixture.work_and_free(fixture.b));
  REQUIRE(fixture.order(fixture.c, tags));
  EXPECT(fixture.sim->happens_before(work_on_a, kC));
  EXPECT(fixture.sim->happens_before(fixture.last_work, kC));
}

// An event recorded on a user stream before its last use must not seem to cover that use.
void an_older_event_does_not_cover_a_later_use(Fixture& fixture) {
  REQUIRE(fixture.order(fixture.c, fixture.work_and_free(fixture.b)));
  TagSet tags(fixture.work_and_free(fixture.a));
  tags.add(fixture.work_and_free(fixture.b));
  REQUIRE(fixture.order(fixture.c, tags));
  EXPECT(fixture.sim->happens_before(fixture.last_work, kC));
}

// --- what is complete ---------------------------------------------------------------------------

void nothing_is_complete_before_it_was_asked_for(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  fixture.sim->advance_all();
  EXPECT(!fixture.clocks.is_complete(tag));
  fixture.clocks.settle(StreamClocks::Settle::kQuery, fixture.lock);
  EXPECT(fixture.clocks.is_complete(tag));
}

void a_query_does_not_run_what_is_queued(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  fixture.clocks.settle(StreamClocks::Settle::kQuery, fixture.lock);
  EXPECT(!fixture.clocks.is_complete(tag));
  EXPECT(fixture.sim->call_count(CallKind::kSynchronize) == 0);
}

void a_record_that_has_not_run_is_not_made_anew(Fixture& fixture) {
  const Tag earlier = fixture.work_and_free(fixture.a);
  fixture.clocks.settle(StreamClocks::Settle::kQuery, fixture.lock);
  const Tag later = fixture.work_and_free(fixture.a);
  fixture.clocks.settle(StreamClocks::Settle::kQuery, fixture.lock);
  EXPECT(fixture.records() == 1);
  fixture.sim->advance_all();
  fixture.clocks.settle(StreamClocks::Settle::kQuery, fixture.lock);
  EXPECT(fixture.clocks.is_complete(earlier) && fixture.clocks.is_complete(later));
}

void what_an_idle_stream_waited_for_is_complete(Fixture& fixture) {
  const Tag waited_for = fixture.work_and_free(fixture.a);
  REQUIRE(fixture.order(fixture.b, TagSet(waited_for)));
  const Tag on_b = fixture.work_and_free(fixture.b);
  fixture.sim->advance_all();
  EXPECT(fixture.clocks.ask(TagSet(on_b), fixture.c, 1, fixture.lock));
  EXPECT(fixture.clocks.is_complete(on_b) && fixture.clocks.is_complete(waited_for));
}

void a_question_does_not_break_a_capture(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  fixture.sim->advance_all();
  REQUIRE(fixture.sim->begin_capture(kA).ok());
  fixture.clocks.settle(StreamClocks::Settle::kQuery, fixture.lock);
  EXPECT(!fixture.clocks.is_complete(tag));
  EXPECT(fixture.sim->end_capture(kA).ok());
}

void only_the_streams_that_are_waited_for_are_asked(Fixture& fixture) {
  const Tag on_a = fixture.work_and_free(fixture.a);
  const Tag on_b = fixture.work_and_free(fixture.b);
  const Tag on_c = fixture.work_and_free(fixture.c);
  TagSet tags(on_a);
  tags.add(on_c);
  fixture.sim->advance_all();
  EXPECT(fixture.clocks.ask(tags, fixture.c, 1, fixture.lock));
  EXPECT(fixture.clocks.is_complete(on_a));
  EXPECT(!fixture.clocks.is_complete(on_b) && !fixture.clocks.is_complete(on_c));
}

void a_stream_that_was_not_done_is_left_alone_for_a_while(Fixture& fixture) {
  constexpr std::uint64_t kNow = 1000;
  const TagSet tags(fixture.work_and_free(fixture.a));
  const auto ask = [&](std::uint64_t now) {
    return fixture.clocks.ask(tags, fixture.c, now, fixture.lock);
  };
  EXPECT(!ask(kNow));
  fixture.sim->advance_all();
  const std::uint64_t calls = fixture.sim->call_count();
  EXPECT(!ask(kNow + StreamClocks::kPause - 1));
  EXPECT(fixture.sim->call_count() == calls);
  EXPECT(ask(kNow + StreamClocks::kPause));
}

void a_count_that_begins_anew_ends_the_pause(Fixture& fixture) {
  const TagSet tags(fixture.work_and_free(fixture.a));
  EXPECT(!fixture.clocks.ask(tags, fixture.c, 1000, fixture.lock));
  fixture.sim->advance_all();
  EXPECT(fixture.clocks.ask(tags, fixture.c, 1, fixture.lock));
}

void a_wait_of_the_host_completes_every_stream(Fixture& fixture) {
  const Tag on_a = fixture.work_and_free(fixture.a);
  const Tag on_b = fixture.work_and_free(fixture.b);
  fixture.clocks.settle(StreamClocks::Settle::kWait, fixture.lock);
  EXPECT(fixture.clocks.is_complete(on_a) && fixture.clocks.is_complete(on_b));
  EXPECT(fixture.clocks.is_ordered(on_a, fixture.c));
}

// --- captures, destroyed streams, failures ------------------------------------------------------

void a_capturing_stream_is_not_waited_for(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  REQUIRE(fixture.sim->begin_capture(kA).ok());
  EXPECT(!fixture.order(fixture.b, tag));
  EXPECT(!fixture.clocks.is_ordered(tag, fixture.b));
  EXPECT(fixture.sim->end_capture(kA).ok());
}

void a_capturing_stream_does_not_wait(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  REQUIRE(fixture.sim->begin_capture(kB).ok());
  EXPECT(!fixture.order(fixture.b, tag));
  EXPECT(!fixture.sim->happens_before(fixture.last_work, kB));
  EXPECT(fixture.sim->end_capture(kB).ok());
}

void a_destroyed_streams_frees_can_still_be_waited_for(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  REQUIRE(fixture.clocks.forget(kA, fixture.lock).ok());
  REQUIRE(fixture.sim->destroy_stream(kA).ok());
  EXPECT(fixture.order(fixture.b, tag));
  EXPECT(fixture.sim->happens_before(fixture.last_work, kB));
}

void a_stream_of_the_same_name_is_another_stream(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  REQUIRE(fixture.clocks.forget(kA, fixture.lock).ok());
  const StreamIndex reborn = fixture.clocks.index_of(kA);
  EXPECT(reborn != fixture.a);
  EXPECT(!fixture.clocks.is_ordered(tag, reborn));
}

void a_stream_that_cannot_be_recorded_on_is_not_forgotten(Fixture& fixture) {
  fixture.work_and_free(fixture.a);
  fixture.sim->fail_call(CallKind::kRecordEvent, 1, StatusCode::kDriverError);
  EXPECT(!fixture.clocks.forget(kA, fixture.lock).ok());
  EXPECT(fixture.clocks.index_of(kA) == fixture.a);
}

void a_call_that_fails_orders_nothing(Fixture& fixture) {
  for (const CallKind kind :
       {CallKind::kCreateEvent, CallKind::kRecordEvent, CallKind::kWaitEvent}) {
    const Tag tag = fixture.work_and_free(fixture.a);
    fixture.sim->fail_call(kind, 1, StatusCode::kDriverError);
    EXPECT(!fixture.order(fixture.b, tag));
    EXPECT(!fixture.clocks.is_ordered(tag, fixture.b));
    EXPECT(fixture.lock.is_held());
    EXPECT(fixture.order(fixture.b, tag));
  }
  EXPECT(fixture.sim->faults_fired() == 3);
}

void events_are_destroyed_with_the_clocks(Fixture& fixture) {
  {
    StreamClocks clocks(*fixture.sim);
    const Tag tag = clocks.stamp(clocks.index_of(kA));
    REQUIRE(clocks.order(clocks.index_of(kB), TagSet(tag), fixture.lock).ok());
    EXPECT(fixture.sim->live_events() == 1);
  }
  EXPECT(fixture.sim->live_events() == 0);
}

// --- planted defects ----------------------------------------------------------------------------

void clock_1_is_named_where_a_tag_lies_in_the_future(Fixture& fixture) {
  const Tag tag = fixture.clocks.stamp(fixture.a);
  EXPECT(fixture.clocks.check(TagSet(tag)).empty());
  EXPECT(starts_with(fixture.clocks.check(TagSet(Tag{fixture.a, tag.sequence + 1})), "clock 1"));
  EXPECT(starts_with(fixture.clocks.check(TagSet(Tag{99, 1})), "clock 1"));
}

void clock_2_is_named_where_more_is_known_than_was_done(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  REQUIRE(fixture.order(fixture.b, tag));
  EXPECT(fixture.clocks.check(TagSet()).empty());
  auto& known = (fixture.clocks.*member(ClockStates{}))[fixture.b].known;
  REQUIRE(known.size() > fixture.a);
  ++known[fixture.a];
  EXPECT(starts_with(fixture.clocks.check(TagSet()), "clock 2"));
}

constexpr Check<Fixture> kChecks[] = {
    {"a stream keeps its number", a_stream_keeps_its_number},
    {"a free makes no driver call", a_free_makes_no_driver_call},
    {"a stream is ordered behind itself", a_stream_is_ordered_behind_itself},
    {"a wait puts the reader's work behind the free", a_wait_puts_the_readers_work_behind_the_free},
    {"a wait covers every earlier free", a_wait_covers_every_earlier_free},
    {"a wait does not cover a later free", a_wait_does_not_cover_a_later_free},
    {"a second reader uses the event that is there", a_second_reader_uses_the_event_that_is_there},
    {"order is passed on from stream to stream", order_is_passed_on_from_stream_to_stream},
    {"every stream that used a block is waited for", every_stream_that_used_a_block_is_waited_for},
    {"an older event does not cover a later use", an_older_event_does_not_cover_a_later_use},
    {"nothing is complete before it was asked for", nothing_is_complete_before_it_was_asked_for},
    {"a query does not run what is queued", a_query_does_not_run_what_is_queued},
    {"a record that has not run is not made anew", a_record_that_has_not_run_is_not_made_anew},
    {"what an idle stream waited for is complete", what_an_idle_stream_waited_for_is_complete},
    {"a question does not break a capture", a_question_does_not_break_a_capture},
    {"only the streams that are waited for are asked",
     only_the_streams_that_are_waited_for_are_asked},
    {"a stream that was not done is left alone for a while",
     a_stream_that_was_not_done_is_left_alone_for_a_while},
    {"a count that begins anew ends the pause", a_count_that_begins_anew_ends_the_pause},
    {"a wait of the host completes every stream", a_wait_of_the_host_completes_every_stream},
    {"a capturing stream is not waited for", a_capturing_stream_is_not_waited_for},
    {"a capturing stream does not wait", a_capturing_stream_does_not_wait},
    {"a destroyed stream's frees can still be waited for",
     a_destroyed_streams_frees_can_still_be_waited_for},
    {"a stream of the same name is another stream", a_stream_of_the_same_name_is_another_stream},
    {"a stream that cannot be recorded on is not forgotten",
     a_stream_that_cannot_be_recorded_on_is_not_forgotten},
    {"a call that fails orders nothing", a_call_that_fails_orders_nothing},
    {"events are destroyed with the clocks", events_are_destroyed_with_the_clocks},
    {"clock 1 is named where a tag lies in the future",
     clock_1_is_named_where_a_tag_lies_in_the_future},
    {"clock 2 is named where more is known than was done",
     clock_2_is_named_where_more_is_known_than_was_done},
};

}  // namespace
}  // namespace stream_clocks_claims

void check_stream_clocks() { run_checks("stream clocks", stream_clocks_claims::kChecks); }

}  // namespace vramx::units
