// What the allocator says of what it holds: the block behind an address, every piece, what could
// still be had, and each change of it as it happens; and that a device that is known to be full is
// asked before it is given work for nothing.
#include <cstdint>
#include <string>
#include <vector>

#include "stress/random.h"
#include "units/units.h"

namespace vramx::units::holdings_claims {

constexpr Stream kA{11};
constexpr Bytes kCapacity = 64_MiB;

struct Fixture : AllocatorFixture {
  std::vector<HeldPiece> all_pieces() const {
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

CHECK(Fixture, a_freed_block_is_told) {
  const Address address = take(Bytes{1000}, kA);
  LiveBlock freed;
  REQUIRE(allocator->free(address, &freed).ok());
  EXPECT(freed.address == address && freed.size == Bytes{1024});
  EXPECT(freed.requested == Bytes{1000} && freed.stream == kA);
  LiveBlock nothing;
  EXPECT(!allocator->free(address, &nothing).ok());
  EXPECT(!nothing.address);
}

CHECK(Fixture, a_live_block_is_found_at_its_address_alone) {
  const Address address = take_stitched(kPiece * 2 - 1_KiB);
  const Result<LiveBlock> found = allocator->find(address);
  REQUIRE(found.ok());
  EXPECT(found.value().size == kPiece * 2 - 1_KiB && found.value().address == address);
  EXPECT(!allocator->find(address + kBlockUnit).ok());
  REQUIRE(free(address));
  EXPECT(!allocator->find(address).ok());
}

CHECK(Fixture, allocated_follows_every_block) {
  const Address first = take(Bytes{1});
  take(kPiece);
  EXPECT(allocator->allocated() == kPiece + kBlockUnit);
  REQUIRE(free(first));
  EXPECT(allocator->allocated() == kPiece);
}

// --- pieces -------------------------------------------------------------------------------------

CHECK(Fixture, pieces_add_up_to_what_is_held) {
  EXPECT(all_pieces().empty());
  const Address stitched = take_stitched(kPiece * 2 - 1_KiB);
  REQUIRE(stitched);
  const std::vector<HeldPiece> pieces = all_pieces();
  EXPECT(sum_of(pieces) == allocator->held());
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    EXPECT(pieces[i - 1].begin + pieces[i - 1].size <= pieces[i].begin);
  }
}

CHECK(Fixture, a_block_in_an_alias_is_one_piece_at_its_own_address) {
  const Address stitched = take_stitched(kPiece * 2 - 1_KiB);
  int listed = 0;
  int blocks = 0;
  for (const HeldPiece& piece : all_pieces()) {
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

CHECK(Fixture, all_of_an_empty_device_could_be_had) {
  EXPECT(allocator->largest_obtainable() == kCapacity);
  allocator->set_limit(10_MiB + 1_KiB);
  EXPECT(allocator->largest_obtainable() == 10_MiB);
}

CHECK(Fixture, what_others_took_could_not_be_had) {
  REQUIRE(sim->create_chunk(40_MiB).ok());
  EXPECT(allocator->largest_obtainable() == 24_MiB);
}

// In any state: the request that is said to succeed does, and one of two chunks more does not.
CHECK(Fixture, what_is_said_to_be_obtainable_is) {
  stress::Random random(7);
  std::vector<Address> blocks;
  for (int step = 0; step < 600; ++step) {
    if (!blocks.empty() && random.below(100) < 45) {
      const std::size_t which = random.below(blocks.size());
      REQUIRE(free(blocks[which]));
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
    } else if (const Address made = take(Bytes{random.log_uniform(20_MiB .count)})) {
      blocks.push_back(made);
    }
    const Bytes most = allocator->largest_obtainable();
    EXPECT(!take(most + kPage * 2));
    if (!most) continue;
    const Address probe = take(most);
    EXPECT(probe);
    EXPECT(!probe || free(probe));
  }
}

// --- changes ------------------------------------------------------------------------------------

CHECK(Fixture, the_observer_sees_what_comes_and_goes_in_order) {
  Bytes mapped{};
  int changes = 0;
  allocator->set_observer([&](Holding change, const Piece& range) {
    ++changes;
    EXPECT(allocator->arena_addresses().begin <= range.begin);
    static_cast<void>(allocator->stats());  // the lock is free meanwhile
    if (change == Holding::kMapped) {
      mapped += range.size;
      EXPECT(allocator->held() == mapped);
    } else {
      EXPECT(allocator->held() == mapped);
      mapped -= range.size;
    }
  });
  const Address stitched = take_stitched(kPiece * 2 - 1_KiB);
  EXPECT(changes == 4 && mapped == kPiece * 4);
  REQUIRE(free(stitched));
  allocator->defragment();
  EXPECT(changes > 4 && mapped == allocator->held() && mapped == kPiece * 2);
  allocator->set_observer(nullptr);
  const int before = changes;
  take(kPiece);
  EXPECT(changes == before);
}

CHECK(Fixture, a_growth_that_fails_is_no_change) {
  int changes = 0;
  allocator->set_observer([&](Holding, const Piece&) { ++changes; });
  EXPECT(!take(kCapacity * 2));
  EXPECT(changes == 0);
}

// --- a full device ------------------------------------------------------------------------------

CHECK(Fixture, a_full_device_makes_no_chunk_for_nothing) {
  const Result<ChunkHandle> foreign = sim->create_chunk(40_MiB);
  REQUIRE(foreign.ok());
  const std::uint64_t creates = sim->call_count(CallKind::kCreateChunk);
  EXPECT(!take(32_MiB));
  EXPECT(sim->call_count(CallKind::kCreateChunk) == creates);
  // The figure is asked for anew: what the others gave back is there.
  REQUIRE(sim->release_chunk(foreign.value()).ok());
  EXPECT(take(32_MiB));
}

CHECK(Nothing, a_failed_growth_makes_the_next_one_ask) {
  const auto sim = contract::open_sim({.capacity = 1_GiB, .mode = SimMode::kAccounting});
  const auto allocator = open_allocator(*sim);
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

CHECK(Fixture, an_out_of_memory_report_is_the_callers_own) {
  OutOfMemory why;
  REQUIRE(!allocator->allocate(kCapacity * 2, kA, &why).ok());
  EXPECT(why.requested == kCapacity * 2);
  const std::string text = why.message(3);
  EXPECT(starts_with(
      text,
      "CUDA out of memory. Tried to allocate 128.00 MiB. GPU 3 has a total capacity of 64.00 MiB "
      "of which 64.00 MiB is free."));
  EXPECT(text.find('\n') == std::string::npos);
  EXPECT(text.find("higher limit") == std::string::npos);
  allocator->set_limit(kPiece);
  REQUIRE(!allocator->allocate(kCapacity, kA, &why).ok());
  EXPECT(why.message(3).find("set a higher limit") != std::string::npos);
}

}  // namespace vramx::units::holdings_claims
