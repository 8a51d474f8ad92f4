// What the statistics must say, and when a request may not fail.
//
// A request of n bytes must succeed where the device and the limit leave room to grow by what the
// wholly free chunks lack of n: stitching puts whole chunks together in any order, and growth fills
// the deficit. That is claimed only while nothing outside the allocator stands in the way: no
// injected failure, no capture, no ceiling of mappings; other streams' memory counts only where the
// policy may take it or all work is done; aliases must have addresses and mappings left; nobody
// came in the middle.
#include <algorithm>

#include "stress/world.h"

namespace vramx::stress {
namespace {

bool equal(const Counter& a, const Counter& b) {
  return a.current == b.current && a.peak == b.peak && a.allocated == b.allocated &&
         a.freed == b.freed;
}

bool equal(const PoolCounters& a, const PoolCounters& b) {
  return std::equal(a.begin(), a.end(), b.begin(),
                    [](const Counter& x, const Counter& y) { return equal(x, y); });
}

}  // namespace

void World::count(Bytes requested, Bytes size, std::int64_t sign) {
  live_bytes_ = sign > 0 ? live_bytes_ + size : live_bytes_ - size;
  const std::size_t pool = requested <= Bytes{1 << 20} ? 1 : 2;
  const auto change = [&](PoolCounters& counters, Bytes by) {
    for (const std::size_t kind : {std::size_t{0}, pool}) {
      Counter& counter = counters[kind];
      const auto amount = static_cast<std::int64_t>(by.count);
      counter.current += sign * amount;
      counter.peak = std::max(counter.peak, counter.current);
      (sign > 0 ? counter.allocated : counter.freed) += amount;
    }
  };
  change(expected_.allocation, Bytes{1});
  change(expected_.allocated_bytes, size);
  change(expected_.requested_bytes, requested);
}

void World::check_counters() {
  const AllocatorStats stats = allocator_->stats();
  require(equal(stats.allocation, expected_.allocation), "stats: allocation");
  require(equal(stats.allocated_bytes, expected_.allocated_bytes), "stats: allocated_bytes");
  require(equal(stats.requested_bytes, expected_.requested_bytes), "stats: requested_bytes");
  require(stats.num_ooms == seen_.ooms, "stats: num_ooms");
  require(stats.reserved_bytes.current == static_cast<std::int64_t>(allocator_->held().count),
          "stats: reserved_bytes");
  require(stats.num_device_alloc - stats.num_device_free == stats.segment.current,
          "stats: segment");
  // Others have some set aside.
  if (are_others_in_flight()) return;
  require(stats.inactive_split_bytes.current + stats.allocated_bytes[0].current ==
              stats.reserved_bytes.current,
          "stats: inactive_split_bytes");
}

void World::check_books() {
  if (const std::string broken = allocator_->check(); !broken.empty()) fail(broken);
  if (const std::string broken = sim_->check(); !broken.empty()) fail("device: " + broken);
  // What the device refused to take back is with it until the next trim.
  if (are_others_in_flight() || driver_->counts().failed_returns != 0) return;
  const AllocatorStats stats = allocator_->stats();
  const ObservedDriver::Chunks& chunks = driver_->chunks();
  Bytes held{};
  for (const auto& [handle, chunk] : chunks) held += chunk.size;
  require(stats.segment.current == static_cast<std::int64_t>(chunks.size()), "books: segment");
  require(allocator_->held() == held, "books: held");
  require(sim_->used() == held, "books: the device holds something else");
  require(stats.alias_mappings == static_cast<std::int64_t>(driver_->mappings() - chunks.size()),
          "books: alias_mappings");
}

bool World::may_judge() const {
  return is_undisturbed() && !streams_->any_captures() &&
         sim_->faults_fired() == faults_before_step_ && driver_->counts().failed_returns == 0 &&
         setup_.mapping_ceiling == Setup{}.mapping_ceiling;
}

bool World::all_work_is_done() const {
  const std::vector<Streams::Life>& lives = streams_->all();
  return std::all_of(lives.begin(), lives.end(),
                     [&](const Streams::Life& of) { return shadow_->is_done({of.newest}); });
}

// A block in an alias keeps addresses and mappings; without one, all aliases can be collected.
bool World::aliases_are_ample() const {
  const Setup usual;
  if (setup_.alias_mappings == usual.alias_mappings && setup_.alias_factor == usual.alias_factor) {
    return true;
  }
  const bool has_block_in_alias = std::any_of(
      blocks_.begin(), blocks_.end(),
      [&](const auto& entry) { return (driver_->relative(entry.second.address) >> 56) != 0; });
  return !has_block_in_alias && all_work_is_done() &&
         driver_->chunks().size() + setup_.capacity / setup_.granularity <= setup_.alias_mappings;
}

// By which the arena may grow.
Bytes World::room() const {
  const Result<MemoryInfo> device = sim_->memory_info();
  if (!device.ok()) return {};
  Bytes gap{};
  for (const SpanInfo& span : allocator_->layout()) {
    if (span.state == SpanState::kUnmapped) gap = max(gap, span.size);
  }
  const Bytes held = allocator_->held();
  const Bytes below_limit = limit_ > held ? limit_ - held : Bytes{};
  return min(gap, min(below_limit, device.value().free));
}

void World::judge_out_of_memory(Bytes requested) {
  if (!may_judge() || requested > setup_.capacity * 2) return;
  ++seen_.judged_ooms;
  const bool may_share = setup_.cross_stream != CrossStream::kNever || all_work_is_done();
  const Bytes whole =
      may_share && aliases_are_ample() ? shadow_->unowned_chunks(driver_->chunks()) : Bytes{};
  const Bytes size = rounded(requested);
  const Bytes deficit = size > whole ? size - whole : Bytes{};
  if (round_up(deficit, setup_.granularity) <= room()) {
    fail("out of memory: for " + std::to_string(size.count) + " bytes, with " +
         std::to_string(whole.count) + " in whole chunks and room for " +
         std::to_string(room().count));
  }
}

// What other streams have queued since a mark of any stream may have covered it, and what does not
// come before this one's next work anyway.
std::vector<StreamPoint> World::later_work(const Step& step) const {
  std::vector<StreamPoint> later;
  for (const Streams::Life& of : streams_->all()) {
    if (of.newest.position != of.covered.position &&
        !sim_->happens_before(of.newest, name(step.stream))) {
      later.push_back(of.newest);
    }
  }
  return later;
}

// No stream waits while there is room to grow, and a wait is for what was queued when memory was
// freed: what came after may itself wait for the work that the memory is taken for.
void World::judge_waits(const Step& step, Bytes room, const std::vector<StreamPoint>& later) {
  const ObservedDriver::Counts& now = driver_->counts();
  if (now.waits == counts_before_step_.waits || !is_undisturbed()) return;
  const Bytes grown = round_up(rounded(Bytes{step.amount}), setup_.granularity);
  require(!may_judge() || setup_.cross_stream != CrossStream::kUnderPressure || grown > room,
          "policy: a stream was made to wait where there was room");
  if (now.marks != counts_before_step_.marks) return;
  for (const StreamPoint& point : later) {
    require(!sim_->happens_before(point, name(step.stream)),
            "order: a wait is for work that was queued after the free");
  }
}

}  // namespace vramx::stress
