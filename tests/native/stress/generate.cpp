// The distributions; see the header.
#include "stress/generate.h"

#include <array>

#include "stress/streams.h"

namespace vramx::stress {
namespace {

// More would seldom meet.
constexpr std::uint64_t kMostStreams = 4;
// One step of so many comes in the middle of another one, at this chance for it at the latest.
constexpr std::uint64_t kPutOff = 6;
constexpr std::uint64_t kLatest = 24;
// And pauses at this chance of its own, if it has as many.
constexpr std::uint64_t kLatestPause = 4;

}  // namespace

Setup draw_setup(std::uint64_t seed) {
  Random random(seed ^ 0x5E7);
  constexpr std::array<std::uint64_t, 6> kMebibytes = {2, 4, 4, 8, 8, 16};
  Setup setup;
  setup.capacity = Bytes{kMebibytes[random.below(kMebibytes.size())] << 20};
  const std::uint64_t mode = random.below(10);
  if (mode < 2) setup.cross_stream = CrossStream::kNever;
  if (mode >= 8) setup.cross_stream = CrossStream::kAlways;
  if (random.one_in(4)) setup.alias_mappings = random.between(4, 48);
  if (random.one_in(4)) setup.alias_factor = random.between(2, 6);
  if (random.one_in(10)) setup.mapping_ceiling = random.between(16, 96);
  if (random.one_in(3)) setup.relief_blocks = static_cast<std::uint32_t>(random.between(1, 4));
  setup.check_every = random.one_in(8) ? 1 : 61;
  return setup;
}

Generator::Generator(std::uint64_t seed, const Setup& setup)
    : random_(seed),
      capacity_(setup.capacity),
      streams_(random_.between(1, kMostStreams)),
      first_stream_(random_.below(kStreams)),
      largest_(setup.capacity.count >> random_.between(1, 5)),
      has_faults_(random_.one_in(2)),
      has_captures_(random_.one_in(3)),
      replaces_streams_(random_.one_in(3)),
      has_other_threads_(random_.one_in(2)) {
  const std::uint64_t repeated = random_.one_in(2) ? random_.between(2, 12) : 0;
  for (std::uint64_t i = 0; i < repeated; ++i) palette_.push_back(random_.log_uniform(largest_));
}

void Generator::begin_phase() {
  left_in_phase_ = random_.between(5, 120);
  allocate_percent_ = random_.between(15, 90);
  order_ = static_cast<Order>(random_.below(3));
}

Step Generator::next(const World& world) {
  Step step = draw(world);
  if (has_other_threads_ && random_.one_in(kPutOff)) {
    step.meanwhile = static_cast<std::uint32_t>(random_.log_uniform(kLatest));
    if (random_.one_in(2))
      step.pause = static_cast<std::uint32_t>(random_.log_uniform(kLatestPause));
  }
  return step;
}

Step Generator::draw(const World& world) {
  if (left_in_phase_ == 0) begin_phase();
  --left_in_phase_;
  const std::uint64_t roll = random_.below(1000);
  if (roll < 40) return rare_step(world);
  if (roll < 90) return {StepKind::kRecordStream, any_block(world), any_stream(), 0};
  if (roll < 140) return {StepKind::kSubmit, 0, any_stream(), random_.between(1, 3)};
  if (roll < 230) return {StepKind::kAdvance, 0, any_stream(), random_.between(1, 40)};
  if (random_.percent(allocate_percent_)) return allocation(world);
  return {StepKind::kFree, block_to_free(world), 0, 0};
}

Step Generator::rare_step(const World& world) {
  switch (random_.below(12)) {
    case 0:
      return {StepKind::kAdvanceAll, 0, 0, 0};
    case 1:
      if (random_.percent(60)) break;
      return {random_.one_in(2) ? StepKind::kTrim : StepKind::kDefragment, 0, 0, 0};
    case 2:
      if (random_.percent(70)) return {StepKind::kSetLimit, 0, 0, ~std::uint64_t{0}};
      return {StepKind::kSetLimit, 0, 0, random_.between(0, capacity_.count)};
    case 3:
    case 4:
      if (!has_captures_) break;
      return {random_.one_in(3) ? StepKind::kBeginCapture : StepKind::kEndCapture, 0, any_stream(),
              0};
    case 5:
      if (replaces_streams_) return {StepKind::kReplaceStream, 0, any_stream(), random_.below(2)};
      break;
    case 6:
    case 7:
    case 8:
      if (!has_faults_) break;
      if (random_.one_in(6)) return {StepKind::kClearFaults, 0, 0, 0};
      return {random_.one_in(2) ? StepKind::kFailCall : StepKind::kFailExhausted,
              static_cast<std::uint32_t>(random_.below(kAnyCall + 1)), 0, random_.between(1, 4)};
    case 9:
      return {StepKind::kFreeNothing, any_block(world), 0, random_.between(1, 1 << 20)};
    default:
      break;
  }
  return {StepKind::kInspect, 0, 0, 0};
}

Step Generator::allocation(const World& world) {
  const std::uint32_t stream = any_stream();
  return {StepKind::kAllocate, next_block_++, stream == kForeignDevice ? 0 : stream, size(world)};
}

std::uint64_t Generator::size(const World& world) {
  if (random_.one_in(12)) return odd_size(world);
  if (!palette_.empty()) return palette_[random_.below(palette_.size())];
  return random_.log_uniform(largest_);
}

// The edges of every rule: of a unit, of a chunk, of what is free, and beyond what can be.
std::uint64_t Generator::odd_size(const World& world) {
  const std::uint64_t free = (capacity_ - world.live_bytes()).count;
  switch (random_.below(8)) {
    case 0:
      return 0;
    case 1:
      return random_.between(1, 2);
    case 2:
      return random_.between(511, 513);
    case 3:
    case 4:
      return kGranularity.count * random_.between(1, largest_ / kGranularity.count + 1);
    case 5:
      return kGranularity.count * random_.between(1, 8) + random_.between(0, 1024) - 512;
    case 6:
      return free - random_.below(free / 4 + 1);
    default:
      return random_.one_in(4) ? ~std::uint64_t{0} >> random_.below(20) : free + 1;
  }
}

std::uint32_t Generator::any_block(const World& world) {
  const std::vector<std::uint32_t> live = world.live_blocks();
  return live.empty() ? 0 : live[random_.below(live.size())];
}

std::uint32_t Generator::block_to_free(const World& world) {
  const std::vector<std::uint32_t> live = world.live_blocks();
  if (live.empty()) return 0;
  if (order_ == Order::kNewestFirst) return live.back();
  return order_ == Order::kOldestFirst ? live.front() : live[random_.below(live.size())];
}

}  // namespace vramx::stress
