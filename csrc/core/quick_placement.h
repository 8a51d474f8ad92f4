// The fast path: where a request goes when memory that its stream may have at once fits it.
//
// In a program that repeats itself, a large request goes where its counterpart went the last time
// round. Else it takes the best fit of its stream's extents, or, for a large block that stays and
// fits badly, a place beside its kin. A tiny block looks among the small chunks alone. Makes no
// driver call. Not thread-safe. O(log extents).
#pragma once

#include <array>

#include "core/device_state.h"
#include "core/lifetimes.h"
#include "core/plan.h"
#include "core/planner.h"
#include "core/recurrence.h"

namespace vramx {

class QuickPlacement {
 public:
  explicit QuickPlacement(DeviceState& state)
      : state_(state),
        tiny_(Planner::tiny_size(state.granularity)),
        recurrence_(state.grounds.arena.begin) {}

  // No address where nothing fits. `ask` finds out what is over, and may let the lock go.
  template <class Ask>
  Placement take(Bytes size, StreamIndex stream, Ask ask) {
    if (recurrence_.is_running()) {
      Placement placement = take_as_before(size, stream);
      if (!placement.address && is_kept_waiting(size, stream) && may_ask()) {
        ask();
        placement = take_as_before(size, stream);
        if (!placement.address) pause_ = kPause;
      }
      if (placement.address) return placement;
    }
    const Zone zone = size <= tiny_ ? Zone::kSmall : Zone::kLarge;
    const SpanId extent = state_.arena.best_fit(zone, size, stream);
    if (extent == kNoId) return {};
    const SpanId span = size < Lifetimes::kSmallest ? state_.arena.take(extent, size)
                                                    : take_large(extent, size, stream);
    return {state_.arena.span(span).begin, span, kNoId};
  }

  // Where a request of this thread went, by whatever way.
  void note(const Placement& placement, Bytes size, StreamIndex stream) {
    if (size >= Recurrence::kSmallest && state_.config.repeats_placements) {
      recurrence_.note(size, stream, placement.address);
    }
    if (size < Lifetimes::kSmallest) return;
    const Lifetimes::Request request = lifetimes_.note_request(size);
    UsedSpan& block = state_.arena.used(placement.first_span);
    block.time = request.time;
    block.context = request.context;
  }
  void note_free(const UsedSpan& block, Bytes size) {
    if (size >= Lifetimes::kSmallest) lifetimes_.note_free({block.time, block.context});
  }

  // Some of the memory was given back.
  void note_released() { recurrence_.forget(); }

  std::size_t host_bytes() const { return recurrence_.host_bytes() + lifetimes_.host_bytes(); }
  std::string check() const {
    const std::string broken = recurrence_.check();
    return broken.empty() ? lifetimes_.check() : broken;
  }

 private:
  // Whether the stream may have it without a wait. Nearly all that it is asked about is its own.
  bool is_at_once(SpanId extent, StreamIndex stream) const {
    return state_.arena.is_own(extent, stream) ||
           state_.order.is_ordered(state_.arena.tags_of(extent), stream);
  }
  // A question takes a microsecond or more: after one in vain so many are left out.
  static constexpr std::uint32_t kPause = 64;

  Placement take_as_before(Bytes size, StreamIndex stream);
  bool is_kept_waiting(Bytes size, StreamIndex stream) const;
  bool may_ask() { return pause_ == 0 || --pause_ == 0; }
  Placement take_alias(Address place, Bytes size, StreamIndex stream);
  bool may_take(const Piece& run, StreamIndex stream) const;
  SpanId take_large(SpanId best, Bytes size, StreamIndex stream);
  SpanId take_run(const Piece& run, SpanId* last);

  DeviceState& state_;
  const Bytes tiny_;
  Recurrence recurrence_;
  std::uint32_t pause_ = 0;
  Lifetimes lifetimes_;
  std::array<Address, Lifetimes::kKins> kin_ends_{};  // behind the last large block of each
};

}  // namespace vramx
