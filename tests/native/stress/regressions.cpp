// What the random part once found, as it was shrunk: each was a defect of the core.
#include "stress/suite.h"

namespace vramx::stress {
namespace {

using enum StepKind;

// Fresh memory joined the extent of another stream, and the request for it waited for that stream.
CHECK(Nothing, growth_beside_foreign_memory_waits_for_nobody) {
  const Scenario scenario{
      .setup = {.capacity = Bytes{8388608}, .cross_stream = CrossStream::kNever},
      .steps = {{kAllocate, 8, 2, 1},
                {kFree, 8, 0, 0},
                {kAdvanceAll, 0, 0, 0},
                {kAllocate, 9, 1, 65536}}};
  EXPECT(first_failure(scenario) == "");
}

// An alias hit looked at the first extent under each piece only.
CHECK(Nothing, an_alias_is_not_reused_over_foreign_memory) {
  const Scenario scenario{
      .setup = {.capacity = Bytes{2097152}, .cross_stream = CrossStream::kNever},
      .steps = {{kAllocate, 65, 1, 1889},
                {kAllocate, 66, 1, 1889},
                {kAllocate, 67, 1, 15784},
                {kAllocate, 68, 0, 15784},
                {kAllocate, 69, 1, 15784},
                {kAllocate, 70, 0, 15784}}};
  EXPECT(first_failure(scenario) == "");
}

// Work queued since the last free was not covered by the event that a forgotten stream leaves.
CHECK(Nothing, a_block_that_outlives_its_stream_waits_for_its_work) {
  const Scenario scenario{.setup = {.capacity = Bytes{1048576}},
                          .steps = {{kAllocate, 96, 1, 14},
                                    {kAllocate, 97, 2, 94},
                                    {kReplaceStream, 0, 2, 0},
                                    {kFree, 97, 0, 0},
                                    {kAllocate, 103, 1, 512}}};
  EXPECT(first_failure(scenario) == "");
}

// Idle aliases were collected when mappings were short, but not when addresses were.
CHECK(Nothing, idle_aliases_make_room_for_addresses) {
  const Scenario scenario{.setup = {.capacity = Bytes{8388608}, .alias_factor = 2},
                          .steps = {{kAllocate, 42, 2, 1},
                                    {kAllocate, 43, 1, 1},
                                    {kAllocate, 86, 3, 80459},
                                    {kAllocate, 87, 2, 840497},
                                    {kAllocate, 93, 3, 383057},
                                    {kFree, 87, 0, 0},
                                    {kAllocate, 94, 3, 2768570},
                                    {kFree, 94, 0, 0},
                                    {kAllocate, 98, 3, 12849},
                                    {kAllocate, 99, 3, 4194304},
                                    {kFree, 86, 0, 0},
                                    {kAllocate, 111, 2, 2365293},
                                    {kAllocate, 114, 1, 393216},
                                    {kFree, 114, 0, 0},
                                    {kAllocate, 116, 3, 57035},
                                    {kDefragment, 0, 0, 0}}};
  EXPECT(first_failure(scenario) == "");
}

// Extents that were kept apart for their streams stayed apart after all work was done, and cut
// chunks that were wholly free.
CHECK(Nothing, idle_memory_of_several_streams_is_one) {
  const Scenario scenario{.setup = {.capacity = Bytes{1048576},
                                    .cross_stream = CrossStream::kNever,
                                    .relief_blocks = 1},
                          .steps = {{kAllocate, 835, 1, 471508},
                                    {kAllocate, 837, 2, 155607},
                                    {kAllocate, 838, 2, 143149},
                                    {kAllocate, 839, 1, 524288},
                                    {kAllocate, 840, 0, 8},
                                    {kFree, 840, 0, 0},
                                    {kAllocate, 841, 2, 476}}};
  EXPECT(first_failure(scenario) == "");
}

// Growth was measured against one gap, behind an extent that was to be part of the block, and then
// made in a lower one that was just large enough for the rest.
CHECK(Nothing, growth_goes_where_it_was_measured) {
  const Scenario scenario{.setup = {.capacity = Bytes{8388608},
                                    .cross_stream = CrossStream::kAlways,
                                    .alias_mappings = 18},
                          .steps = {{kAllocate, 10, 0, 21868},
                                    {kAllocate, 11, 0, 1900544},
                                    {kAllocate, 12, 0, 902584},
                                    {kAllocate, 14, 0, 32570},
                                    {kAllocate, 18, 0, 2097152},
                                    {kAllocate, 23, 0, 32075},
                                    {kAllocate, 26, 0, 1096168},
                                    {kAllocate, 30, 0, 1503242},
                                    {kAllocate, 171, 0, 119739},
                                    {kAllocate, 173, 0, 89995},
                                    {kFree, 171, 0, 0},
                                    {kFree, 30, 0, 0},
                                    {kFree, 173, 0, 0},
                                    {kFree, 11, 0, 0},
                                    {kFree, 18, 0, 0},
                                    {kFree, 26, 0, 0},
                                    {kAllocate, 215, 0, 1056881},
                                    {kAllocate, 278, 0, 57142},
                                    {kAllocate, 280, 0, 82677},
                                    {kAllocate, 300, 0, 194213},
                                    {kAllocate, 301, 0, 103094},
                                    {kFree, 215, 0, 0},
                                    {kAllocate, 317, 0, 1611341},
                                    {kAllocate, 324, 0, 407838},
                                    {kAllocate, 326, 0, 458417},
                                    {kAllocate, 329, 0, 419808},
                                    {kAllocate, 335, 0, 705228},
                                    {kAllocate, 353, 0, 1400118},
                                    {kAllocate, 354, 0, 429837},
                                    {kFree, 335, 0, 0},
                                    {kAllocate, 424, 0, 557431},
                                    {kAllocate, 429, 0, 782935},
                                    {kFree, 424, 0, 0},
                                    {kDefragment, 0, 0, 0},
                                    {kAllocate, 511, 0, 482914},
                                    {kFree, 511, 0, 0},
                                    {kAllocate, 513, 0, 513939}}};
  EXPECT(first_failure(scenario) == "");
}

}  // namespace
}  // namespace vramx::stress
