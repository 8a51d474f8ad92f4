// What is decided about a request that nothing fits, and what carrying it out or failing to leaves
// behind. The books are real, and so are the chunks of the simulated device behind them.
#include "core/planner.h"

#include <memory>
#include <utility>
#include <vector>

#include "core/executor.h"
#include "core/surroundings.h"
#include "units/units.h"

namespace vramx::units::planner_claims {

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

  Request ask_for(Bytes size, StreamIndex stream, Reach reach = Reach::kAtOnce) const {
    return {.size = size, .stream = stream, .reach = reach};
  }
  Executor::Outcome carry_out(const Request& request) {
    return executor.carry_out(planner.find(request), request, lock);
  }
  // A block of new memory that lies in no run.
  Placement grow(Bytes size, StreamIndex stream) {
    const Executor::Outcome made = carry_out(ask_for(size, stream));
    EXPECT(made.refused == Executor::Refused::kNothing && made.placement.alias == kNoId);
    return made.placement;
  }
  // As the allocator frees: of work that is under way.
  void free(const Placement& placement, StreamIndex stream) {
    EXPECT(sim->submit(state.order.name_of(stream)).ok());
    const TagSet tags(state.order.mark(stream, lock));
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
  std::size_t chunk_count() const { return sim->live_chunks(); }
};

// --- plans --------------------------------------------------------------------------------------

CHECK(Fixture, what_fits_a_run_is_taken_from_it) {
  leave_holes(a);
  const Plan plan = planner.find(ask_for(1_MiB, a));
  REQUIRE(plan.pieces.size() == 1);
  EXPECT(plan.pieces[0].size == 1_MiB && !plan.growth && !plan.makes_alias && plan.waits.empty());
}

CHECK(Fixture, holes_are_put_together_before_memory_grows) {
  leave_holes(a);
  const Plan plan = planner.find(ask_for(kPage * 2, a));
  EXPECT(plan.pieces.size() == 2 && plan.makes_alias && !plan.growth);
}

CHECK(Fixture, memory_grows_by_what_the_holes_lack) {
  leave_holes(a);
  const Plan plan = planner.find(ask_for(kPage * 3, a));
  EXPECT(plan.makes_alias && plan.growth.bytes == kPage && plan.of_growth == kPage);
}

CHECK(Fixture, another_streams_memory_is_left_while_there_is_room) {
  leave_holes(a);
  const Plan plan = planner.find(ask_for(kPage * 2, b));
  EXPECT(plan.pieces.empty() && plan.growth.bytes == kPage * 2 && plan.waits.empty());
}

CHECK(Fixture, what_is_waited_for_is_what_the_pieces_were_freed_behind) {
  leave_holes(a);
  const Plan plan = planner.find(ask_for(kPage * 2, b, Reach::kBehindWaits));
  REQUIRE(plan.waits.size() == 1);
  EXPECT(plan.pieces.size() == 2 && plan.waits[0].donor == a);
}

CHECK(Fixture, its_own_memory_alone_is_not_what_is_over_elsewhere) {
  leave_holes(a);
  sim->advance_all();
  state.order.ask(lock);
  const auto pieces = [&](Reach reach) {
    return planner.find(ask_for(kPage * 2, b, reach)).pieces.size();
  };
  EXPECT(pieces(Reach::kOwn) == 0 && pieces(Reach::kAtOnce) == 2);
}

CHECK(Fixture, what_has_failed_is_not_planned_again) {
  leave_holes(a);
  Request request = ask_for(kPage * 3, a);
  request.most_growth = kPage - kBlockUnit;
  EXPECT(!planner.find(request));
  request.most_growth = kPage * 3;
  request.may_stitch = false;
  const Plan plan = planner.find(request);
  EXPECT(!plan.makes_alias && plan.growth.bytes == kPage * 3);
}

// A small block lies in a chunk of its zone, whose rest no large block takes while there is room.
CHECK(Fixture, the_rest_of_a_small_blocks_chunk_is_left_to_small_blocks) {
  grow(64_KiB, a);
  const Request request = ask_for(kPage * 2 - 64_KiB, a);
  const Plan plan = planner.find(request);
  EXPECT(plan.pieces.empty() && plan.growth.bytes == kPage * 2);
  state.limit = kPage * 2;
  const Plan pressed = planner.find(request);
  EXPECT(pressed.pieces.size() == 1 && pressed.growth.bytes == kPage);
}

// What a model's weights are: large blocks of odd sizes with small ones between them, and none is
// freed.
CHECK(Nothing, weights_of_odd_sizes_hold_no_more_than_they_take) {
  for (const Bytes odd : {64_KiB * 3, 64_KiB * 13, 64_KiB * 25}) {
    const auto sim = contract::open_sim({.capacity = 64_GiB, .mode = SimMode::kAccounting});
    const auto allocator =
        std::move(DeviceAllocator::create(*sim, {.alias_addresses = 64_GiB}).value());
    for (int layer = 0; layer < 300; ++layer) {
      REQUIRE(allocator->allocate(6_MiB + odd, Stream::kDefault).ok());
      REQUIRE(allocator->allocate(6_KiB, Stream::kDefault).ok());
    }
    EXPECT(allocator->held() <= allocator->allocated() + Bytes{allocator->held().count / 200});
    EXPECT(allocator->stats().num_stitches == 0);
  }
}

CHECK(Fixture, idle_aliases_go_where_there_is_no_room_for_another) {
  std::vector<Placement> made;
  for (int i = 0; i < 4; ++i) {
    leave_holes(a);
    made.push_back(carry_out(ask_for(kPage * 2, a)).placement);
    EXPECT(made.back().alias != kNoId);
  }
  // All of the mappings are taken, and blocks live in each alias: then memory grows.
  leave_holes(a);
  const Request larger = ask_for(kPage * 3, a);
  EXPECT(planner.find(larger).collected.empty());
  free(made[2], a);
  sim->advance_all();
  state.order.ask(lock);
  state.drop_tags_over();
  EXPECT(planner.find(larger).collected == std::vector<AliasId>{made[2].alias});
}

// --- carried out --------------------------------------------------------------------------------

CHECK(Fixture, a_block_of_holes_lies_in_an_alias_and_is_found_again) {
  leave_holes(a);
  const std::size_t chunks = chunk_count();
  const Placement first = carry_out(ask_for(kPage * 2, a)).placement;
  EXPECT(first.alias != kNoId && chunk_count() == chunks);
  free(first, a);
  const Plan again = planner.find(ask_for(kPage * 2, a));
  EXPECT(again.alias == first.alias && again.address == first.address && !again.makes_alias);
}

CHECK(Fixture, the_stream_waits_before_anything_is_made) {
  leave_holes(a);
  sim->fail_call(CallKind::kWaitEvent, 1, StatusCode::kDriverError);
  const std::uint64_t made = sim->call_count(CallKind::kMap);
  const Executor::Outcome outcome = carry_out(ask_for(kPage * 2, b, Reach::kBehindWaits));
  EXPECT(outcome.refused == Executor::Refused::kWait);
  EXPECT(sim->call_count(CallKind::kMap) == made);
}

// Whatever fails, everything is as before, and the same request then succeeds. What was grown for
// an alias that failed is free memory then.
CHECK(Fixture, a_plan_that_fails_leaves_nothing) {
  leave_holes(a);
  const Request request = ask_for(kPage * 3, a);
  const std::pair<CallKind, std::uint64_t> failures[] = {{CallKind::kCreateChunk, 1},
                                                         {CallKind::kMap, 1},
                                                         {CallKind::kSetAccess, 1},
                                                         {CallKind::kMap, 2}};
  for (const auto& [kind, nth] : failures) {
    const Bytes free = state.arena.free_bytes();
    const std::size_t extents = state.arena.extent_count();
    const std::size_t chunks = chunk_count();
    const std::size_t mappings = sim->live_mappings();
    sim->fail_call(kind, nth, StatusCode::kDriverError);
    const Executor::Outcome outcome = carry_out(request);
    const Bytes grown = nth == 2 ? kPage : Bytes{};
    EXPECT(outcome.refused == (nth == 2 ? Executor::Refused::kAlias : Executor::Refused::kGrowth));
    EXPECT(outcome.status.code == StatusCode::kDriverError);
    EXPECT(state.arena.free_bytes() == free + grown);
    EXPECT(state.arena.extent_count() >= extents);
    EXPECT(chunk_count() == chunks + grown / kPage);
    EXPECT(sim->live_mappings() == mappings + grown / kPage);
    EXPECT(state.arena.check().empty() && !state.building);
    EXPECT(state.operations_in_flight == 0);
  }
  EXPECT(carry_out(request).refused == Executor::Refused::kNothing);
}

}  // namespace vramx::units::planner_claims
