// The end of a scenario: everything is freed, all of the memory is asked for at once, and then the
// device gets everything back.
//
// Unless it has refused to take something back: an unmap or a release that fails in the undo of a
// growth that failed already leaves what nobody can account for. failures.cpp has the cases with
// one failure, where nothing may be left.
#include <array>

#include "stress/world.h"

namespace vramx::stress {

void World::finish() {
  if (!failure_.empty()) return;
  sim_->clear_faults();
  put_off_.clear();
  is_interrupted_ = false;
  faults_before_step_ = sim_->faults_fired();
  finish_live_blocks();
  if (failure_.empty()) ask_for_everything();
  allocator_->trim();
  if (driver_->counts().failed_returns == 0) {
    require(!allocator_->held(), "end: trim left memory");
    require(sim_->live_chunks() == 0 && !sim_->used(), "end: trim left chunks on the device");
    require(sim_->live_mappings() == 0, "end: trim left mappings");
  }
  check_counters();
  check_books();
  seen_ = coverage();
  allocator_.reset();
  if (driver_->counts().failed_returns != 0) return;
  if (const std::string broken = leftovers(); !broken.empty()) fail(broken);
}

void World::finish_live_blocks() {
  for (std::uint32_t stream = 0; stream < kStreams; ++stream) {
    require(streams_->end_capture(stream), "capture: invalidated by the allocator");
  }
  while (!blocks_.empty()) free_block(blocks_.begin()->first);
  allocator_->set_limit(Bytes{UINT64_MAX});
  limit_ = Bytes{UINT64_MAX};
}

// Of which stream the memory was must not matter once the work is done.
void World::ask_for_everything() {
  sim_->advance_all();
  const Bytes held = allocator_->held();
  if (held) apply({StepKind::kAllocate, ~std::uint32_t{0}, 1, held.count});
  while (!blocks_.empty()) free_block(blocks_.begin()->first);
  sim_->advance_all();
}

std::string World::leftovers() const {
  if (sim_->live_mappings() != 0) return "end: mappings are left";
  if (sim_->live_chunks() != 0 || sim_->used()) return "end: chunks are left";
  if (sim_->live_reservations() != 0) return "end: reservations are left";
  return sim_->live_events() == 0 ? sim_->check() : "end: events are left";
}

// --- coverage

namespace {

struct Path {
  const char* name;
  std::int64_t Coverage::* count;
};

constexpr std::array kPaths = {
    Path{"operations", &Coverage::steps},
    Path{"allocations", &Coverage::allocations},
    Path{"out of memory", &Coverage::ooms},
    Path{"out of memory, judged", &Coverage::judged_ooms},
    Path{"retries after relief", &Coverage::retries},
    Path{"growths", &Coverage::growths},
    Path{"failed driver calls of growth", &Coverage::failed_growths},
    Path{"stitches", &Coverage::stitches},
    Path{"alias hits", &Coverage::alias_hits},
    Path{"cross-stream reuses", &Coverage::cross_stream},
    Path{"chunks released", &Coverage::chunks_released},
    Path{"aliases collected", &Coverage::aliases_collected},
    Path{"injected failures", &Coverage::faults},
    Path{"captures", &Coverage::captures},
    Path{"streams replaced", &Coverage::streams_replaced},
    Path{"in the middle of a call", &Coverage::meanwhile},
    Path{"for a while only", &Coverage::paused},
};

}  // namespace

Coverage World::coverage() const {
  Coverage seen = seen_;
  seen.captures = streams_->captures();
  seen.streams_replaced = streams_->replaced();
  if (allocator_ == nullptr) return seen;
  const AllocatorStats stats = allocator_->stats();
  seen.retries = stats.num_alloc_retries;
  seen.growths = stats.num_growths;
  seen.failed_growths = static_cast<std::int64_t>(driver_->counts().failed_growths);
  seen.stitches = stats.num_stitches;
  seen.alias_hits = stats.num_alias_hits;
  seen.cross_stream = stats.num_cross_stream;
  seen.chunks_released = stats.num_device_free;
  seen.faults = static_cast<std::int64_t>(sim_->faults_fired());
  return seen;
}

void Coverage::add(const Coverage& other) {
  for (const Path& path : kPaths) this->*path.count += other.*path.count;
}

std::string Coverage::text() const {
  std::string text;
  for (const Path& path : kPaths) {
    text += std::string(path.name) + " " + std::to_string(this->*path.count) + "\n";
  }
  return text;
}

bool Coverage::is_complete() const {
  for (const Path& path : kPaths) {
    if (this->*path.count == 0) return false;
  }
  return true;
}

}  // namespace vramx::stress
