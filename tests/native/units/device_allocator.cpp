// What of the whole allocator needs the C++ side: its invariants broken on purpose, captures, a
// forked child. What callers see of it is specified in tests/test_allocator.py.
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <vector>

#include "units/interrupted.h"
#include "units/streams.h"
#include "units/units.h"

namespace vramx::units::device_allocator_claims {

REVEAL(Blocks, &DeviceAllocator::blocks_);
REVEAL(State, &DeviceAllocator::state_);

constexpr Stream kA{11};
constexpr Stream kB{12};
constexpr Stream kC{13};

// On streams that last, as torch's own do.
struct Fixture : AllocatorFixture {
  const LastingStreams streams;

  Fixture() {
    allocator = open_allocator(*sim, {.patience = {}});
    allocator->set_surroundings(&streams);
  }
  ~Fixture() { allocator.reset(); }
};

// --- captures -----------------------------------------------------------------------------------

CHECK(Fixture, a_capturing_stream_may_allocate_and_free) {
  REQUIRE(sim->begin_capture(kA).ok());
  const Address block = take(kPiece, kA);
  EXPECT(block);
  EXPECT(allocator->free(block).ok());
  EXPECT(take(kPiece, kA) == block);
  EXPECT(sim->end_capture(kA).ok());
}

// A's extent touches the gap, so that growth for B would begin with it.
CHECK(Fixture, memory_of_a_capturing_stream_does_not_stop_growth) {
  const Address of_a = take(kPiece, kA);
  REQUIRE(allocator->free(of_a).ok() && sim->begin_capture(kA).ok());
  EXPECT(take(kPiece * 2, kB));
  EXPECT(take(kPiece, kB));
  EXPECT(allocator->check().empty());
  EXPECT(sim->end_capture(kA).ok());
}

// Free and busy are what A had in an alias, for which nobody can wait, and larger pieces of C.
CHECK(Fixture, an_alias_of_a_capturing_stream_does_not_stop_a_stitch) {
  std::vector<Address> pieces;
  for (const Bytes size : {6_MiB, 6_MiB, 6_MiB, 10_MiB, 10_MiB}) {
    pieces.push_back(take(size, size == 6_MiB ? kA : kC));
    take(kPage);
  }
  allocator->set_limit(allocator->held());
  for (std::size_t i = 0; i < 3; ++i) allocator->free(pieces[i]).ignore();
  const Address in_alias = take(18_MiB, kA);
  REQUIRE(allocator->stats().alias_count == 1);
  REQUIRE(sim->submit(kA).ok() && sim->submit(kC).ok());
  REQUIRE(sim->begin_capture(kA).ok());
  for (const Address block : {in_alias, pieces[3], pieces[4]}) {
    allocator->free(block).ignore();
  }
  EXPECT(take(18_MiB, kB));
  EXPECT(allocator->stats().alias_count == 2);
  EXPECT(allocator->check().empty());
  EXPECT(sim->end_capture(kA).ok());
}

// --- marks --------------------------------------------------------------------------------------

// Two streams, both of which ask for memory, on a device of the size that people have.
struct TwoAsk : Fixture {
  TwoAsk() {
    allocator.reset();
    sim = contract::open_sim({.capacity = 128_GiB, .mode = SimMode::kAccounting});
    open({});
  }
  void open(CrossStream cross_stream) {
    allocator = open_allocator(*sim, {.cross_stream = cross_stream, .patience = {}});
    allocator->set_surroundings(&streams);
  }
  // Of 256 frees of a mebibyte.
  std::uint64_t marks() {
    EXPECT(take(kPiece, kA) && take(kPiece, kB));
    const std::uint64_t before = sim->call_count(CallKind::kRecordEvent);
    for (int i = 0; i < 256; ++i) EXPECT(free(take(1_MiB, kA)));
    return sim->call_count(CallKind::kRecordEvent) - before;
  }
};

CHECK(TwoAsk, frees_share_marks_while_there_is_room) {
  EXPECT(marks() < 20);
  allocator->set_limit(allocator->held() + 64_MiB);
  EXPECT(marks() >= 250);
}

CHECK(TwoAsk, each_is_marked_where_streams_wait_before_they_grow) {
  open(CrossStream::kAlways);
  EXPECT(marks() >= 250);
}

// Another process has what is left of the device.
CHECK(TwoAsk, each_is_marked_once_the_device_has_refused_to_grow) {
  const Result<ChunkHandle> foreign = sim->create_chunk(127_GiB + 512_MiB);
  REQUIRE(foreign.ok());
  EXPECT(!take(1_GiB, kB));
  EXPECT(marks() >= 250);
  EXPECT(sim->release_chunk(foreign.value()).ok());
  EXPECT(take(1_GiB, kB));
  EXPECT(marks() < 20);
}

// The copy into it is over long before what reads it, of which two are queued.
CHECK(Fixture, a_buffer_that_was_handed_over_is_had_again_once_its_own_reader_is_done) {
  for (int round = 0; round < 16; ++round) {
    const Address batch = take(kPiece, kA);
    REQUIRE(batch && allocator->record_stream(batch, {kB, 0}, true).ok());
    REQUIRE(sim->submit(kB).ok());
    EXPECT(free(batch));
    if (round >= 2) sim->advance(kB, 1);
  }
  EXPECT(allocator->held() == kPiece * 3);
}

// --- other threads' requests --------------------------------------------------------------------

// Streams of another library, of which the thread works on the one that is named last.
struct Passing {
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = 1_GiB, .mode = SimMode::kAccounting});
  Interrupted driver{*sim};
  KnownStreams known;
  std::unique_ptr<DeviceAllocator> allocator = open_allocator(driver, {.patience = {}});
  Stream streams[3];

  Passing() {
    allocator->set_surroundings(&known);
    EXPECT(static_cast<bool>(take(kPage, Stream::kDefault)));
    for (Stream& each : streams) each = sim->create_stream(0);
  }
  Address take(Bytes size, Stream stream) {
    known.current = stream;
    const Result<Address> made = allocator->allocate(size, stream);
    return made.ok() ? made.value() : Address{};
  }
  void free(Address block, Stream current) {
    known.current = current;
    EXPECT(allocator->free(block).ok() && allocator->check().empty());
  }
};

