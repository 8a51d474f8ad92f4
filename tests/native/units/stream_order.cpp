// Order between streams: what is known without a driver call, what a reader has to wait for, and
// that the wait is enough and not too long. The simulated device says what really comes before
// what.
#include <utility>
#include <vector>

#include "units/streams.h"

namespace vramx::units::stream_order_claims {

REVEAL(OrderStates, &StreamOrder::streams_);

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

CHECK(Fixture, questions_make_no_driver_call) {
  const TagSet tags(work_and_free(a));
  const std::uint64_t calls = sim->call_count();
  EXPECT(order.is_ordered(tags, a) && !order.is_ordered(tags, b));
  EXPECT(!order.is_over(tags) && order.has_marks(tags, b));
  EXPECT(order.has_unfinished() && waits_for(tags, b).size() == 1);
  EXPECT(sim->call_count() == calls);
}

CHECK(Fixture, nothing_is_over_before_it_was_asked_for) {
  const Tag tag = work_and_free(a);
  sim->advance_all();
  EXPECT(!order.is_over(tag));
  order.ask(lock);
  EXPECT(order.is_over(tag) && order.is_ordered(tag, b));
}

CHECK(Fixture, a_set_is_ordered_when_all_of_it_is) {
  TagSet tags(work_and_free(a));
  tags.add(work_and_free(b));
  EXPECT(!order.is_ordered(tags, a) && !order.is_ordered(tags, b));
  wait(a, tags);
  EXPECT(order.is_ordered(tags, a) && !order.is_ordered(tags, b));
}

// --- waits --------------------------------------------------------------------------------------

CHECK(Fixture, a_wait_puts_the_readers_work_behind_the_free) {
  const Tag tag = work_and_free(a);
  EXPECT(!is_behind(work, b));
  wait(b, TagSet(tag));
  EXPECT(is_behind(work, b) && order.is_ordered(tag, b));
}

CHECK(Fixture, a_wait_is_not_for_what_was_queued_after_the_free) {
  const Tag tag = work_and_free(a);
  const StreamPoint later = sim->submit(on_a).value();
  const std::uint64_t records = record_count();
  wait(b, TagSet(tag));
  EXPECT(is_behind(work, b) && !is_behind(later, b));
  EXPECT(record_count() == records);
}

CHECK(Fixture, a_wait_names_the_first_mark_that_covers_the_tag) {
  const Tag small = free(a, kSmallFree);
  const Tag marks[] = {free(a), free(a), free(a)};
  const auto number = [&](const Tag& tag) { return waits_for(TagSet(tag), b).front().number; };
  EXPECT(number(small) == marks[0].number && number(marks[1]) == marks[1].number);
}

CHECK(Fixture, what_no_mark_covers_cannot_be_waited_for) {
  const Tag tag = free(a, kSmallFree);
  EXPECT(!order.has_marks(TagSet(tag), b));
  EXPECT(order.has_marks(TagSet(tag), a));  // has no need to
}

CHECK(Fixture, of_several_tags_of_one_donor_the_latest_is_waited_for) {
  const Tag early = free(a);
  const Tag late = free(a);
  for (const auto& [one, other] : {std::pair{early, late}, std::pair{late, early}}) {
    std::vector<StreamWait> waits;
    order.add_waits(TagSet(one), b, &waits);
    order.add_waits(TagSet(other), b, &waits);
    REQUIRE(waits.size() == 1);
    EXPECT(waits[0].number == late.number);
  }
}

CHECK(Fixture, a_wait_covers_every_earlier_free_and_no_later_one) {
  const Tag early = work_and_free(a);
  wait(b, TagSet(work_and_free(a)));
  const Tag late = work_and_free(a);
  EXPECT(order.is_ordered(early, b) && waits_for(TagSet(early), b).empty());
  EXPECT(!order.is_ordered(late, b));
}

CHECK(Fixture, two_readers_wait_for_one_mark) {
  const Tag tag = work_and_free(a);
  const std::uint64_t records = record_count();
  wait(b, TagSet(tag));
  wait(first, TagSet(tag));
  EXPECT(record_count() == records && count(CallKind::kWaitEvent) == 2);
  EXPECT(is_behind(work, first));
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

CHECK(Fixture, a_stream_that_is_far_behind_keeps_every_second_mark) {
  free_often(*this, kMarks);
  EXPECT(live_marks(*this) == kMarks);
  free_often(*this, 1);
  EXPECT(live_marks(*this) == kMarks / 2 + 1 && order.check().empty());
}

CHECK(Fixture, every_free_is_waited_for_after_marks_were_thinned_out) {
  const auto freed = free_often(*this, kMarks + 1);
  for (const std::size_t which : {std::size_t{0}, std::size_t{2}, kMarks / 2, kMarks}) {
    const auto waits = waits_for(TagSet(freed[which].first), b);
    REQUIRE(waits.size() == 1);
    EXPECT(waits[0].number >= freed[which].first.number);
    EXPECT(waits[0].number <= freed[which].first.number + 1);
    wait(b, TagSet(freed[which].first));
    EXPECT(is_behind(freed[which].second, b));
  }
}

CHECK(Fixture, nothing_is_over_early_after_marks_were_thinned_out) {
  const auto freed = free_often(*this, kMarks + 1);
  for (std::size_t done = 0; done < 8; ++done) {
    sim->advance(on_a, 1);
    order.ask(lock);
    EXPECT(!order.is_over(freed[done + 1].first));
  }
  sim->advance_all();
  order.ask(lock);
  EXPECT(order.is_over(freed.back().first) && live_marks(*this) == 0);
}

CHECK(Fixture, no_event_is_used_again_while_a_wait_for_it_is_under_way) {
  const TagSet tags(work_and_free(a));
  const Event waited_for = waits_for(tags, b).at(0).event;
  order.begin_waits();
  sim->advance_all();
  order.ask(lock);
  EXPECT(order.is_over(tags));
  EXPECT(waits_for(TagSet(work_and_free(a)), b).at(0).event != waited_for);
  order.end_waits();
  EXPECT(waits_for(TagSet(work_and_free(b)), a).at(0).event == waited_for);
}

// Of each two marks that are thinned out the event of one goes to another stream, which is done.
CHECK(Fixture, an_answer_is_not_for_a_mark_whose_event_was_used_again) {
  const auto freed = free_often(*this, kMarks);
  when_asked([this] {
    free_often(*this, 1);
    for (std::size_t i = 0; i < kMarks / 2; ++i) free(b);
  });
  order.ask(lock);
  for (const auto& [tag, before] : freed) EXPECT(!order.is_over(tag));
}

// --- planted defects ----------------------------------------------------------------------------

CHECK(Fixture, order_1_is_named_where_a_tag_lies_in_the_future) {
  const Tag tag = free(a, kSmallFree);
  EXPECT(order.check(TagSet(tag)).empty());
  EXPECT(starts_with(order.check(TagSet(Tag{a, tag.number + 1})), "order 1"));
  EXPECT(starts_with(order.check(TagSet(Tag{99, 1})), "order 1"));
}

CHECK(Fixture, order_2_is_named_where_marks_are_out_of_order) {
  free(a);
  free(a);
  EXPECT(order.check().empty());
  auto& marks = (order.*member(OrderStates{}))[a].marks;
  std::swap(marks[0].number, marks[1].number);
  EXPECT(starts_with(order.check(), "order 2"));
}

CHECK(Fixture, order_3_is_named_where_more_is_known_than_was_marked) {
  wait(b, TagSet(free(a)));
  EXPECT(order.check().empty());
  ++(order.*member(OrderStates{}))[b].known[a];
  EXPECT(starts_with(order.check(), "order 3"));
}

}  // namespace vramx::units::stream_order_claims
