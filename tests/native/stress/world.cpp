// The steps; see the header.
#include "stress/world.h"

#include <algorithm>

namespace vramx::stress {
namespace {

// Streams of this number and above come and go, and the allocator is told nothing of them.
constexpr std::uint32_t kFirstPassing = 2;
// A mark takes an event, perhaps a new one, and, of a stream that may have ended, its number; one
// that is refused, the end of the event.
constexpr std::uint64_t kCallsOfMark = 4;

// Apart from the handles that mean something to CUDA.
Stream name_of(std::uint64_t number) { return Stream{number == 0 ? 0 : 16 + number}; }

}  // namespace

bool World::Known::is_lasting(StreamName stream) const {
  const auto& lives = world_.lives_;
  return std::any_of(lives.begin(), lives.end(), [&](const Life& life) {
    return life.is_lasting && life.name == stream.handle;
  });
}

bool World::Known::is_current(StreamName stream) const {
  const Life& life = world_.lives_[world_.used_last_];
  return !life.is_over && life.name == stream.handle;
}

bool World::Known::is_capturing(int) const {
  const auto& lives = world_.lives_;
  return std::any_of(lives.begin(), lives.end(),
                     [](const Life& life) { return life.is_capturing; });
}

World::World(const Setup& setup) : setup_(setup) {
  for (std::uint32_t stream = 0; stream < kStreams; ++stream) {
    current_[stream] = stream;
    const bool is_lasting = stream < kFirstPassing;
    lives_.push_back({.name = name_of(stream), .is_lasting = is_lasting});
  }
  open();
}

// The allocator still talks to the listener on its way out.
World::~World() { allocator_.reset(); }

void World::open() {
  auto opened = SimDriver::open({.capacity = setup_.capacity,
                                 .granularity = kGranularity,
                                 .mapping_ceiling = setup_.mapping_ceiling});
  if (!opened.ok()) return fail("setup: the simulated device does not open");
  sim_ = std::move(opened.value());
  defective_ = std::make_unique<DefectiveDriver>(*sim_, setup_.defect);
  driver_.reset(new ObservedDriver(*defective_, *this));
  shadow_ = std::make_unique<Shadow>(*sim_);
  auto created =
      DeviceAllocator::create(*driver_, {.cross_stream = setup_.cross_stream,
                                         .repeats_placements = setup_.repeats_placements,
                                         .alias_addresses = setup_.capacity * setup_.alias_factor,
                                         .alias_mappings = setup_.alias_mappings,
                                         .patience = {}});
  if (!created.ok()) return fail("setup: the allocator is not created");
  allocator_ = std::move(created.value());
  allocator_->set_surroundings(&known_);
  if (setup_.relief_blocks != 0) allocator_->add_relief([this] { return relieve(); });
}

void World::fail(const std::string& claim) {
  if (failure_.empty()) failure_ = claim;
}

void World::require(bool holds, const char* claim) {
  if (!holds) fail(claim);
}

void World::on_unmap(Address at, Bytes size) {
  if (const std::string broken = shadow_->on_unmap(at, size); !broken.empty()) fail(broken);
  for (const auto& [number, block] : blocks_) {
    if (block.address < at + size && at < block.address + block.size) {
      fail("unmapped in use: block " + std::to_string(number));
    }
  }
}

void World::on_chunk_gone(ChunkHandle chunk) {
  if (const std::string broken = shadow_->on_chunk_gone(chunk); !broken.empty()) fail(broken);
}

void World::apply(const Step& step) {
  if (!failure_.empty()) return;
  ++seen_.steps;
  faults_before_step_ = sim_->faults_fired();
  const ObservedDriver::Counts before = driver_->counts();
  dispatch(step);
  const ObservedDriver::Counts& after = driver_->counts();
  const bool may_wait = step.kind == StepKind::kTrim || step.kind == StepKind::kDefragment;
  require(may_wait || after.host_waits == before.host_waits, "cost: the host waited");
  require(may_wait || after.released - before.released <= after.created - before.created,
          "cost: memory was released outside trim");
  require(setup_.cross_stream != CrossStream::kNever || after.waits == 0,
          "policy: a stream was made to wait");
  check_counters();
  if (setup_.check_every != 0 && seen_.steps % setup_.check_every == 0) check_books();
}

void World::dispatch(const Step& step) {
  switch (step.kind) {
    case StepKind::kAllocate:
      return allocate(step);
    case StepKind::kFree:
      return free_block(step.block);
    case StepKind::kFreeNothing:
      return free_nothing(step);
    case StepKind::kRecordStream:
      return record_stream(step);
    case StepKind::kSubmit:
      return require(sim_->submit(name(step.stream), step.amount).ok(), "device: submit");
    case StepKind::kAdvance:
      return static_cast<void>(sim_->advance(name(step.stream), step.amount));
    case StepKind::kAdvanceAll:
      return sim_->advance_all();
    case StepKind::kReplaceStream:
      return replace_stream(step);
    case StepKind::kBeginCapture:
      return begin_capture(step);
    case StepKind::kEndCapture:
      return end_capture(step.stream);
    case StepKind::kTrim:
    case StepKind::kDefragment:
      return give_memory_back(step);
    case StepKind::kSetLimit:
      limit_ = Bytes{step.amount};
      return allocator_->set_limit(limit_);
    case StepKind::kFailCall:
    case StepKind::kFailExhausted:
      return inject(step);
    case StepKind::kClearFaults:
      return sim_->clear_faults();
    case StepKind::kInspect:
      for (const auto& [number, block] : blocks_) check_stamps(block, number);
      return check_books();
  }
}

// --- blocks
// ---------------------------------------------------------------------------------------

void World::allocate(const Step& step) {
  const Bytes requested{step.amount};
  const Bytes held = allocator_->held();
  const std::size_t live = blocks_.size();
  used_last_ = current_[step.stream];
  const Result<Address> made = allocator_->allocate(requested, name(step.stream));
  require(allocator_->held() <= max(held, limit_), "limit: the arena grew beyond it");
  if (made.ok()) return adopt(made.value(), step);
  ++seen_.ooms;
  require(made.status().code == StatusCode::kOutOfMemory, "status: not out of memory");
  const OutOfMemory report = allocator_->last_out_of_memory();
  require(report.requested == requested && report.live == live_bytes_ &&
              report.held == allocator_->held(),
          "report: last_out_of_memory");
  if (live == blocks_.size()) judge_out_of_memory(requested);
}

void World::adopt(Address address, const Step& step) {
  ++seen_.allocations;
  Block block{.address = address,
              .requested = Bytes{step.amount},
              .size = rounded(Bytes{step.amount}),
              .pieces = driver_->pieces(address, rounded(Bytes{step.amount})),
              .lives = {current_[step.stream]}};
  require(address.value % kBlockUnit.count == 0, "address: not aligned");
  require(allocator_->owns(address), "address: not owned");
  if (block.pieces.empty()) return fail("address: not mapped for all of the block");
  if (const std::string broken = shadow_->claim(block.pieces, step.block, name(step.stream));
      !broken.empty()) {
    return fail(broken);
  }
  placement_hash_ = (placement_hash_ ^ driver_->relative(address)) * 0x100000001B3;
  count(block.requested, block.size, +1);
  stamp(block, step.block);
  require(sim_->submit(name(step.stream)).ok(), "device: submit");
  blocks_.emplace(step.block, std::move(block));
}

// The work that may touch the block: everything queued on its streams until now.
Use World::use_of(const Block& block) {
  Use use;
  for (const std::uint32_t number : block.lives) {
    const Life& of = lives_[number];
    if (of.is_over) {
      use.push_back(of.last);
      continue;
    }
    const Result<StreamPoint> point = sim_->submit(of.name, 0);
    require(point.ok(), "device: submit");
    if (point.ok()) use.push_back(point.value());
  }
  return use;
}

void World::free_block(std::uint32_t number) {
  const auto found = blocks_.find(number);
  if (found == blocks_.end()) return;
  const Block block = std::move(found->second);
  blocks_.erase(found);
  check_stamps(block, number);
  shadow_->give_back(block.pieces, block.address, block.size, use_of(block));
  count(block.requested, block.size, -1);
  const ObservedDriver::Counts before = driver_->counts();
  require(allocator_->free(block.address).ok(), "status: free");
  const ObservedDriver::Counts& after = driver_->counts();
  require(after.calls - before.calls <= kCallsOfMark * block.lives.size(),
          "cost: a free made more driver calls than marks take");
  require(after.waits == before.waits, "cost: a free made a stream wait");
  require(allocator_->free(block.address).code == StatusCode::kInvalidValue,
          "misuse: a block was freed twice");
}

void World::free_nothing(const Step& step) {
  const auto found = blocks_.find(step.block);
  if (found == blocks_.end()) return;
  const Bytes inner{step.amount % found->second.size.count};
  if (!inner) return;
  require(allocator_->free(found->second.address + inner).code == StatusCode::kInvalidValue,
          "misuse: an inner address was freed");
}

bool World::relieve() {
  for (std::uint32_t i = 0; i < setup_.relief_blocks && !blocks_.empty(); ++i) {
    free_block(blocks_.begin()->first);
  }
  return true;
}

// --- streams
// --------------------------------------------------------------------------------------

void World::record_stream(const Step& step) {
  const auto found = blocks_.find(step.block);
  if (found == blocks_.end()) return;
  std::vector<std::uint32_t>& lives = found->second.lives;
  used_last_ = current_[step.stream];
  const Life& user = life(step.stream);
  require(allocator_->record_stream(found->second.address, {user.name}, user.is_lasting).ok(),
          "status: record_stream");
  if (std::find(lives.begin(), lives.end(), current_[step.stream]) == lives.end()) {
    lives.push_back(current_[step.stream]);
  }
  require(sim_->submit(name(step.stream)).ok(), "device: submit");
}

// Destroyed, without a word to the allocator, and another one made in its place, which may get the
// same name.
void World::replace_stream(const Step& step) {
  Life& old = life(step.stream);
  if (old.is_lasting || old.is_capturing) return;
  const Result<StreamPoint> last = sim_->submit(old.name, 0);
  if (!last.ok()) return fail("device: submit");
  if (used_last_ == current_[step.stream]) used_last_ = 0;
  require(sim_->destroy_stream(old.name).ok(), "device: destroy_stream");
  old.last = last.value();
  old.is_over = true;
  Stream made = old.name;
  if (step.amount == 1) {
    require(sim_->revive_stream(made).ok(), "device: revive_stream");
  } else {
    made = name_of(next_stream_++);
  }
  current_[step.stream] = static_cast<std::uint32_t>(lives_.size());
  lives_.push_back({.name = made});
  ++seen_.streams_replaced;
}

void World::begin_capture(const Step& step) {
  Life& of = life(step.stream);
  if (step.stream == 0 || of.is_capturing) return;
  require(sim_->begin_capture(of.name).ok(), "device: begin_capture");
  of.is_capturing = true;
  ++seen_.captures;
}

void World::end_capture(std::uint32_t stream) {
  Life& of = life(stream);
  if (!of.is_capturing) return;
  of.is_capturing = false;
  require(sim_->end_capture(of.name).ok(), "capture: invalidated by the allocator");
}

// --- memory
// ---------------------------------------------------------------------------------------

void World::give_memory_back(const Step& step) {
  const Bytes held = allocator_->held();
  const DefragmentReport report =
      step.kind == StepKind::kTrim ? allocator_->trim() : allocator_->defragment();
  seen_.aliases_collected += static_cast<std::int64_t>(report.aliases_collected);
  require(held - report.released == allocator_->held(), "report: released bytes");
}

// One at a time: with a second failure on the way back, not everything can be undone.
void World::inject(const Step& step) {
  const StatusCode code =
      step.kind == StepKind::kFailExhausted ? StatusCode::kOutOfMemory : StatusCode::kDriverError;
  sim_->clear_faults();
  if (step.block == kAnyCall) {
    sim_->fail_nth_call(step.amount, code);
  } else {
    sim_->fail_call(static_cast<CallKind>(step.block), step.amount, code);
  }
}

std::vector<std::uint32_t> World::live_blocks() const {
  std::vector<std::uint32_t> numbers;
  for (const auto& [number, block] : blocks_) numbers.push_back(number);
  return numbers;
}

std::string first_failure(const Scenario& scenario) {
  World world(scenario.setup);
  for (const Step& step : scenario.steps) world.apply(step);
  if (world.failure().empty()) world.finish();
  return world.failure();
}

}  // namespace vramx::stress