CHECK(Passing, a_stream_whose_first_request_grows_is_not_taken_for_one_that_is_gone) {
  driver.at_growth = [this] { EXPECT(static_cast<bool>(take(kPiece, streams[1]))); };
  const Address block = take(kPiece, streams[0]);
  REQUIRE(sim->submit(streams[0]).ok());
  free(block, streams[0]);
  const Address other = take(kPiece, streams[1]);
  EXPECT(static_cast<bool>(other) && other != block);
}

CHECK(Passing, a_stream_whose_request_fails_is_let_go) {
  EXPECT(!take(2_GiB, streams[0]));
  EXPECT(static_cast<bool>(take(kPiece, streams[1])));
  EXPECT((allocator.get()->*member(State{})).order.count() == 2);
}

CHECK(Passing, a_user_of_freed_memory_is_not_taken_for_one_that_is_gone) {
  const Address block = take(kPiece, streams[0]);
  known.current = streams[1];
  REQUIRE(allocator->record_stream(block, {streams[1], 0}, false).ok());
  REQUIRE(sim->submit(streams[1]).ok());
  driver.at_mark = [this] { EXPECT(static_cast<bool>(take(kPage, streams[2]))); };
  free(block, streams[0]);
  sim->advance(streams[0], 1);
  const Address other = take(kPiece, streams[2]);
  EXPECT(static_cast<bool>(other) && other != block);
}

// The handles of chunks that were released come again at once.
class FewHandles final : public stress::ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;

  Result<ChunkHandle> create_chunk(Bytes size) override {
    const Result<ChunkHandle> made = inner_.create_chunk(size);
    if (!made.ok()) return made;
    std::uint64_t handle = 1;
    while (behind_.contains(handle)) ++handle;
    behind_[handle] = made.value();
    return ChunkHandle{handle};
  }
  Status map(Address at, Bytes size, ChunkHandle chunk) override {
    return inner_.map(at, size, behind_.at(static_cast<std::uint64_t>(chunk)));
  }
  Status release_chunk(ChunkHandle chunk) override {
    const auto behind = behind_.find(static_cast<std::uint64_t>(chunk));
    const Status released = inner_.release_chunk(behind->second);
    if (released.ok()) behind_.erase(behind);
    return released;
  }

 private:
  std::map<std::uint64_t, ChunkHandle> behind_;
};

