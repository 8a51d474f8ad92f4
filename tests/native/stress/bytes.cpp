// The byte patterns of blocks: each unit of 512 bytes carries a word at its start and one at its
// end, of the block's number and the unit's place, written and read through the block's own
// address.
//
// Two words a unit and not all of it: the allocator deals in no finer size, and a scenario then
// costs two cache lines a unit. Before that the device fills the first words under each mapping, so
// that an address without access is a failed claim and not a fault of this program.
#include <algorithm>

#include "core/types.h"
#include "stress/world.h"

namespace vramx::stress {
namespace {

// Fills are queued here, apart from the streams whose order is under test.
constexpr Stream kWriter{~std::uint64_t{1}};
constexpr std::uint64_t kLastWord = kBlockUnit.count / sizeof(std::uint64_t) - 1;

std::uint64_t pattern(std::uint32_t number, std::uint64_t unit) {
  return (std::uint64_t{number} << 32 | unit) * 0x9E3779B97F4A7C15;
}

volatile std::uint64_t* words(Address at) {
  return reinterpret_cast<volatile std::uint64_t*>(at.value);
}

}  // namespace

void World::stamp(const Block& block, std::uint32_t number) {
  Address at = block.address;
  for (const PhysicalPiece& piece : block.pieces) {
    if (!sim_->fill(at, kBlockUnit, number, kWriter).ok()) return fail("access: not granted");
    at = at + piece.size;
  }
  at = block.address;
  for (std::uint64_t unit = 0; unit < block.size / kBlockUnit; ++unit, at = at + kBlockUnit) {
    words(at)[0] = pattern(number, unit);
    words(at)[kLastWord] = pattern(number, unit);
  }
}

void World::check_stamps(const Block& block, std::uint32_t number) {
  Address at = block.address;
  for (std::uint64_t unit = 0; unit < block.size / kBlockUnit; ++unit, at = at + kBlockUnit) {
    if (words(at)[0] == pattern(number, unit) && words(at)[kLastWord] == pattern(number, unit)) {
      continue;
    }
    return fail("bytes: block " + std::to_string(number) + " lost unit " + std::to_string(unit));
  }
}

}  // namespace vramx::stress
