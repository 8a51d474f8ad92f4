// What is decided about a request that nothing fits, and what carrying it out or failing to leaves
// behind. The books are real, and so are the chunks of the simulated device behind them.
#include "core/planner.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/executor.h"
#include "core/surroundings.h"
#include "driver/sim_driver.h"
#include "units/units.h"

namespace vramx::units {
namespace planner_claims {
namespace {

constexpr Bytes kArena = kPage * 256;
constexpr Stream kA{11};
constexpr Stream kB{12};

struct Fixture {
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = kPage * 64, .mode = SimMode::kAccounting});
  DeviceState state;
  Planner planner{state};
  Executor executor{state};
  AdaptiveMutex mutex;
  Lock lock{mutex};
  const LastingStreams surroundings;
  const StreamIndex a;
  const StreamIndex b;

  Fixture()
      : state(*sim, {.alias_addresses = kArena, .alias_mappings = 8},
              {kPage * 64,
               {sim->reserve_address(kArena).value(), kArena},
               {sim->reserve_address(kArena).value(), kArena}}),
        a((state.order.set_surroundings(&surroundings), state.order.index_of(kA))),
        b(state.order.index_of(kB)) {
    state.arena.note_several_streams();
  }
  ~Fixture() { EXPECT(state.arena.check().empty()); }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;

