// Decides what is done about a request that no extent of its stream fits. Pure: it reads the
// books and changes nothing, calls no driver and takes no lock.
//
//   A  a run of free memory that is large enough
//   B  an alias that exists, over memory that is free
//   C  a new alias over free pieces
//   D  growth: by a contiguous block, or by what the pieces of an alias lack
//
// Which memory is free to the request is the reach's to say. Looks at every extent at worst.
#pragma once

#include <optional>
#include <vector>

#include "core/device_state.h"
#include "core/plan.h"
#include "core/stitch_plan.h"

namespace vramx {

class Planner {
 public:
  explicit Planner(const DeviceState& state) : state_(state) {}

  // Empty where nothing fits.
  Plan find(const Request& request) const;

  // What could be put together from free pieces alone.
  Bytes largest_stitch(const Request& request) const;
  bool may_take(const TagSet& tags, const Request& request) const;
  // Aliases that may be unmapped, of as many mappings or somewhat more.
  std::vector<AliasId> idle_aliases(std::size_t mappings) const;
  // Up to this size the zone of small chunks is the first place for a block: 64 KiB where a chunk
  // is 2 MiB.
  static Bytes tiny_size(Bytes granularity) { return {granularity.count / 32}; }

 private:
  Plan run(const Request& request) const;
  Plan tiny(const Request& request) const;
  Plan alias(const Request& request) const;
  Plan growth(const Request& request, Zone zone) const;
  Plan stitch(const Request& request) const;
  Plan stitch_of(const StitchPlan& pieces, const Request& request) const;
  Plan with_alias_room(Plan plan) const;
  StitchPlan pieces_for(const Request& request) const;
  Growth growth_by(Zone zone, Bytes bytes, const Request& request) const;
  bool has_few_holes() const;
  void add_waits(Plan* plan, const Request& request) const;
  template <class Visit>
  void for_each_extent_in(const Piece& piece, Visit visit) const;

  const DeviceState& state_;
};

}  // namespace vramx
