// What of the whole allocator needs the C++ side: its invariants broken on purpose, captures, a
// forked child, the driver's state after the last destructor. What callers see of it is specified
// in tests/test_allocator.py.
#include "core/device_allocator.h"

#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

#include "driver/sim_driver.h"
#include "units/units.h"

namespace vramx::units {

struct Blocks {
  friend auto member(Blocks);
};
struct State {
  friend auto member(State);
};
template struct Reveal<Blocks, &DeviceAllocator::blocks_>;
template struct Reveal<State, &DeviceAllocator::state_>;

namespace device_allocator_claims {
namespace {

constexpr Stream kA{11};
constexpr Stream kB{12};
constexpr Stream kC{13};
constexpr Bytes kPiece = 8_MiB;

std::unique_ptr<DeviceAllocator> open(SimDriver& sim) {
  auto made = DeviceAllocator::create(sim, {.alias_addresses = 1_GiB, .patience = {}});
  if (!made.ok()) return nullptr;
  static const LastingStreams kStreams;  // as torch's own
  made.value()->set_surroundings(&kStreams);
  return std::move(made.value());
}

// A device of 64 MiB and its allocator.
struct Fixture {
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = 64_MiB, .mode = SimMode::kAccounting});
  std::unique_ptr<DeviceAllocator> allocator = open(*sim);