  Request request(Bytes size, StreamIndex stream, Reach reach = Reach::kAtOnce) const {
    return {.size = size, .stream = stream, .reach = reach};
  }
  Executor::Outcome carry_out(const Request& request) {
    return executor.carry_out(planner.find(request), request, lock);
  }
  // A block of new memory that lies in no run.
  Placement grow(Bytes size, StreamIndex stream) {
    const Executor::Outcome made = carry_out(request(size, stream));
    EXPECT(made.refused == Executor::Refused::kNothing && made.placement.alias == kNoId);
    return made.placement;
  }
  // As the allocator frees: of work that is under way.
  void free(const Placement& placement, StreamIndex stream) {
    EXPECT(sim->submit(state.order.name_of(stream)).ok());
    const TagSet tags = state.order.mark(stream, lock);
    for (SpanId span = placement.first_span; span != kNoId;) {
      const SpanId next = state.arena.used(span).next;
      state.arena.give_back(span, tags);
      span = next;
    }
    if (placement.alias != kNoId) state.aliases.unpin(placement.alias, kPage * 2, tags);
  }
  // Two pages of the stream that do not touch.
  void leave_holes(StreamIndex stream) {
    std::vector<Placement> made;
    for (int i = 0; i < 4; ++i) made.push_back(grow(kPage, stream));
    free(made[0], stream);
    free(made[2], stream);
  }
  std::size_t chunks() const { return sim->live_chunks(); }
};

// --- plans --------------------------------------------------------------------------------------

void what_fits_a_run_is_taken_from_it(Fixture& fixture) {
  fixture.leave_holes(fixture.a);
  const Plan plan = fixture.planner.find(fixture.request(1_MiB, fixture.a));
  REQUIRE(plan.pieces.size() == 1);
  EXPECT(plan.pieces[0].size == 1_MiB && !plan.growth && !plan.makes_alias && plan.waits.empty());
}

void holes_are_put_together_before_memory_grows(Fixture& fixture) {
  fixture.leave_holes(fixture.a);
  const Plan plan = fixture.planner.find(fixture.request(kPage * 2, fixture.a));
  EXPECT(plan.pieces.size() == 2 && plan.makes_alias && !plan.growth);
}

void memory_grows_by_what_the_holes_lack(Fixture& fixture) {
  fixture.leave_holes(fixture.a);
  const Plan plan = fixture.planner.find(fixture.request(kPage * 3, fixture.a));
  EXPECT(plan.makes_alias && plan.growth.bytes == kPage && plan.of_growth == kPage);
}

void another_streams_memory_is_left_while_there_is_room(Fixture& fixture) {
  fixture.leave_holes(fixture.a);
  const Plan plan = fixture.planner.find(fixture.request(kPage * 2, fixture.b));
  EXPECT(plan.pieces.empty() && plan.growth.bytes == kPage * 2 && plan.waits.empty());
}

void what_is_waited_for_is_what_the_pieces_were_freed_behind(Fixture& fixture) {
  fixture.leave_holes(fixture.a);
  const Plan plan =
      fixture.planner.find(fixture.request(kPage * 2, fixture.b, Reach::kBehindWaits));
  REQUIRE(plan.waits.size() == 1);
  EXPECT(plan.pieces.size() == 2 && plan.waits[0].donor == fixture.a);
}

void its_own_memory_alone_is_not_what_is_over_elsewhere(Fixture& fixture) {
  fixture.leave_holes(fixture.a);
  fixture.sim->advance_all();
  fixture.state.order.ask(fixture.lock);
  const auto pieces = [&](Reach reach) {
    return fixture.planner.find(fixture.request(kPage * 2, fixture.b, reach)).pieces.size();
  };
  EXPECT(pieces(Reach::kOwn) == 0 && pieces(Reach::kAtOnce) == 2);
}

void what_has_failed_is_not_planned_again(Fixture& fixture) {
  fixture.leave_holes(fixture.a);
  Request request = fixture.request(kPage * 3, fixture.a);
  request.most_growth = kPage - kBlockUnit;
  EXPECT(!fixture.planner.find(request));
  request.most_growth = kPage * 3;
  request.may_stitch = false;
  const Plan plan = fixture.planner.find(request);
  EXPECT(!plan.makes_alias && plan.growth.bytes == kPage * 3);
}

void idle_aliases_go_where_there_is_no_room_for_another(Fixture& fixture) {
  std::vector<Placement> made;
  for (int i = 0; i < 4; ++i) {
    fixture.leave_holes(fixture.a);
    made.push_back(fixture.carry_out(fixture.request(kPage * 2, fixture.a)).placement);
    EXPECT(made.back().alias != kNoId);
  }
  // All of the mappings are taken, and blocks live in each alias: then memory grows.
  fixture.leave_holes(fixture.a);
  const Request larger = fixture.request(kPage * 3, fixture.a);
  EXPECT(fixture.planner.find(larger).collected.empty());
  fixture.free(made[2], fixture.a);
  fixture.sim->advance_all();
  fixture.state.order.ask(fixture.lock);
  fixture.state.drop_tags_over();
  EXPECT(fixture.planner.find(larger).collected == std::vector<AliasId>{made[2].alias});
}

// --- carried out --------------------------------------------------------------------------------

void a_block_of_holes_lies_in_an_alias_and_is_found_again(Fixture& fixture) {
  fixture.leave_holes(fixture.a);
  const std::size_t chunks = fixture.chunks();
  const Placement first = fixture.carry_out(fixture.request(kPage * 2, fixture.a)).placement;
  EXPECT(first.alias != kNoId && fixture.chunks() == chunks);
  fixture.free(first, fixture.a);
  const Plan again = fixture.planner.find(fixture.request(kPage * 2, fixture.a));
  EXPECT(again.alias == first.alias && again.address == first.address && !again.makes_alias);
}

void the_stream_waits_before_anything_is_made(Fixture& fixture) {
  fixture.leave_holes(fixture.a);
  fixture.sim->fail_call(CallKind::kWaitEvent, 1, StatusCode::kDriverError);
  const std::uint64_t made = fixture.sim->call_count(CallKind::kMap);
  const Executor::Outcome outcome =
      fixture.carry_out(fixture.request(kPage * 2, fixture.b, Reach::kBehindWaits));
  EXPECT(outcome.refused == Executor::Refused::kWait);
  EXPECT(fixture.sim->call_count(CallKind::kMap) == made);
}

// Whatever fails, everything is as before, and the same request then succeeds. What was grown for
// an alias that failed is free memory then.
void a_plan_that_fails_leaves_nothing(Fixture& fixture) {
  fixture.leave_holes(fixture.a);
  const Request request = fixture.request(kPage * 3, fixture.a);
  const std::pair<CallKind, std::uint64_t> failures[] = {{CallKind::kCreateChunk, 1},
                                                         {CallKind::kMap, 1},
                                                         {CallKind::kSetAccess, 1},
                                                         {CallKind::kMap, 2}};
  for (const auto& [kind, nth] : failures) {
    const Bytes free = fixture.state.arena.free_bytes();
    const std::size_t extents = fixture.state.arena.extent_count();
    const std::size_t chunks = fixture.chunks();
    const std::size_t mappings = fixture.sim->live_mappings();
    fixture.sim->fail_call(kind, nth, StatusCode::kDriverError);
    const Executor::Outcome outcome = fixture.carry_out(request);
    const Bytes grown = nth == 2 ? kPage : Bytes{};
    EXPECT(outcome.refused == (nth == 2 ? Executor::Refused::kAlias : Executor::Refused::kGrowth));
    EXPECT(outcome.status.code == StatusCode::kDriverError);
    EXPECT(fixture.state.arena.free_bytes() == free + grown);
    EXPECT(fixture.state.arena.extent_count() >= extents);
    EXPECT(fixture.chunks() == chunks + grown / kPage);
    EXPECT(fixture.sim->live_mappings() == mappings + grown / kPage);
    EXPECT(fixture.state.arena.check().empty() && !fixture.state.building);
    EXPECT(fixture.state.operations_in_flight == 0);
  }
  EXPECT(fixture.carry_out(request).refused == Executor::Refused::kNothing);
}

constexpr Check<Fixture> kPlans[] = {
    {"what fits a run is taken from it", what_fits_a_run_is_taken_from_it},
    {"holes are put together before memory grows", holes_are_put_together_before_memory_grows},
    {"memory grows by what the holes lack", memory_grows_by_what_the_holes_lack},
    {"another stream's memory is left while there is room",
     another_streams_memory_is_left_while_there_is_room},
    {"what is waited for is what the pieces were freed behind",
     what_is_waited_for_is_what_the_pieces_were_freed_behind},
    {"its own memory alone is not what is over elsewhere",
     its_own_memory_alone_is_not_what_is_over_elsewhere},
    {"what has failed is not planned again", what_has_failed_is_not_planned_again},
    {"idle aliases go where there is no room for another",
     idle_aliases_go_where_there_is_no_room_for_another},
};
constexpr Check<Fixture> kCarriedOut[] = {
    {"a block of holes lies in an alias and is found again",
     a_block_of_holes_lies_in_an_alias_and_is_found_again},
    {"the stream waits before anything is made", the_stream_waits_before_anything_is_made},
    {"a plan that fails leaves nothing", a_plan_that_fails_leaves_nothing},
};

}  // namespace
}  // namespace planner_claims

void check_planner() {
  run_checks("planner", planner_claims::kPlans);
  run_checks("executor", planner_claims::kCarriedOut);
}

}  // namespace vramx::units