struct Trimmed : AllocatorFixture {
  const LastingStreams streams;
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = 128_GiB, .mode = SimMode::kAccounting});
  FewHandles handles{*sim};
  Interrupted driver{handles};

  Trimmed() {
    allocator = open_allocator(driver, {.patience = {}});
    allocator->set_surroundings(&streams);
  }
  ~Trimmed() { allocator.reset(); }
};

// Large chunks are gone and small ones made in their place, under their handles.
CHECK(Trimmed, a_trim_gives_back_what_lies_there_now) {
  take(kPage);
  const Address large[] = {take(1_GiB), take(1_GiB)};
  for (const Address block : large) EXPECT(free(block));
  driver.at_unmap = [this] {
    allocator->trim();
    Address small[16];
    for (Address& block : small) block = take(kPage);
    for (const Address block : small) EXPECT(free(block));
    EXPECT(!take(256_GiB));  // what is over is known then
  };
  allocator->trim();
  EXPECT(allocator->held() == sim->used() && sim->live_mappings() == sim->live_chunks());
  allocator->trim();
  EXPECT(allocator->held() == kPage && sim->live_mappings() == 1);
}

CHECK(Trimmed, an_alias_that_is_being_unmapped_is_one_to_wait_for) {
  EXPECT(free(take_stitched()));
  std::size_t in_flight = 0;
  driver.at_unmap = [&] { in_flight = (*allocator.*member(State{})).operations_in_flight; };
  EXPECT(allocator->defragment().aliases_collected == 1);
  EXPECT(in_flight == 1);
}

// --- forked children ----------------------------------------------------------------------------

CHECK(Fixture, a_forked_child_is_inert_and_calls_no_driver) {
  const Address block = take(kPiece, kA);
  allocator->free(block).ignore();
  REQUIRE(static_cast<bool>(take(60_MiB, kB)));  // makes an event for A
  const std::uint64_t calls = sim->call_count();
  const pid_t child = fork();
  if (child == 0) {
    bool is_inert = !allocator->allocate(kPage, kA).ok();
    is_inert = is_inert && allocator->free(block).ok();
    is_inert = is_inert && allocator->trim().chunks_released == 0;
    allocator.reset();
    _exit(is_inert && sim->call_count() == calls ? 0 : 1);
  }
  int state = 0;
  REQUIRE(child > 0 && waitpid(child, &state, 0) == child);
  EXPECT(WIFEXITED(state) && WEXITSTATUS(state) == 0);
  EXPECT(allocator->check().empty());
}

// --- planted defects ----------------------------------------------------------------------------

CHECK(Fixture, block_1_is_named_where_allocated_bytes_are_off) {
  take(kPage);
  ((*allocator).*member(State{})).blocks.count_allocation(512_B, 512_B);
  EXPECT(starts_with(allocator->check(), "block 1"));
}

CHECK(Fixture, block_2_is_named_where_a_span_has_two_blocks) {
  const Address block = take(kPage);
  BlockBook& blocks = (*allocator).*member(Blocks{});
  const Arena& arena = ((*allocator).*member(State{})).arena;
  blocks.insert({block + kBlockUnit, arena.span_at(block), kNoId});
  EXPECT(starts_with(allocator->check(), "block 2: a span belongs"));
}

CHECK(Fixture, block_2_is_named_where_a_blocks_span_is_not_used) {
  const Address block = take(kPage);
  Arena& arena = ((*allocator).*member(State{})).arena;
  arena.give_back(arena.span_at(block), TagSet());
  EXPECT(starts_with(allocator->check(), "block 2"));
}

CHECK(Fixture, block_2_is_named_where_spans_do_not_add_up) {
  const Address block = take(kPage);
  Arena& arena = ((*allocator).*member(State{})).arena;
  arena.used(arena.span_at(block)).requested = kBlockUnit;
  EXPECT(starts_with(allocator->check(), "block 2: the spans"));
}

CHECK(Fixture, alias_3_is_named_where_a_blocks_alias_is_not_pinned) {
  take_stitched();
  AliasCache& aliases = ((*allocator).*member(State{})).aliases;
  REQUIRE(aliases.count() == 1);
  const AliasId alias = aliases.all()[0];
  aliases.unpin(alias, aliases[alias].pinned, TagSet());
  EXPECT(starts_with(allocator->check(), "alias 3"));
}

}  // namespace vramx::units::device_allocator_claims
