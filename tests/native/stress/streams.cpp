// What a world's streams do; see the header.
#include "stress/streams.h"

#include <algorithm>

namespace vramx::stress {
namespace {

// Apart from the handles that mean something to CUDA.
Stream handle_of(std::uint64_t number) { return Stream{16 + number}; }

}  // namespace

Streams::Streams(SimDriver& sim) : sim_(sim) {
  const int here = sim.ordinal();
  const int elsewhere = here + 1;
  lives_ = {{.name = {Stream::kDefault, here}, .is_lasting = true},
            {.name = {handle_of(1), here}, .is_lasting = true},
            {.name = {handle_of(2), here}},
            {.name = {handle_of(3), here}},
            {.name = {Stream::kPerThread, here}},
            {.name = {Stream::kPerThread, here}},
            {.name = {Stream::kPerThread, here}},
            {.name = {sim.create_stream(elsewhere), elsewhere}}};
  for (std::uint32_t stream = 0; stream < kStreams; ++stream) {
    current_[stream] = stream;
    on_thread_of(stream, [&] { submit(stream, 0); });
  }
  note_mark();
}

bool Streams::submit(std::uint32_t stream, std::uint64_t items) {
  Life& of = life(stream);
  const Result<StreamPoint> point = sim_.submit(of.name, items);
  if (point.ok()) of.newest = point.value();
  return point.ok();
}

bool Streams::begin_capture(std::uint32_t stream) {
  Life& of = life(stream);
  if (of.name.handle == Stream::kDefault || stream >= kSecondThreads || of.is_capturing) {
    return true;
  }
  of.is_capturing = true;
  ++captures_;
  return sim_.begin_capture(of.name.handle).ok();
}

bool Streams::end_capture(std::uint32_t stream) {
  Life& of = life(stream);
  if (!of.is_capturing) return true;
  of.is_capturing = false;
  return sim_.end_capture(of.name.handle).ok();
}

bool Streams::replace(std::uint32_t stream, bool keeps_handle) {
  Life& old = life(stream);
  if (old.is_lasting || old.is_capturing || old.name.handle <= Stream::kPerThread) return true;
  for (std::uint32_t& used : used_last_) {
    if (used == current_[stream]) used = 0;
  }
  old.is_over = true;
  StreamName made = old.name;
  if (!sim_.destroy_stream(made.handle).ok()) return false;
  if (keeps_handle) {
    if (!sim_.revive_stream(made.handle).ok()) return false;
  } else if (stream == kForeignDevice) {
    made.handle = sim_.create_stream(made.device);
  } else {
    made.handle = handle_of(next_handle_++);
  }
  current_[stream] = static_cast<std::uint32_t>(lives_.size());
  lives_.push_back({.name = made});
  ++replaced_;
  return submit(stream, 0);
}

void Streams::note_mark() {
  for (Life& of : lives_) of.covered = of.newest;
}

bool Streams::any_captures() const {
  return std::any_of(lives_.begin(), lives_.end(),
                     [](const Life& life) { return life.is_capturing; });
}

bool Streams::is_lasting(StreamName stream) const {
  return std::any_of(lives_.begin(), lives_.end(),
                     [&](const Life& life) { return life.is_lasting && life.name == stream; });
}

bool Streams::is_current(StreamName stream) const {
  const Life& life = lives_[used_last_[thread()]];
  return !life.is_over && life.name == stream;
}

}  // namespace vramx::stress
