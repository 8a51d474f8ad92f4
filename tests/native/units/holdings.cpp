// What the allocator says of what it holds: the block behind an address, every piece, what could
// still be had, and each change of it as it happens; and that a device that is known to be full is
// asked before it is given work for nothing.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/device_allocator.h"
#include "driver/sim_driver.h"
#include "stress/random.h"
#include "units/units.h"

namespace vramx::units {
namespace holdings_claims {
namespace {

constexpr Stream kA{11};
constexpr Bytes kPiece = 8_MiB;
constexpr Bytes kCapacity = 64_MiB;

std::unique_ptr<DeviceAllocator> open(SimDriver& sim, AllocatorConfig config = {}) {
  config.alias_addresses = 4_GiB;
  auto made = DeviceAllocator::create(sim, config);
  return made.ok() ? std::move(made.value()) : nullptr;
}

struct Fixture {
  std::unique_ptr<SimDriver> sim =
      contract::open_sim({.capacity = kCapacity, .mode = SimMode::kAccounting});
  std::unique_ptr<DeviceAllocator> allocator = open(*sim);

  Address take(Bytes size, Stream stream = Stream::kDefault) {
    const Result<Address> made = allocator->allocate(size, stream);
    return made.ok() ? made.value() : Address{};
  }
  bool free(Address address) { return allocator->free(address).ok(); }
  // A block on the first and the third of four pieces, in an alias; the device is half full.
  Address take_stitched() {
    const Address pieces[] = {take(kPiece), take(kPiece), take(kPiece), take(kPiece)};
    EXPECT(free(pieces[0]) && free(pieces[2]));
    allocator->set_limit(kPiece * 4);
    return take(kPiece * 2 - 1_KiB);
  }
  std::vector<HeldPiece> pieces() const {
    std::vector<HeldPiece> found;
    allocator->for_each_piece([&](const HeldPiece& piece) { found.push_back(piece); });
    return found;
  }
};

Bytes sum_of(const std::vector<HeldPiece>& pieces) {
  Bytes sum{};
  for (const HeldPiece& piece : pieces) sum += piece.size;
  return sum;
}

// --- blocks -------------------------------------------------------------------------------------

void a_freed_block_is_told(Fixture& fixture) {
  const Address address = fixture.take(Bytes{1000}, kA);
  LiveBlock freed;
  REQUIRE(fixture.allocator->free(address, &freed).ok());
  EXPECT(freed.address == address && freed.size == Bytes{1024});
  EXPECT(freed.requested == Bytes{1000} && freed.stream == kA);
  LiveBlock nothing;
  EXPECT(!fixture.allocator->free(address, &nothing).ok());
  EXPECT(!nothing.address);
}

void a_live_block_is_found_at_its_address_alone(Fixture& fixture) {
  const Address address = fixture.take_stitched();
  const Result<LiveBlock> found = fixture.allocator->find(address);
  REQUIRE(found.ok());
  EXPECT(found.value().size == kPiece * 2 - 1_KiB && found.value().address == address);
  EXPECT(!fixture.allocator->find(address + kBlockUnit).ok());
  REQUIRE(fixture.free(address));
  EXPECT(!fixture.allocator->find(address).ok());
}

void allocated_follows_every_block(Fixture& fixture) {
  const Address first = fixture.take(Bytes{1});
  fixture.take(kPiece);
  EXPECT(fixture.allocator->allocated() == kPiece + kBlockUnit);
  REQUIRE(fixture.free(first));
  EXPECT(fixture.allocator->allocated() == kPiece);
}

// --- pieces -------------------------------------------------------------------------------------

void pieces_add_up_to_what_is_held(Fixture& fixture) {
  EXPECT(fixture.pieces().empty());
  const Address stitched = fixture.take_stitched();
  REQUIRE(static_cast<bool>(stitched));
  const std::vector<HeldPiece> pieces = fixture.pieces();
  EXPECT(sum_of(pieces) == fixture.allocator->held());
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    EXPECT(pieces[i - 1].begin + pieces[i - 1].size <= pieces[i].begin);
  }
}

void a_block_in_an_alias_is_one_piece_at_its_own_address(Fixture& fixture) {
  const Address stitched = fixture.take_stitched();
  int listed = 0;
  int blocks = 0;
  for (const HeldPiece& piece : fixture.pieces()) {
    blocks += piece.block.address ? 1 : 0;
    if (piece.block.address != stitched) continue;
    ++listed;
    EXPECT(piece.begin == stitched && piece.size == kPiece * 2 - 1_KiB);
    EXPECT(piece.block.requested == kPiece * 2 - 1_KiB);
  }
  EXPECT(listed == 1);
  EXPECT(blocks == 3);
}

// --- what could be had --------------------------------------------------------------------------

void all_of_an_empty_device_could_be_had(Fixture& fixture) {
  EXPECT(fixture.allocator->largest_obtainable() == kCapacity);
  fixture.allocator->set_limit(10_MiB + 1_KiB);
  EXPECT(fixture.allocator->largest_obtainable() == 10_MiB);
}

void what_others_took_could_not_be_had(Fixture& fixture) {
  REQUIRE(fixture.sim->create_chunk(40_MiB).ok());
  EXPECT(fixture.allocator->largest_obtainable() == 24_MiB);
}

// In any state: the request that is said to succeed does, and one of two chunks more does not.
void what_is_said_to_be_obtainable_is(Fixture& fixture) {
  stress::Random random(7);
  std::vector<Address> blocks;
  for (int step = 0; step < 600; ++step) {
    if (!blocks.empty() && random.below(100) < 45) {
      const std::size_t which = random.below(blocks.size());
      REQUIRE(fixture.free(blocks[which]));
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
    } else if (const Address made = fixture.take(Bytes{random.log_uniform(20_MiB .count)})) {
      blocks.push_back(made);
    }
    const Bytes most = fixture.allocator->largest_obtainable();
    EXPECT(!fixture.take(most + kPage * 2));
    if (!most) continue;
    const Address probe = fixture.take(most);
    EXPECT(static_cast<bool>(probe));
    EXPECT(!probe || fixture.free(probe));
  }
}

// --- changes ------------------------------------------------------------------------------------

void the_observer_sees_what_comes_and_goes_in_order(Fixture& fixture) {
  Bytes mapped{};
  int changes = 0;
  fixture.allocator->set_observer([&](Holding change, const Piece& range) {
    ++changes;
    EXPECT(fixture.allocator->arena_addresses().begin <= range.begin);
    static_cast<void>(fixture.allocator->stats());  // the lock is free meanwhile
    if (change == Holding::kMapped) {
      mapped += range.size;
      EXPECT(fixture.allocator->held() == mapped);
    } else {
      EXPECT(fixture.allocator->held() == mapped);
      mapped -= range.size;
    }
  });
  const Address stitched = fixture.take_stitched();
  EXPECT(changes == 4 && mapped == kPiece * 4);
  REQUIRE(fixture.free(stitched));
  fixture.allocator->defragment();
  EXPECT(changes > 4 && mapped == fixture.allocator->held() && mapped == kPiece * 2);
  fixture.allocator->set_observer(nullptr);
  const int before = changes;
  fixture.take(kPiece);
  EXPECT(changes == before);
}

void a_growth_that_fails_is_no_change(Fixture& fixture) {
  int changes = 0;
  fixture.allocator->set_observer([&](Holding, const Piece&) { ++changes; });
  EXPECT(!fixture.take(kCapacity * 2));
  EXPECT(changes == 0);
}

// --- a full device ------------------------------------------------------------------------------

void a_full_device_makes_no_chunk_for_nothing(Fixture& fixture) {
  const Result<ChunkHandle> foreign = fixture.sim->create_chunk(40_MiB);
  REQUIRE(foreign.ok());
  const std::uint64_t creates = fixture.sim->call_count(CallKind::kCreateChunk);
  EXPECT(!fixture.take(32_MiB));
  EXPECT(fixture.sim->call_count(CallKind::kCreateChunk) == creates);
  // The figure is asked for anew: what the others gave back is there.
  REQUIRE(fixture.sim->release_chunk(foreign.value()).ok());
  EXPECT(static_cast<bool>(fixture.take(32_MiB)));
}

void a_failed_growth_makes_the_next_one_ask(Fixture&) {
  const auto sim = contract::open_sim({.capacity = 1_GiB, .mode = SimMode::kAccounting});
  const auto allocator = open(*sim);
  REQUIRE(allocator != nullptr && sim->create_chunk(1000_MiB).ok());
  const std::uint64_t asked = sim->call_count(CallKind::kMemoryInfo);
  REQUIRE(allocator->allocate(8_MiB, kA).ok());
  EXPECT(sim->call_count(CallKind::kMemoryInfo) == asked);  // plenty, for all it knows
  EXPECT(!allocator->allocate(64_MiB, kA).ok());
  const std::uint64_t creates = sim->call_count(CallKind::kCreateChunk);
  EXPECT(!allocator->allocate(64_MiB, kA).ok());
  EXPECT(sim->call_count(CallKind::kCreateChunk) == creates);
  EXPECT(allocator->allocate(8_MiB, kA).ok());
}

// --- the text -----------------------------------------------------------------------------------

void an_out_of_memory_report_is_the_callers_own(Fixture& fixture) {
  OutOfMemory why;
  REQUIRE(!fixture.allocator->allocate(kCapacity * 2, kA, &why).ok());
  EXPECT(why.requested == kCapacity * 2);
  const std::string text = why.message(3);
  EXPECT(starts_with(text,
                     "CUDA out of memory. Tried to allocate 128.00 MiB. GPU 3 has 64.00 MiB, "
                     "of which 64.00 MiB is free."));
  EXPECT(text.find('\n') == std::string::npos);
  EXPECT(text.find("higher limit") == std::string::npos);
  fixture.allocator->set_limit(kPiece);
  REQUIRE(!fixture.allocator->allocate(kCapacity, kA, &why).ok());
  EXPECT(why.message(3).find("set a higher limit") != std::string::npos);
}

constexpr Check<Fixture> kChecks[] = {
    {"a freed block is told", a_freed_block_is_told},
    {"a live block is found at its address alone", a_live_block_is_found_at_its_address_alone},
    {"allocated follows every block", allocated_follows_every_block},
    {"pieces add up to what is held", pieces_add_up_to_what_is_held},
    {"a block in an alias is one piece at its own address",
     a_block_in_an_alias_is_one_piece_at_its_own_address},
    {"all of an empty device could be had", all_of_an_empty_device_could_be_had},
    {"what others took could not be had", what_others_took_could_not_be_had},
    {"what is said to be obtainable is", what_is_said_to_be_obtainable_is},
    {"the observer sees what comes and goes in order",
     the_observer_sees_what_comes_and_goes_in_order},
    {"a growth that fails is no change", a_growth_that_fails_is_no_change},
    {"a full device makes no chunk for nothing", a_full_device_makes_no_chunk_for_nothing},
    {"a failed growth makes the next one ask", a_failed_growth_makes_the_next_one_ask},
    {"an out-of-memory report is the caller's own", an_out_of_memory_report_is_the_callers_own},
};

}  // namespace
}  // namespace holdings_claims

void check_holdings() { run_checks("holdings", holdings_claims::kChecks); }

}  // namespace vramx::units
