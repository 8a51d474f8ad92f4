// The byte patterns of blocks: a unit of 512 bytes carries a word at its start and one at its end,
// of the block's number and the unit's place, written and read through the block's own address.
//
// Two words a unit and not all of it: the allocator deals in no finer size. Of every fourth block
// all units carry them. Of the others those at both ends, where a block may reach into another, and
// between them the first and the last of each granule, for the device maps no less: most of the
// time goes into pages that are touched first. Before that the device fills the first words under
// each mapping, so that an address without access is a failed claim and not a fault of this
// program.
#include "core/types.h"
#include "stress/world.h"

namespace vramx::stress {
namespace {

// Fills are queued here, apart from the streams whose order is under test, and have run at once: a
// mark of the whole device covers them too.
constexpr Stream kWriter{~std::uint64_t{1}};
constexpr std::uint64_t kLastWord = kBlockUnit.count / sizeof(std::uint64_t) - 1;

std::uint64_t pattern(std::uint32_t number, Bytes at) {
  return (std::uint64_t{number} << 32 | at / kBlockUnit) * 0x9E3779B97F4A7C15;
}

volatile std::uint64_t* words(Address at) {
  return reinterpret_cast<volatile std::uint64_t*>(at.value);
}

// The place of the next unit that is stamped, in a block of this number and size at `address`.
Bytes next_stamp(std::uint32_t number, Address address, Bytes size, Bytes at) {
  const bool begins_granule = (address + at).value % kGranularity.count == 0;
  const bool is_between = at >= kGranularity && at + kGranularity * 2 <= size;
  const bool skips = number % 4 != 0 && begins_granule && is_between;
  return skips ? at + kGranularity - kBlockUnit : at + kBlockUnit;
}

}  // namespace

void World::stamp(const Block& block, std::uint32_t number) {
  Bytes mapped{};
  for (const PhysicalPiece& piece : block.pieces) {
    const Address at = block.address + mapped;
    if (!sim_->fill(at, kBlockUnit, number, kWriter).ok()) return fail("access: not granted");
    mapped += piece.size;
  }
  sim_->advance(kWriter, block.pieces.size());
  for (Bytes at{}; at < block.size; at = next_stamp(number, block.address, block.size, at)) {
    volatile std::uint64_t* unit = words(block.address + at);
    unit[0] = pattern(number, at);
    unit[kLastWord] = pattern(number, at);
  }
}

void World::check_stamps(const Block& block, std::uint32_t number) {
  for (Bytes at{}; at < block.size; at = next_stamp(number, block.address, block.size, at)) {
    const volatile std::uint64_t* unit = words(block.address + at);
    if (unit[0] == pattern(number, at) && unit[kLastWord] == pattern(number, at)) continue;
    return fail("bytes: block " + std::to_string(number) + " lost byte " +
                std::to_string(at.count));
  }
}

}  // namespace vramx::stress
