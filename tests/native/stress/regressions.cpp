// What the random part once found, as it was shrunk: each was a defect of the core.
#include "stress/suite.h"

namespace vramx::stress {
namespace {

// Fresh memory joined the extent of another stream, and the request for it waited for that stream.
CHECK(Nothing, growth_beside_foreign_memory_waits_for_nobody) {
  const Scenario scenario{
      .setup = {.capacity = Bytes{8388608}, .cross_stream = CrossStream::kNever},
      .steps = {
          {StepKind::kAllocate, 8, 2, 1},
          {StepKind::kFree, 8, 0, 0},
          {StepKind::kAdvanceAll, 0, 0, 0},
          {StepKind::kAllocate, 9, 1, 65536},
      }};
  EXPECT(first_failure(scenario) == "");
}

// An alias hit looked at the first extent under each piece only.
CHECK(Nothing, an_alias_is_not_reused_over_foreign_memory) {
  const Scenario scenario{
      .setup = {.capacity = Bytes{2097152}, .cross_stream = CrossStream::kNever},
      .steps = {
          {StepKind::kAllocate, 65, 1, 1889},
          {StepKind::kAllocate, 66, 1, 1889},
          {StepKind::kAllocate, 67, 1, 15784},
          {StepKind::kAllocate, 68, 0, 15784},
          {StepKind::kAllocate, 69, 1, 15784},
          {StepKind::kAllocate, 70, 0, 15784},
      }};
  EXPECT(first_failure(scenario) == "");
}

// Work queued since the last free was not covered by the event that a forgotten stream leaves.
CHECK(Nothing, a_block_that_outlives_its_stream_waits_for_its_work) {
  const Scenario scenario{.setup = {.capacity = Bytes{1048576}},
                          .steps = {
                              {StepKind::kAllocate, 96, 1, 14},
                              {StepKind::kAllocate, 97, 2, 94},
                              {StepKind::kReplaceStream, 0, 2, 0},
                              {StepKind::kFree, 97, 0, 0},
                              {StepKind::kAllocate, 103, 1, 512},
                          }};
  EXPECT(first_failure(scenario) == "");
}

// Idle aliases were collected when mappings were short, but not when addresses were.
CHECK(Nothing, idle_aliases_make_room_for_addresses) {
  const Scenario scenario{.setup = {.capacity = Bytes{8388608}, .alias_factor = 2},
                          .steps = {
                              {StepKind::kAllocate, 42, 2, 1},
                              {StepKind::kAllocate, 43, 1, 1},
                              {StepKind::kAllocate, 86, 3, 80459},
                              {StepKind::kAllocate, 87, 2, 840497},
                              {StepKind::kAllocate, 93, 3, 383057},
                              {StepKind::kFree, 87, 0, 0},
                              {StepKind::kAllocate, 94, 3, 2768570},
                              {StepKind::kFree, 94, 0, 0},
                              {StepKind::kAllocate, 98, 3, 12849},
                              {StepKind::kAllocate, 99, 3, 4194304},
                              {StepKind::kFree, 86, 0, 0},
                              {StepKind::kAllocate, 111, 2, 2365293},
                              {StepKind::kAllocate, 114, 1, 393216},
                              {StepKind::kFree, 114, 0, 0},
                              {StepKind::kAllocate, 116, 3, 57035},
                              {StepKind::kDefragment, 0, 0, 0},
                          }};
  EXPECT(first_failure(scenario) == "");
}

// Extents that were kept apart for their streams stayed apart after all work was done, and cut
// chunks that were wholly free.
CHECK(Nothing, idle_memory_of_several_streams_is_one) {
  const Scenario scenario{.setup = {.capacity = Bytes{1048576},
                                    .cross_stream = CrossStream::kNever,
                                    .relief_blocks = 1},
                          .steps = {
                              {StepKind::kAllocate, 835, 1, 471508},
                              {StepKind::kAllocate, 837, 2, 155607},
                              {StepKind::kAllocate, 838, 2, 143149},
                              {StepKind::kAllocate, 839, 1, 524288},
                              {StepKind::kAllocate, 840, 0, 8},
                              {StepKind::kFree, 840, 0, 0},
                              {StepKind::kAllocate, 841, 2, 476},
                          }};
  EXPECT(first_failure(scenario) == "");
}

// Growth was measured against one gap, behind an extent that was to be part of the block, and then
// made in a lower one that was just large enough for the rest.
CHECK(Nothing, growth_goes_where_it_was_measured) {
  const Scenario scenario{.setup = {.capacity = Bytes{8388608},
                                    .cross_stream = CrossStream::kAlways,
                                    .alias_mappings = 18},
                          .steps = {
                              {StepKind::kAllocate, 10, 0, 21868},
                              {StepKind::kAllocate, 11, 0, 1900544},
                              {StepKind::kAllocate, 12, 0, 902584},
                              {StepKind::kAllocate, 14, 0, 32570},
                              {StepKind::kAllocate, 18, 0, 2097152},
                              {StepKind::kAllocate, 23, 0, 32075},
                              {StepKind::kAllocate, 26, 0, 1096168},
                              {StepKind::kAllocate, 30, 0, 1503242},
                              {StepKind::kAllocate, 171, 0, 119739},
                              {StepKind::kAllocate, 173, 0, 89995},
                              {StepKind::kFree, 171, 0, 0},
                              {StepKind::kFree, 30, 0, 0},
                              {StepKind::kFree, 173, 0, 0},
                              {StepKind::kFree, 11, 0, 0},
                              {StepKind::kFree, 18, 0, 0},
                              {StepKind::kFree, 26, 0, 0},
                              {StepKind::kAllocate, 215, 0, 1056881},
                              {StepKind::kAllocate, 278, 0, 57142},
                              {StepKind::kAllocate, 280, 0, 82677},
                              {StepKind::kAllocate, 300, 0, 194213},
                              {StepKind::kAllocate, 301, 0, 103094},
                              {StepKind::kFree, 215, 0, 0},
                              {StepKind::kAllocate, 317, 0, 1611341},
                              {StepKind::kAllocate, 324, 0, 407838},
                              {StepKind::kAllocate, 326, 0, 458417},
                              {StepKind::kAllocate, 329, 0, 419808},
                              {StepKind::kAllocate, 335, 0, 705228},
                              {StepKind::kAllocate, 353, 0, 1400118},
                              {StepKind::kAllocate, 354, 0, 429837},
                              {StepKind::kFree, 335, 0, 0},
                              {StepKind::kAllocate, 424, 0, 557431},
                              {StepKind::kAllocate, 429, 0, 782935},
                              {StepKind::kFree, 424, 0, 0},
                              {StepKind::kDefragment, 0, 0, 0},
                              {StepKind::kAllocate, 511, 0, 482914},
                              {StepKind::kFree, 511, 0, 0},
                              {StepKind::kAllocate, 513, 0, 513939},
                          }};
  EXPECT(first_failure(scenario) == "");
}

}  // namespace

}  // namespace vramx::stress
