// A scenario: a device, an allocator's configuration, and the steps that are taken on them. Plain
// values, so that a scenario can be run again, cut down to what still fails, and printed as C++.
//
// Steps name blocks by the number that their allocation was given and not by position, so that one
// step can be taken out and the others still mean what they meant. A step whose subject does not
// exist (a block that was never placed, a stream that already captures) does nothing.
//
// A step may be put off until the allocator, in a later one, calls the driver without its lock:
// then another thread takes it, in the middle of the call.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/config.h"
#include "core/units.h"
#include "driver/sim_calls.h"

namespace vramx::stress {

constexpr Bytes kGranularity{64 << 10};
constexpr std::uint32_t kStreams = 8;  // of every origin: streams.h

// What is broken on purpose, to prove that the checks see it: a promise of the driver, below what
// the checks take for granted, or what keeps others off while a call is under way (unguarded.h).
enum class Defect : std::uint8_t {
  kNone,
  kWaitDoesNothing,     // wait_event orders nothing
  kQueryIsHasty,        // query_event says that unfinished work has run
  kAliasOfWrongChunk,   // a second mapping shows another chunk
  kAccessNotGranted,    // set_access grants nothing
  kReleaseDoesNothing,  // release_chunk keeps the memory
  kEventAtTheTake,      // an event stands for what is queued when it is waited for
  kStreamsByHandle,     // a stream is known by its handle, whoever has it now
  kDeviceMissing,       // what another device's stream does is recorded on this one
  kEntryNotHeld,        // a stream's entry is held by blocks alone, by no call that is under way
  kGrowthNotCounted,    // what is being mapped does not count against the limit
};

struct Setup {
  Bytes capacity{4 << 20};
  Bytes granularity = kGranularity;
  CrossStream cross_stream = CrossStream::kUnderPressure;
  bool repeats_placements = true;
  std::uint64_t alias_mappings = 128 * 1024;
  std::uint64_t alias_factor = 1024;  // addresses for aliases, in capacities
  std::uint64_t mapping_ceiling = 520192;
  std::uint32_t relief_blocks = 0;  // what the relief callback frees, oldest first
  std::uint32_t check_every = 1;    // steps between two recomputations of all invariants
  Defect defect = Defect::kNone;
};

enum class StepKind : std::uint8_t {
  kAllocate,       // block, stream, amount: bytes
  kFree,           // block
  kFreeNothing,    // block, amount: frees an address that many bytes into the block
  kRecordStream,   // block, stream
  kSubmit,         // stream, amount: items
  kAdvance,        // stream, amount: items
  kAdvanceAll,     //
  kReplaceStream,  // stream, amount: 1 where the new stream gets the old one's name
  kBeginCapture,   // stream
  kEndCapture,     // stream
  kTrim,           //
  kDefragment,     //
  kSetLimit,       // amount: bytes
  kFailCall,       // block: the kind of call, or kAnyCall; amount: which from now on
  kFailExhausted,  // the same, with kOutOfMemory as the reason
  kClearFaults,    //
  kInspect,        // all bytes of all blocks, and all invariants
};

constexpr std::uint32_t kAnyCall = kCallKinds;

struct Step {
  StepKind kind = StepKind::kInspect;
  std::uint32_t block = 0;
  std::uint32_t stream = 0;
  std::uint64_t amount = 0;
  // 0: taken at once; n: at the n-th chance from now on. A call is one before it is carried out and
  // another one after that.
  std::uint32_t meanwhile = 0;
  // Of one that is put off: n: at its own n-th chance the step in whose middle it came goes on, to
  // the next chance or its end.
  std::uint32_t pause = 0;
};

struct Scenario {
  Setup setup;
  std::vector<Step> steps;
};

// A function that runs the scenario and expects no failure, as C++ to paste into regressions.cpp.
std::string as_test_body(const Scenario& scenario, std::string_view name);

}  // namespace vramx::stress
