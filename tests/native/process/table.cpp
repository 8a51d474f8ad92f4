// The table as its user sees it: complete, of the right version, and its sums and pieces right.
#include <cstring>
#include <vector>

#include "process/process.h"

namespace vramx::process_checks {
namespace table_claims {
namespace {

constexpr Bytes kPiece = 8_MiB;

void the_table_is_complete(Fixture& fixture) {
  EXPECT(fixture.table.version == CoreTable::kVersion);
  EXPECT(fixture.table.size_bytes == sizeof(CoreTable));
  EXPECT(fixture.table.self == &fixture.devices);
  // Behind `self` there are only functions.
  constexpr std::size_t kFirst = offsetof(CoreTable, allocate) / sizeof(void*);
  std::array<void*, sizeof(CoreTable) / sizeof(void*)> words{};
  std::memcpy(words.data(), &fixture.table, sizeof fixture.table);
  for (std::size_t i = kFirst; i < words.size(); ++i) EXPECT(words[i] != nullptr);
}

void sums_are_over_all_that_were_started(Fixture& fixture) {
  const CoreTable& table = fixture.table;
  const Address block = fixture.take(0, kPiece);
  REQUIRE(block && fixture.take(3, kPiece * 2));
  EXPECT(table.held(table.self, -1) == kPiece * 3 && table.held(table.self, 3) == kPiece * 2);
  EXPECT(table.allocated(table.self, -1) == kPiece * 3);
  fixture.free(block);
  EXPECT(table.allocated(table.self, -1) == kPiece * 2);
  const CoreReport report = table.defragment(table.self, -1);
  EXPECT(report.released == kPiece && report.extents_before == 1 && report.extents_after == 0);
  EXPECT(table.held(table.self, -1) == kPiece * 2);
}

void peaks_are_reset(Fixture& fixture) {
  const CoreTable& table = fixture.table;
  fixture.free(fixture.take(0, kPiece));
  EXPECT(table.stats(table.self, 0).allocated_bytes[0].peak ==
         static_cast<std::int64_t>(kPiece.count));
  table.reset_peak_stats(table.self, 0);
  EXPECT(table.stats(table.self, 0).allocated_bytes[0].peak == 0);
  table.reset_accumulated_stats(table.self, 0);
  EXPECT(table.stats(table.self, 0).allocated_bytes[0].allocated == 0);
}

void what_could_be_had_is_asked_of_the_device(Fixture& fixture) {
  const CoreTable& table = fixture.table;
  EXPECT(table.largest_obtainable(table.self, 0) == Bytes{});  // not started: nobody knows
  REQUIRE(static_cast<bool>(fixture.take(0, kPiece)));
  EXPECT(table.largest_obtainable(table.self, 0) == kCapacity - kPiece);
}

// Two pieces that touch are one segment; the alias, and what lies behind the hole under it, begin
// others.
void pieces_say_where_segments_begin(Fixture& fixture) {
  const CoreTable& table = fixture.table;
  std::vector<Address> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(fixture.take(0, kPiece));
  fixture.free(blocks[0]);
  fixture.free(blocks[2]);
  fixture.devices.set_limit(0, kPiece * 4);
  const Address stitched = fixture.take(0, kPiece * 2);
  REQUIRE(static_cast<bool>(stitched));
  std::vector<CorePiece> pieces;
  table.for_each_piece(
      table.self, 0,
      [](void* context, const CorePiece& piece) {
        static_cast<std::vector<CorePiece>*>(context)->push_back(piece);
      },
      &pieces);
  REQUIRE(pieces.size() == 3);
  for (const CorePiece& piece : pieces) {
    EXPECT(piece.begins_segment && piece.block.device == 0);
    EXPECT(piece.block.address == piece.begin);
  }
  EXPECT(pieces[0].begin == blocks[1] && pieces[1].begin == blocks[3]);
  EXPECT(pieces[2].begin == stitched && pieces[2].size == kPiece * 2);
}

void neighbours_are_one_segment(Fixture& fixture) {
  const CoreTable& table = fixture.table;
  REQUIRE(fixture.take(0, kPiece) && fixture.take(0, kPiece));
  std::vector<bool> begins;
  table.for_each_piece(
      table.self, 0,
      [](void* context, const CorePiece& piece) {
        static_cast<std::vector<bool>*>(context)->push_back(piece.begins_segment);
      },
      &begins);
  EXPECT((begins == std::vector<bool>{true, false}));
}

constexpr Check<Fixture> kChecks[] = {
    {"the table is complete", the_table_is_complete},
    {"sums are over all that were started", sums_are_over_all_that_were_started},
    {"peaks are reset", peaks_are_reset},
    {"what could be had is asked of the device", what_could_be_had_is_asked_of_the_device},
    {"pieces say where segments begin", pieces_say_where_segments_begin},
    {"neighbours are one segment", neighbours_are_one_segment},
};

}  // namespace
}  // namespace table_claims

void check_table() { run_checks("table", table_claims::kChecks); }

}  // namespace vramx::process_checks