  Address take(Bytes size, Stream stream = Stream::kDefault) {
    const Result<Address> made = allocator->allocate(size, stream);
    return made.ok() ? made.value() : Address{};
  }
  // A block on two pieces that do not touch, hence in an alias.
  Address take_stitched() {
    const Address first = take(kPiece);
    take(kPiece);
    const Address third = take(kPiece);
    take(kPiece);
    allocator->free(first).ignore();
    allocator->free(third).ignore();
    return take(kPiece * 2);
  }
};

void the_device_is_empty_after_the_allocator(Fixture& fixture) {
  fixture.take_stitched();
  EXPECT(fixture.allocator->stats().alias_count == 1);
  fixture.allocator.reset();
  EXPECT(contract::is_empty(*fixture.sim));
}

void an_allocator_that_cannot_be_built_leaves_nothing(Fixture& fixture) {
  const std::size_t before = fixture.sim->live_reservations();
  fixture.sim->fail_call(CallKind::kReserveAddress, 1, StatusCode::kOutOfMemory);
  EXPECT(open(*fixture.sim) == nullptr);
  EXPECT(fixture.sim->live_reservations() == before);
}

// --- captures -----------------------------------------------------------------------------------

void a_capturing_stream_may_allocate_and_free(Fixture& fixture) {
  REQUIRE(fixture.sim->begin_capture(kA).ok());
  const Address block = fixture.take(kPiece, kA);
  EXPECT(static_cast<bool>(block));
  EXPECT(fixture.allocator->free(block).ok());
  EXPECT(fixture.take(kPiece, kA) == block);
  EXPECT(fixture.sim->end_capture(kA).ok());
}

// A's extent touches the gap, so that growth for B would begin with it.
void memory_of_a_capturing_stream_does_not_stop_growth(Fixture& fixture) {
  const Address of_a = fixture.take(kPiece, kA);
  REQUIRE(fixture.allocator->free(of_a).ok() && fixture.sim->begin_capture(kA).ok());
  EXPECT(static_cast<bool>(fixture.take(kPiece * 2, kB)));
  EXPECT(static_cast<bool>(fixture.take(kPiece, kB)));
  EXPECT(fixture.allocator->check().empty());
  EXPECT(fixture.sim->end_capture(kA).ok());
}

// Free and busy are what A had in an alias, for which nobody can wait, and larger pieces of C.
void an_alias_of_a_capturing_stream_does_not_stop_a_stitch(Fixture& fixture) {
  std::vector<Address> pieces;
  for (const Bytes size : {6_MiB, 6_MiB, 6_MiB, 10_MiB, 10_MiB}) {
    pieces.push_back(fixture.take(size, size == 6_MiB ? kA : kC));
    fixture.take(kPage);
  }
  fixture.allocator->set_limit(fixture.allocator->held());
  for (std::size_t i = 0; i < 3; ++i) fixture.allocator->free(pieces[i]).ignore();
  const Address in_alias = fixture.take(18_MiB, kA);
  REQUIRE(fixture.allocator->stats().alias_count == 1);
  REQUIRE(fixture.sim->submit(kA).ok() && fixture.sim->submit(kC).ok());
  REQUIRE(fixture.sim->begin_capture(kA).ok());
  for (const Address block : {in_alias, pieces[3], pieces[4]}) {
    fixture.allocator->free(block).ignore();
  }
  EXPECT(static_cast<bool>(fixture.take(18_MiB, kB)));
  EXPECT(fixture.allocator->stats().alias_count == 2);
  EXPECT(fixture.allocator->check().empty());
  EXPECT(fixture.sim->end_capture(kA).ok());
}

// --- forked children ----------------------------------------------------------------------------

void a_forked_child_is_inert_and_calls_no_driver(Fixture& fixture) {
  const Address block = fixture.take(kPiece, kA);
  fixture.allocator->free(block).ignore();
  REQUIRE(static_cast<bool>(fixture.take(60_MiB, kB)));  // makes an event for A
  const std::uint64_t calls = fixture.sim->call_count();
  const pid_t child = fork();
  if (child == 0) {
    bool is_inert = !fixture.allocator->allocate(kPage, kA).ok();
    is_inert = is_inert && fixture.allocator->free(block).ok();
    is_inert = is_inert && fixture.allocator->trim().chunks_released == 0;
    fixture.allocator.reset();
    _exit(is_inert && fixture.sim->call_count() == calls ? 0 : 1);
  }
  int state = 0;
  REQUIRE(child > 0 && waitpid(child, &state, 0) == child);
  EXPECT(WIFEXITED(state) && WEXITSTATUS(state) == 0);
  EXPECT(fixture.allocator->check().empty());
}

// --- planted defects ----------------------------------------------------------------------------

void a_sound_allocator_names_nothing(Fixture& fixture) {
  REQUIRE(static_cast<bool>(fixture.take_stitched()));
  EXPECT(fixture.allocator->check().empty());
}

void block_1_is_named_where_allocated_bytes_are_off(Fixture& fixture) {
  fixture.take(kPage);
  ((*fixture.allocator).*member(State{})).stats.allocated_bytes[0].current += 512;
  EXPECT(starts_with(fixture.allocator->check(), "block 1"));
}

void block_2_is_named_where_a_span_has_two_blocks(Fixture& fixture) {
  const Address block = fixture.take(kPage);
  BlockBook& blocks = (*fixture.allocator).*member(Blocks{});
  const Arena& arena = ((*fixture.allocator).*member(State{})).arena;
  blocks.insert({block + kBlockUnit, arena.span_at(block), kNoId});
  EXPECT(starts_with(fixture.allocator->check(), "block 2: a span belongs"));
}

void block_2_is_named_where_a_blocks_span_is_not_used(Fixture& fixture) {
  const Address block = fixture.take(kPage);
  Arena& arena = ((*fixture.allocator).*member(State{})).arena;
  arena.give_back(arena.span_at(block), TagSet());
  EXPECT(starts_with(fixture.allocator->check(), "block 2"));
}

void block_2_is_named_where_spans_do_not_add_up(Fixture& fixture) {
  const Address block = fixture.take(kPage);
  Arena& arena = ((*fixture.allocator).*member(State{})).arena;
  arena.used(arena.span_at(block)).requested = kBlockUnit;
  EXPECT(starts_with(fixture.allocator->check(), "block 2: the spans"));
}

void alias_3_is_named_where_a_blocks_alias_is_not_pinned(Fixture& fixture) {
  fixture.take_stitched();
  AliasCache& aliases = ((*fixture.allocator).*member(State{})).aliases;
  REQUIRE(aliases.count() == 1);
  const AliasId alias = aliases.all()[0];
  aliases.unpin(alias, aliases[alias].pinned, TagSet());
  EXPECT(starts_with(fixture.allocator->check(), "alias 3"));
}

constexpr Check<Fixture> kChecks[] = {
    {"the device is empty after the allocator", the_device_is_empty_after_the_allocator},
    {"an allocator that cannot be built leaves nothing",
     an_allocator_that_cannot_be_built_leaves_nothing},
    {"a capturing stream may allocate and free", a_capturing_stream_may_allocate_and_free},
    {"memory of a capturing stream does not stop growth",
     memory_of_a_capturing_stream_does_not_stop_growth},
    {"an alias of a capturing stream does not stop a stitch",
     an_alias_of_a_capturing_stream_does_not_stop_a_stitch},
    {"a forked child is inert and calls no driver", a_forked_child_is_inert_and_calls_no_driver},
    {"a sound allocator names nothing", a_sound_allocator_names_nothing},
    {"block 1 is named where allocated bytes are off",
     block_1_is_named_where_allocated_bytes_are_off},
    {"block 2 is named where a span has two blocks", block_2_is_named_where_a_span_has_two_blocks},
    {"block 2 is named where a block's span is not used",
     block_2_is_named_where_a_blocks_span_is_not_used},
    {"block 2 is named where spans do not add up", block_2_is_named_where_spans_do_not_add_up},
    {"alias 3 is named where a block's alias is not pinned",
     alias_3_is_named_where_a_blocks_alias_is_not_pinned},
};

}  // namespace
}  // namespace device_allocator_claims

void check_device_allocator() { run_checks("device allocator", device_allocator_claims::kChecks); }

}  // namespace vramx::units
