// The interface as its user sees it: of the right version, and its sums and pieces right.
#include <vector>

#include "process/process.h"

namespace vramx::process_checks {
namespace allocators_claims {
namespace {

constexpr Bytes kPiece = 8_MiB;

void the_handle_leads_to_the_interface(Fixture& fixture) {
  const AllocatorsHandle& handle = fixture.devices.handle();
  EXPECT(handle.fits() && handle.allocators == &fixture.core);
}

void a_handle_of_other_headers_does_not_fit(Fixture& fixture) {
  AllocatorsHandle older = fixture.devices.handle();
  --older.version;
  AllocatorsHandle wider = fixture.devices.handle();
  wider.layout += sizeof(void*);
  EXPECT(!older.fits() && !wider.fits() && !AllocatorsHandle{}.fits());
}

void sums_are_over_all_that_were_started(Fixture& fixture) {
  Allocators& core = fixture.core;
  const Address block = fixture.take(0, kPiece);
  REQUIRE(block && fixture.take(3, kPiece * 2));
  EXPECT(core.held(-1) == kPiece * 3 && core.held(3) == kPiece * 2);
  EXPECT(core.allocated(-1) == kPiece * 3);
  fixture.free(block);
  EXPECT(core.allocated(-1) == kPiece * 2);
  const CoreReport report = core.defragment(-1);
  EXPECT(report.released == kPiece && report.extents_before == 1 && report.extents_after == 0);
  EXPECT(core.held(-1) == kPiece * 2);
}

void peaks_are_reset(Fixture& fixture) {
  Allocators& core = fixture.core;
  fixture.free(fixture.take(0, kPiece));
  EXPECT(core.stats(0).allocated_bytes[0].peak == static_cast<std::int64_t>(kPiece.count));
  core.reset_peak_stats(0);
  EXPECT(core.stats(0).allocated_bytes[0].peak == 0);
  core.reset_accumulated_stats(0);
  EXPECT(core.stats(0).allocated_bytes[0].allocated == 0);
}

void peaks_of_an_interval_leave_the_whole_alone(Fixture& fixture) {
  Allocators& core = fixture.core;
  const auto piece = static_cast<std::int64_t>(kPiece.count);
  fixture.free(fixture.take(0, kPiece * 2));
  EXPECT(core.take_interval_stats(0).allocated_bytes[0].peak == piece * 2);
  fixture.free(fixture.take(0, kPiece));
  EXPECT(core.stats(0).allocated_bytes[0].peak == piece * 2);
  EXPECT(core.take_interval_stats(0).allocated_bytes[0].peak == piece);
  EXPECT(core.take_interval_stats(0).allocated_bytes[0].peak == 0);
  EXPECT(core.stats(0).allocated_bytes[0].peak == piece * 2);
  EXPECT(core.stats(0).reserved_bytes.peak == piece * 2);
  core.reset_peak_stats(0);
  EXPECT(core.stats(0).allocated_bytes[0].peak == 0);
}

void what_could_be_had_is_asked_of_the_device(Fixture& fixture) {
  Allocators& core = fixture.core;
  EXPECT(core.largest_obtainable(0) == Bytes{});  // not started: nobody knows
  REQUIRE(static_cast<bool>(fixture.take(0, kPiece)));
  EXPECT(core.largest_obtainable(0) == kCapacity - kPiece);
}

// Two pieces that touch are one segment; the alias, and what lies behind the hole under it, begin
// others.
void pieces_say_where_segments_begin(Fixture& fixture) {
  Allocators& core = fixture.core;
  std::vector<Address> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(fixture.take(0, kPiece));
  fixture.free(blocks[0]);
  fixture.free(blocks[2]);
  fixture.devices.set_limit(0, kPiece * 4);
  const Address stitched = fixture.take(0, kPiece * 2);
  REQUIRE(static_cast<bool>(stitched));
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

void neighbours_are_one_segment(Fixture& fixture) {
  Allocators& core = fixture.core;
  REQUIRE(fixture.take(0, kPiece) && fixture.take(0, kPiece));
  std::vector<bool> begins;
  core.for_each_piece(
      0,
      [](void* context, const CorePiece& piece) {
        static_cast<std::vector<bool>*>(context)->push_back(piece.begins_segment);
      },
      &begins);
  EXPECT((begins == std::vector<bool>{true, false}));
}

constexpr Check<Fixture> kChecks[] = {
    {"the handle leads to the interface", the_handle_leads_to_the_interface},
    {"a handle of other headers does not fit", a_handle_of_other_headers_does_not_fit},
    {"sums are over all that were started", sums_are_over_all_that_were_started},
    {"peaks are reset", peaks_are_reset},
    {"peaks of an interval leave the whole alone", peaks_of_an_interval_leave_the_whole_alone},
    {"what could be had is asked of the device", what_could_be_had_is_asked_of_the_device},
    {"pieces say where segments begin", pieces_say_where_segments_begin},
    {"neighbours are one segment", neighbours_are_one_segment},
};

}  // namespace
}  // namespace allocators_claims

void check_allocators() { run_checks("interface", allocators_claims::kChecks); }

}  // namespace vramx::process_checks
