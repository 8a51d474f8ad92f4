// The slow path of DeviceAllocator::allocate: in which order a request is planned, and what is done
// when nothing fits.
//
//   1  ask the streams; memory that is over, or the stream's own, and growth
//   2  memory that the stream waits for, on the device
//   3  relief: callbacks, marks for what none covers yet; then 1 and 2 again
//   4  the same where captures of other libraries were met that may still go on
//   5  what other threads have set aside, and what streams may finish soon
//
// Of cross_stream "always" 2 comes before growth; with "never" it is left out, and a stream has its
// own memory alone until memory would be out.
#include <algorithm>
#include <thread>
#include <utility>

#include "core/device_allocator.h"

namespace vramx {
namespace {

// How long a request that found nothing sleeps between two looks at what other threads have set
// aside. A chunk is given back in 12 us to 13 ms (measured, H200).
constexpr std::chrono::microseconds kLook{20};

Status nothing_here() { return {StatusCode::kOutOfMemory, 0, "allocate"}; }

}  // namespace

Result<Placement> DeviceAllocator::place_slowly(Bytes size, StreamIndex stream, Lock& lock) {
  note_asker(stream);
  ask_streams(lock);
  Result<Placement> placed = try_all(size, stream, lock);
  if (placed.ok()) return placed;
  relieve(lock);
  ++state_.stats.num_alloc_retries;
  placed = try_all(size, stream, lock);
  // Most captures are over soon, and memory would be out otherwise.
  if (!placed.ok() && state_.order.forget_captures()) {
    learn_all(lock);
    placed = try_all(size, stream, lock);
  }
  const Deadline deadline = std::chrono::steady_clock::now() + state_.config.patience;
  while (!placed.ok() && (wait_for_others(deadline, lock) || wait_for_streams(deadline, lock))) {
    placed = try_all(size, stream, lock);
  }
  return placed;
}

Result<Placement> DeviceAllocator::try_all(Bytes size, StreamIndex stream, Lock& lock) {
  const bool is_alone = state_.config.cross_stream == CrossStream::kNever;
  const Request at_once{
      .size = size, .stream = stream, .reach = is_alone ? Reach::kOwn : Reach::kAtOnce};
  Request behind = at_once;
  behind.reach = Reach::kBehindWaits;
  const CrossStream cross = state_.config.cross_stream;
  if (cross == CrossStream::kAlways && !state_.order.is_single()) {
    for (Request request : {at_once, behind}) {
      request.most_growth = {};
      const Result<Placement> placed = try_within(request, lock);
      if (placed.ok()) return placed;
    }
  }
  Result<Placement> placed = try_within(at_once, lock);
  if (placed.ok() || is_alone || state_.order.is_single()) return placed;
  const Result<Placement> waited = try_within(behind, lock);
  // The driver's own word is worth more to the caller than "nothing fits".
  return waited.ok() || waited.status().driver_code != 0 ? waited : placed;
}

// Each refusal leaves fewer ways.
Result<Placement> DeviceAllocator::try_within(Request request, Lock& lock) {
  Status last = nothing_here();
  bool has_collected = false;
  for (;;) {
    const Plan plan = planner_.find(request);
    if (!plan) return last;
    if (!plan.collected.empty()) {
      if (executor_.unmap(plan.collected, lock) == 0) request.may_stitch = false;
      continue;
    }
    const Executor::Outcome outcome = executor_.carry_out(plan, request, lock);
    if (outcome.refused == Executor::Refused::kNothing) return outcome.placement;
    if (outcome.status.driver_code != 0) last = outcome.status;
    switch (outcome.refused) {
      case Executor::Refused::kGrowth:
        request.most_growth = plan.growth.bytes - kBlockUnit;
        break;
      case Executor::Refused::kAlias:
        // The driver may have less room for mappings than was thought: idle aliases make some.
        if (has_collected || outcome.status.code != StatusCode::kOutOfMemory ||
            executor_.unmap(planner_.idle_aliases(plan.pieces.size()), lock) == 0) {
          request.may_stitch = false;
        }
        has_collected = true;
        break;
      default:
        return last;
    }
  }
}

// In a program of one stream only what is to be unmapped waits for anything: idle aliases, once
// their addresses or mappings run short.
void DeviceAllocator::ask_streams(Lock& lock) {
  const bool has_many_aliases = state_.aliases.mappings() * 2 >= state_.config.alias_mappings ||
                                state_.aliases.bytes() * 4 >= state_.config.alias_addresses;
  requests_alone_ += ask_every_ - std::exchange(ask_in_, ask_every_);
  if (state_.order.is_single() && !has_many_aliases) return;
  const bool waits_first = state_.config.cross_stream == CrossStream::kAlways;
  state_.order.note_room(waits_first ? Bytes{} : state_.likely_room());
  state_.order.ask(lock);
  if (state_.config.cross_stream != CrossStream::kNever) state_.drop_tags_over();
  if (state_.arena.tells_apart() && requests_alone_ >= kRequestsAlone) tell_apart(false);
}

// After a stream was looked up that may be the second.
void DeviceAllocator::note_streams() {
  if (state_.order.is_single() || state_.arena.has_several_streams()) return;
  state_.arena.note_several_streams();
  requests_alone_ = 0;
  tell_apart(true);
}

// While one stream alone comes to the slow path, nobody else wants what it frees, and the stream
// wants it in one piece. The first request of another stream then finds little that is over: it
// grows, or waits for a mark that may be kRequestsUnaskedAlone requests younger than the free.
void DeviceAllocator::note_asker(StreamIndex stream) {
  if (stream == last_asker_) return;
  last_asker_ = stream;
  requests_alone_ = 0;
  if (!state_.order.is_single() && !state_.arena.tells_apart()) tell_apart(true);
}

void DeviceAllocator::tell_apart(bool is_apart) {
  is_apart ? state_.arena.tell_apart() : state_.arena.let_mix();
  state_.order.note_askers(is_apart);
  ask_in_ = ask_every_ = is_apart ? kRequestsUnasked : kRequestsUnaskedAlone;
}

// What frees memory without a wait of the host.
void DeviceAllocator::relieve(Lock& lock) {
  const std::vector<std::function<void()>> callbacks = relief_;
  lock.unlock();
  for (const auto& callback : callbacks) callback();
  lock.lock();
  learn_all(lock);
}

void DeviceAllocator::learn_all(Lock& lock) {
  state_.order.cover(lock);
  state_.order.ask(lock);
  state_.drop_tags_over();
}

// What other threads have set aside - chunks on their way out, pieces of a stitch - is neither free
// nor used: while there is any, "nothing fits" is not the last word. False where there is none, or
// no time left.
bool DeviceAllocator::wait_for_others(Deadline deadline, Lock& lock) {
  if (state_.operations_in_flight == 0) return false;
  const std::uint64_t landed = state_.operations_landed;
  while (state_.operations_in_flight != 0 && state_.operations_landed == landed) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    lock.unlock();
    std::this_thread::sleep_for(kLook);
    lock.lock();
  }
  return true;
}

// Memory that cannot be waited for on the device, for streams keep to themselves or one of them was
// destroyed, may still be over soon.
bool DeviceAllocator::wait_for_streams(Deadline deadline, Lock& lock) {
  while (state_.order.has_unfinished() && std::chrono::steady_clock::now() < deadline) {
    lock.unlock();
    std::this_thread::sleep_for(kLook);
    lock.lock();
    const std::size_t finished = state_.order.finished();
    state_.order.ask(lock);
    state_.drop_tags_over();
    if (state_.order.finished() != finished) return true;
  }
  return false;
}

}  // namespace vramx
