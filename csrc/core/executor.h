// Carries a plan out: sets aside what it needs, calls the driver without the lock, and then commits
// or aborts. There is no other way back.
//
//   claim    under the lock: pieces leave the free memory, a gap and addresses are taken
//   run      without it: waits first, then chunks, then the alias; undone in reverse on failure
//   commit   under the lock: the new chunks are the arena's, the block is a chain of spans
//   abort    under the lock: everything is as before
//
// A driver that refuses even to undo leaves something behind, which is noted and tried again when
// memory is given back to the device.
#pragma once

#include <vector>

#include "core/device_state.h"
#include "core/mapper.h"
#include "core/plan.h"

namespace vramx {

class Executor {
 public:
  explicit Executor(DeviceState& state) : state_(state) {}

  // What could not be done; the plan has had no effect then.
  enum class Refused : std::uint8_t { kNothing, kWait, kGrowth, kAlias };
  struct Outcome {
    Refused refused = Refused::kNothing;
    Status status;  // the driver's
    Placement placement{};
  };
  Outcome carry_out(const Plan& plan, const Request& request, Lock& lock);

  // Unmaps aliases that no block lives in; says how many. No block moves in meanwhile, and those
  // that the driver refuses to unmap stay.
  std::size_t unmap(const std::vector<AliasId>& ids, Lock& lock, Bytes* addresses = nullptr);
  void retry_leftovers(Lock& lock);
  // Sets access for a peer that was let in while the mapping was being made.
  Status catch_up_access(const Piece& range, std::uint64_t generation, Lock& lock);

 private:
  // What is set aside for a plan.
  struct Claim {
    struct Part {
      SpanId span = kNoId;
      TagSet tags{};  // to give it back as it was
    };
    std::vector<Part> parts{};  // in the order of the block; the new memory, once it is there, too
    std::size_t growth_at = 0;
    SpanId building = kNoId;
    Piece growth{};
    std::vector<MappedChunk> chunks{};  // of the growth
    std::vector<ChunkId> mapped{};      // of the alias
    Piece alias{};
  };

  Claim claim(const Plan& plan, const Request& request);
  void hold(const Piece& piece, std::vector<Claim::Part>* parts);
  Status wait(const Plan& plan, const Request& request, Lock& lock);
  Status grow(const Plan& plan, Claim* claim, Lock& lock);
  bool has_room(Bytes growth) const;
  void commit_growth(const Plan& plan, Claim* claim, Lock& lock);
  Status map_alias(Claim* claim, Placement* placement, Lock& lock);
  std::vector<ChunkId> chunks_under(const Claim& claim) const;
  Placement commit(const Plan& plan, const Request& request, const Claim& claim,
                   Placement placement);
  void abort(const Plan& plan, const Request& request, const Claim& claim);
  void note_leftovers(const MapOutcome& outcome, const Piece& range, SpanId building);
  void give_up_range(const Piece& range, SpanId building);

  DeviceState& state_;
};

}  // namespace vramx
