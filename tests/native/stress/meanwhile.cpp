// Steps that another thread takes in the middle of a driver call which the allocator makes without
// its lock.
//
//   step A   ──── lock ──── driver call ──── lock ──── returns
//                            │      ▲
//   step B                   └──────┘   all of it, by another thread
//
// B comes before the call is carried out or after. Nobody comes in the middle of B, but B may pause
// there, without the lock, for A to go on to its own next call or to its end:
//
//   step A   ──── driver call            ┌──── returns
//                  │                     │    │
//   step B         └──── driver call ────┘    └──── returns
//
// What a program may not do, B does not: destroy the stream that A works on, or begin a capture
// while a device is marked or waited for as a whole, which no lock keeps from it.
#include <algorithm>
#include <vector>

#include "stress/unguarded.h"
#include "stress/world.h"

namespace vramx::stress {

void World::on_call_without_lock(CallKind call, Moment moment) {
  if (is_meanwhile_) return pause_if_due();
  if (is_paused_) return go_on();
  if (!failure_.empty()) return;
  std::vector<Step> due;
  for (Step& step : put_off_) {
    if (--step.meanwhile == 0) due.push_back(step);
  }
  std::erase_if(put_off_, [](const Step& step) { return step.meanwhile == 0; });
  for (const Step& step : due) {
    if (is_paused_) go_on();
    take_meanwhile(step, call, moment);
  }
}

bool World::may_come(const Step& step, CallKind call, Moment moment) const {
  if (step.kind == StepKind::kReplaceStream) return !streams_->is_used_here(step.stream);
  if (step.kind != StepKind::kBeginCapture) return true;
  // An event is made for a device's mark, too.
  const bool is_of_device = call == CallKind::kRecordDevice || call == CallKind::kSynchronize ||
                            call == CallKind::kCreateEvent;
  return !is_of_device || (moment == Moment::kAfter && call != CallKind::kCreateEvent);
}

void World::take_meanwhile(Step step, CallKind call, Moment moment) {
  if (!may_come(step, call, moment)) return;
  const std::uint32_t other = streams_->of_other_thread();
  if (step.stream >= kFirstThreads && step.stream <= kThirdThreads) step.stream = other;
  const std::uint64_t faults = faults_before_step_;
  const ObservedDriver::Counts before_step = counts_before_step_;
  const ObservedDriver::Counts now = driver_->counts();
  ++seen_.meanwhile;
  is_meanwhile_ = true;
  chances_to_pause_ = step.pause;
  {
    const Unguarded unguarded(*allocator_, setup_.defect);
    streams_->on_thread_of(other, [this, step] { take(step); });
  }
  is_meanwhile_ = false;
  is_interrupted_ = true;
  paused_on_ = other;
  driver_->forget_since(now);
  counts_before_step_ = before_step;
  faults_before_step_ = faults;
}

void World::pause_if_due() {
  if (chances_to_pause_ == 0 || --chances_to_pause_ != 0) return;
  paused_counts_ = driver_->counts();
  is_paused_ = true;
  ++seen_.paused;
  streams_->pause();
}

void World::go_on() {
  const ObservedDriver::Counts now = driver_->counts();
  driver_->forget_since(paused_counts_);
  is_paused_ = false;
  is_meanwhile_ = true;
  streams_->go_on(paused_on_);
  is_meanwhile_ = false;
  driver_->forget_since(now);
}

}  // namespace vramx::stress
