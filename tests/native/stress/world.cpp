// The steps; see the header.
#include "stress/world.h"

#include <algorithm>

#include "contract.h"

namespace vramx::stress {
namespace {

// A mark takes an event, perhaps a new one, and, of a stream that may have ended, its number; one
// that is refused, the end of the event.
constexpr std::uint64_t kCallsOfMark = 4;

REVEAL(LockOfAllocator, &DeviceAllocator::mutex_);

}  // namespace

World::World(const Setup& setup) : setup_(setup) { open(); }

// The allocator still talks to the listener on its way out.
World::~World() { allocator_.reset(); }

void World::open() {
  auto opened = SimDriver::open({.capacity = setup_.capacity,
                                 .granularity = setup_.granularity,
                                 .mapping_ceiling = setup_.mapping_ceiling});
  if (!opened.ok()) return fail("setup: the simulated device does not open");
  sim_ = std::move(opened.value());
  defective_ = std::make_unique<DefectiveDriver>(*sim_, setup_.defect);
  driver_.reset(new ObservedDriver(*defective_, *this));
  interrupted_.reset(new InterruptedDriver(*driver_, *this));
  shadow_ = std::make_unique<Shadow>(*sim_);
  auto created = DeviceAllocator::create(*interrupted_,
                                         {.cross_stream = setup_.cross_stream,
                                          .repeats_placements = setup_.repeats_placements,
                                          .alias_addresses = setup_.capacity * setup_.alias_factor,
                                          .alias_mappings = setup_.alias_mappings,
                                          .patience = {}});
  if (!created.ok()) return fail("setup: the allocator is not created");
  allocator_ = std::move(created.value());
  interrupted_->set_lock(&(*allocator_.*member(LockOfAllocator{})));
  streams_ = std::make_unique<Streams>(*sim_);
  allocator_->set_surroundings(streams_.get());
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
  if (step.meanwhile != 0) return put_off_.push_back(step);
  highest_limit_ = limit_;
  is_interrupted_ = false;
  streams_->on_thread_of(step.stream, [&] { take(step); });
  if (is_paused_) go_on();
  if (setup_.check_every != 0 && seen_.steps % setup_.check_every == 0) check_books();
}

void World::take(const Step& step) {
  faults_before_step_ = sim_->faults_fired();
  const ObservedDriver::Counts before = counts_before_step_ = driver_->counts();
  dispatch(step);
  const ObservedDriver::Counts& after = driver_->counts();
  if (after.marks != before.marks) streams_->note_mark();
  const bool may_wait = step.kind == StepKind::kTrim || step.kind == StepKind::kDefragment;
  require(may_wait || after.host_waits == before.host_waits, "cost: the host waited");
  require(may_wait || after.released - before.released <= after.created - before.created,
          "cost: memory was released outside trim");
  require(setup_.cross_stream != CrossStream::kNever || after.waits == 0,
          "policy: a stream was made to wait");
  check_counters();
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
      return require(streams_->submit(step.stream, step.amount), "device: submit");
    case StepKind::kAdvance:
      return static_cast<void>(sim_->advance(name(step.stream), step.amount));
    case StepKind::kAdvanceAll:
      return sim_->advance_all();
    case StepKind::kReplaceStream:
      return require(streams_->replace(step.stream, step.amount == 1), "device: replace");
    case StepKind::kBeginCapture:
      return require(streams_->begin_capture(step.stream), "device: begin_capture");
    case StepKind::kEndCapture:
      return require(streams_->end_capture(step.stream), "capture: invalidated by the allocator");
    case StepKind::kTrim:
    case StepKind::kDefragment:
      return give_memory_back(step);
    case StepKind::kSetLimit:
      limit_ = Bytes{step.amount};
      highest_limit_ = max(highest_limit_, limit_);
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

void World::allocate(const Step& step) {
  if (step.stream == kForeignDevice) return;
  const Bytes requested{step.amount};
  const Bytes held = allocator_->held();
  const std::size_t live = blocks_.size();
  streams_->use(step.stream);
  const Bytes had_room = room();
  const std::vector<StreamPoint> later = later_work(step);
  const Result<Address> made = allocator_->allocate(requested, name(step.stream).handle);
  judge_waits(step, had_room, later);
  require(allocator_->held() <= max(held, highest_limit_), "limit: the arena grew beyond it");
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
              .lives = {streams_->number_of(step.stream)}};
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
  require(streams_->submit(step.stream, 1), "device: submit");
  blocks_.emplace(step.block, std::move(block));
}

// The work that may touch the block: everything queued on its streams until now.
Use World::use_of(const Block& block) const {
  Use use;
  for (const std::uint32_t number : block.lives) use.push_back((*streams_)[number].newest);
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
  // Each capture of a stream may have made it another one.
  const auto times = static_cast<std::uint64_t>(1 + streams_->captures());
  require(after.calls - before.calls <= kCallsOfMark * block.lives.size() * times,
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

void World::record_stream(const Step& step) {
  const auto found = blocks_.find(step.block);
  if (found == blocks_.end()) return;
  std::vector<std::uint32_t>& lives = found->second.lives;
  streams_->use(step.stream);
  const Streams::Life& user = streams_->current(step.stream);
  require(allocator_->record_stream(found->second.address, user.name, user.is_lasting).ok(),
          "status: record_stream");
  const std::uint32_t number = streams_->number_of(step.stream);
  if (std::find(lives.begin(), lives.end(), number) == lives.end()) lives.push_back(number);
  require(streams_->submit(step.stream, 1), "device: submit");
}

// --- memory

void World::give_memory_back(const Step& step) {
  const Bytes held = allocator_->held();
  const DefragmentReport report =
      step.kind == StepKind::kTrim ? allocator_->trim() : allocator_->defragment();
  seen_.aliases_collected += static_cast<std::int64_t>(report.aliases_collected);
  require(!is_undisturbed() || held - report.released == allocator_->held(),
          "report: released bytes");
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
