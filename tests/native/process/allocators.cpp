// The interface as its user sees it: of the right version, and its sums and pieces right.
#include <vector>

#include "process/process.h"

namespace vramx::process_checks::allocators_claims {

constexpr Bytes kPiece = 8_MiB;

CHECK(Fixture, the_handle_leads_to_the_interface) {
  const AllocatorsHandle& handle = devices.handle();
  EXPECT(handle.fits() && handle.allocators == &core);
}

CHECK(Fixture, a_handle_of_other_headers_does_not_fit) {
  AllocatorsHandle older = devices.handle();
  --older.version;
  AllocatorsHandle wider = devices.handle();
  wider.layout += sizeof(void*);
  EXPECT(!older.fits() && !wider.fits() && !AllocatorsHandle{}.fits());
}

CHECK(Fixture, sums_are_over_all_that_were_started) {
  const Address block = take(0, kPiece);
  REQUIRE(block && take(3, kPiece * 2));
  EXPECT(core.held(-1) == kPiece * 3 && core.held(3) == kPiece * 2);
  EXPECT(core.allocated(-1) == kPiece * 3);
  free(block);
  EXPECT(core.allocated(-1) == kPiece * 2);
  const CoreReport report = core.defragment(-1);
  EXPECT(report.released == kPiece && report.extents_before == 1 && report.extents_after == 0);
  EXPECT(core.held(-1) == kPiece * 2);
}

CHECK(Fixture, peaks_are_reset) {
  free(take(0, kPiece));
  EXPECT(core.stats(0).allocated_bytes[0].peak == static_cast<std::int64_t>(kPiece.count));
  core.reset_peak_stats(0);
  EXPECT(core.stats(0).allocated_bytes[0].peak == 0);
  core.reset_accumulated_stats(0);
  EXPECT(core.stats(0).allocated_bytes[0].allocated == 0);
}

CHECK(Fixture, peaks_of_an_interval_leave_the_whole_alone) {
  const auto piece = static_cast<std::int64_t>(kPiece.count);
  free(take(0, kPiece * 2));
  EXPECT(core.take_interval_stats(0).allocated_bytes[0].peak == piece * 2);
  free(take(0, kPiece));
  EXPECT(core.stats(0).allocated_bytes[0].peak == piece * 2);
  EXPECT(core.take_interval_stats(0).allocated_bytes[0].peak == piece);
  EXPECT(core.take_interval_stats(0).allocated_bytes[0].peak == 0);
  EXPECT(core.stats(0).allocated_bytes[0].peak == piece * 2);
  EXPECT(core.stats(0).reserved_bytes.peak == piece * 2);
  core.reset_peak_stats(0);
  EXPECT(core.stats(0).allocated_bytes[0].peak == 0);
}

CHECK(Fixture, what_could_be_had_is_asked_of_the_device) {
  EXPECT(core.largest_obtainable(0) == Bytes{});  // not started: nobody knows
  REQUIRE(take(0, kPiece));
  EXPECT(core.largest_obtainable(0) == kCapacity - kPiece);
}

// Two pieces that touch are one segment; the alias, and what lies behind the hole under it, begin
// others.
CHECK(Fixture, pieces_say_where_segments_begin) {
  std::vector<Address> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(take(0, kPiece));
  free(blocks[0]);
  free(blocks[2]);
  devices.set_limit(0, kPiece * 4);
  const Address stitched = take(0, kPiece * 2);
  REQUIRE(stitched);
  std::vector<CorePiece> pieces;
  core.for_each_piece(
      0,
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

CHECK(Fixture, neighbours_are_one_segment) {
  REQUIRE(take(0, kPiece) && take(0, kPiece));
  std::vector<bool> begins;
  core.for_each_piece(
      0,
      [](void* context, const CorePiece& piece) {
        static_cast<std::vector<bool>*>(context)->push_back(piece.begins_segment);
      },
      &begins);
  EXPECT((begins == std::vector<bool>{true, false}));
}

}  // namespace vramx::process_checks::allocators_claims
