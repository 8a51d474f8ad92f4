// Order between streams: what is known without a driver call, what a reader has to wait for, and
// that the wait is enough and not too long. The simulated device says what really comes before
// what.
#include <utility>
#include <vector>

#include "units/streams.h"

namespace vramx::units {

struct OrderStates {
  friend auto member(OrderStates);
};
template struct Reveal<OrderStates, &StreamOrder::streams_>;

namespace stream_order_claims {
namespace {

struct Fixture : StreamFixture {
  StreamIndex first = enter(Stream::kDefault);
  StreamIndex a = enter(on_a);
  StreamIndex b = enter(on_b);

  std::vector<StreamWait> waits_for(const TagSet& tags, StreamIndex reader) const {
    std::vector<StreamWait> waits;
    order.add_waits(tags, reader, &waits);
    return waits;
  }
  bool is_behind(StreamPoint point, StreamIndex reader) const {
    return sim->happens_before(point, order.name_of(reader));
  }
};

// --- questions ----------------------------------------------------------------------------------

void questions_make_no_driver_call(Fixture& fixture) {
  const TagSet tags(fixture.work_and_free(fixture.a));
  const std::uint64_t calls = fixture.sim->call_count();
  EXPECT(fixture.order.is_ordered(tags, fixture.a) && !fixture.order.is_ordered(tags, fixture.b));
  EXPECT(!fixture.order.is_over(tags) && fixture.order.has_marks(tags, fixture.b));
  EXPECT(fixture.order.has_unfinished() && fixture.waits_for(tags, fixture.b).size() == 1);
  EXPECT(fixture.sim->call_count() == calls);
}

void nothing_is_over_before_it_was_asked_for(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  fixture.sim->advance_all();
  EXPECT(!fixture.order.is_over(tag));
  fixture.order.ask(fixture.lock);
  EXPECT(fixture.order.is_over(tag) && fixture.order.is_ordered(tag, fixture.b));
}

void a_set_is_ordered_when_all_of_it_is(Fixture& fixture) {
  TagSet tags(fixture.work_and_free(fixture.a));
  tags.add(fixture.work_and_free(fixture.b));
  EXPECT(!fixture.order.is_ordered(tags, fixture.a) && !fixture.order.is_ordered(tags, fixture.b));
  fixture.wait(fixture.a, tags);
  EXPECT(fixture.order.is_ordered(tags, fixture.a) && !fixture.order.is_ordered(tags, fixture.b));
}

// --- waits --------------------------------------------------------------------------------------

void a_wait_puts_the_readers_work_behind_the_free(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  EXPECT(!fixture.is_behind(fixture.work, fixture.b));
  fixture.wait(fixture.b, TagSet(tag));
  EXPECT(fixture.is_behind(fixture.work, fixture.b) && fixture.order.is_ordered(tag, fixture.b));
}

void a_wait_is_not_for_what_was_queued_after_the_free(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  const StreamPoint later = fixture.sim->submit(fixture.on_a).value();
  const std::uint64_t records = fixture.records();
  fixture.wait(fixture.b, TagSet(tag));
  EXPECT(fixture.is_behind(fixture.work, fixture.b) && !fixture.is_behind(later, fixture.b));
  EXPECT(fixture.records() == records);
}

void a_wait_names_the_first_mark_that_covers_the_tag(Fixture& fixture) {
  const Tag small = fixture.free(fixture.a, kSmallFree);
  const Tag marks[] = {fixture.free(fixture.a), fixture.free(fixture.a), fixture.free(fixture.a)};
  const auto number = [&](const Tag& tag) {
    return fixture.waits_for(TagSet(tag), fixture.b).front().number;
  };
  EXPECT(number(small) == marks[0].number && number(marks[1]) == marks[1].number);
}

void what_no_mark_covers_cannot_be_waited_for(Fixture& fixture) {
  const Tag tag = fixture.free(fixture.a, kSmallFree);
  EXPECT(!fixture.order.has_marks(TagSet(tag), fixture.b));
  EXPECT(fixture.order.has_marks(TagSet(tag), fixture.a));  // has no need to
}

void of_several_tags_of_one_donor_the_latest_is_waited_for(Fixture& fixture) {
  const Tag early = fixture.free(fixture.a);
  const Tag late = fixture.free(fixture.a);
  for (const auto& [first, second] : {std::pair{early, late}, std::pair{late, early}}) {
    std::vector<StreamWait> waits;
    fixture.order.add_waits(TagSet(first), fixture.b, &waits);
    fixture.order.add_waits(TagSet(second), fixture.b, &waits);
    REQUIRE(waits.size() == 1);
    EXPECT(waits[0].number == late.number);
  }
}

void a_wait_covers_every_earlier_free_and_no_later_one(Fixture& fixture) {
  const Tag early = fixture.work_and_free(fixture.a);
  fixture.wait(fixture.b, TagSet(fixture.work_and_free(fixture.a)));
  const Tag late = fixture.work_and_free(fixture.a);
  EXPECT(fixture.order.is_ordered(early, fixture.b) &&
         fixture.waits_for(TagSet(early), fixture.b).empty());
  EXPECT(!fixture.order.is_ordered(late, fixture.b));
}

void two_readers_wait_for_one_mark(Fixture& fixture) {
  const Tag tag = fixture.work_and_free(fixture.a);
  const std::uint64_t records = fixture.records();
  fixture.wait(fixture.b, TagSet(tag));
  fixture.wait(fixture.first, TagSet(tag));
  EXPECT(fixture.records() == records && fixture.count(CallKind::kWaitEvent) == 2);
  EXPECT(fixture.is_behind(fixture.work, fixture.first));
}

// --- many marks ---------------------------------------------------------------------------------

constexpr std::size_t kMarks = 1024;

// Each of the frees has its own item of work before it.
std::vector<std::pair<Tag, StreamPoint>> free_often(Fixture& fixture, std::size_t count) {
  std::vector<std::pair<Tag, StreamPoint>> freed;
  for (std::size_t i = 0; i < count; ++i) {
    const Tag tag = fixture.work_and_free(fixture.a);
    freed.push_back({tag, fixture.work});
  }
  return freed;
}

std::size_t live_marks(Fixture& fixture) {
  return (fixture.order.*member(OrderStates{}))[fixture.a].marks.size();
}

void a_stream_that_is_far_behind_keeps_every_second_mark(Fixture& fixture) {
  free_often(fixture, kMarks);
  EXPECT(live_marks(fixture) == kMarks);
  free_often(fixture, 1);
  EXPECT(live_marks(fixture) == kMarks / 2 + 1 && fixture.order.check().empty());
}

void every_free_is_waited_for_after_marks_were_thinned_out(Fixture& fixture) {
  const auto freed = free_often(fixture, kMarks + 1);
  for (const std::size_t which : {std::size_t{0}, std::size_t{2}, kMarks / 2, kMarks}) {
    const auto waits = fixture.waits_for(TagSet(freed[which].first), fixture.b);
    REQUIRE(waits.size() == 1);
    EXPECT(waits[0].number >= freed[which].first.number);
    EXPECT(waits[0].number <= freed[which].first.number + 1);
    fixture.wait(fixture.b, TagSet(freed[which].first));
    EXPECT(fixture.is_behind(freed[which].second, fixture.b));
  }
}

void nothing_is_over_early_after_marks_were_thinned_out(Fixture& fixture) {
  const auto freed = free_often(fixture, kMarks + 1);
  for (std::size_t done = 0; done < 8; ++done) {
    fixture.sim->advance(fixture.on_a, 1);
    fixture.order.ask(fixture.lock);
    EXPECT(!fixture.order.is_over(freed[done + 1].first));
  }
  fixture.sim->advance_all();
  fixture.order.ask(fixture.lock);
  EXPECT(fixture.order.is_over(freed.back().first) && live_marks(fixture) == 0);
}

// --- planted defects ----------------------------------------------------------------------------

void order_1_is_named_where_a_tag_lies_in_the_future(Fixture& fixture) {
  const Tag tag = fixture.free(fixture.a, kSmallFree);
  EXPECT(fixture.order.check(TagSet(tag)).empty());
  EXPECT(starts_with(fixture.order.check(TagSet(Tag{fixture.a, tag.number + 1})), "order 1"));
  EXPECT(starts_with(fixture.order.check(TagSet(Tag{99, 1})), "order 1"));
}

void order_2_is_named_where_marks_are_out_of_order(Fixture& fixture) {
  fixture.free(fixture.a);
  fixture.free(fixture.a);
  EXPECT(fixture.order.check().empty());
  auto& marks = (fixture.order.*member(OrderStates{}))[fixture.a].marks;
  std::swap(marks[0].number, marks[1].number);
  EXPECT(starts_with(fixture.order.check(), "order 2"));
}

void order_3_is_named_where_more_is_known_than_was_marked(Fixture& fixture) {
  fixture.wait(fixture.b, TagSet(fixture.free(fixture.a)));
  EXPECT(fixture.order.check().empty());
  ++(fixture.order.*member(OrderStates{}))[fixture.b].known[fixture.a];
  EXPECT(starts_with(fixture.order.check(), "order 3"));
}

constexpr Check<Fixture> kChecks[] = {
    {"questions make no driver call", questions_make_no_driver_call},
    {"nothing is over before it was asked for", nothing_is_over_before_it_was_asked_for},
    {"a set is ordered when all of it is", a_set_is_ordered_when_all_of_it_is},
    {"a wait puts the reader's work behind the free", a_wait_puts_the_readers_work_behind_the_free},
    {"a wait is not for what was queued after the free",
     a_wait_is_not_for_what_was_queued_after_the_free},
    {"a wait names the first mark that covers the tag",
     a_wait_names_the_first_mark_that_covers_the_tag},
    {"what no mark covers cannot be waited for", what_no_mark_covers_cannot_be_waited_for},
    {"of several tags of one donor the latest is waited for",
     of_several_tags_of_one_donor_the_latest_is_waited_for},
    {"a wait covers every earlier free and no later one",
     a_wait_covers_every_earlier_free_and_no_later_one},
    {"two readers wait for one mark", two_readers_wait_for_one_mark},
    {"a stream that is far behind keeps every second mark",
     a_stream_that_is_far_behind_keeps_every_second_mark},
    {"every free is waited for after marks were thinned out",
     every_free_is_waited_for_after_marks_were_thinned_out},
    {"nothing is over early after marks were thinned out",
     nothing_is_over_early_after_marks_were_thinned_out},
    {"order 1 is named where a tag lies in the future",
     order_1_is_named_where_a_tag_lies_in_the_future},
    {"order 2 is named where marks are out of order",
     order_2_is_named_where_marks_are_out_of_order},
    {"order 3 is named where more is known than was marked",
     order_3_is_named_where_more_is_known_than_was_marked},
};

}  // namespace
}  // namespace stream_order_claims

void check_stream_order() { run_checks("stream order", stream_order_claims::kChecks); }

}  // namespace vramx::units
