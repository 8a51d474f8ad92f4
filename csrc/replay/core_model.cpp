#include "replay/core_model.h"

#include <unordered_map>

#include "driver/cuda_driver.h"
#include "driver/sim_driver.h"

namespace vramx::replay {
namespace {

// The simulated device is as large as it takes; a replay's capacity is the allocator's limit.
constexpr Bytes kSimulatedMemory{std::uint64_t{1} << 42};
// A pattern is written and checked at both ends of a block, where a neighbour would show, and not
// in between: that would measure the copy engine.
constexpr Bytes kPatternEnd{64 << 10};

Bytes pattern_bytes(Bytes size) { return {min(size, kPatternEnd).count / 4 * 4}; }

}  // namespace

CoreModel::CoreModel(const CoreOptions& options) : options_(options), blocks_(options.id_count) {}

template <class AnyDriver>
Status CoreModel::start_on(Result<std::unique_ptr<AnyDriver>> opened) {
  if (!opened.ok()) return opened.status();
  bytes_ = opened.value().get();
  driver_ = std::move(opened.value());
  return ok_status();
}

Status CoreModel::start() {
  const Status started =
      options_.device == CoreOptions::Device::kCuda
          ? start_on(CudaDriver::open(options_.ordinal))
          : start_on(SimDriver::open({.capacity = kSimulatedMemory, .mode = SimMode::kAccounting}));
  if (!started.ok()) return started;
  for (std::uint32_t i = 0; i < options_.pattern_streams; ++i) {
    const Result<Stream> stream = bytes_->create_stream();
    if (!stream.ok()) return stream.status();
    streams_.push_back(stream.value());
  }
  AllocatorConfig config;
  config.limit = options_.capacity;
  config.patience = {};  // a recorded program does not go on while a request waits
  Result<std::unique_ptr<DeviceAllocator>> made = DeviceAllocator::create(*driver_, config);
  if (!made.ok()) return made.status();
  allocator_ = std::move(made.value());
  allocator_->set_surroundings(&surroundings_);
  if (options_.has_work) sim_ = dynamic_cast<SimDriver*>(driver_.get());
  return ok_status();
}

Result<std::unique_ptr<CoreModel>> CoreModel::open(const CoreOptions& options) {
  std::unique_ptr<CoreModel> model(new CoreModel(options));
  if (const Status started = model->start(); !started.ok()) return started;
  return model;
}

// The device may still be writing patterns: everything waits before memory goes away.
CoreModel::~CoreModel() {
  if (allocator_) allocator_->trim();
  for (const Stream stream : streams_) bytes_->destroy_stream(stream).ignore();
}

Stream CoreModel::stream_for(std::uint32_t id, std::uint8_t stream) const {
  if (!streams_.empty()) return streams_[id % streams_.size()];
  // A trace's stream numbers are not handles of a real device. On the simulated one they are made
  // up, after the handles that mean something: 0 stays the default stream.
  const bool is_default = stream == 0 || options_.device == CoreOptions::Device::kCuda;
  if (is_default) return Stream::kDefault;
  return static_cast<Stream>(static_cast<std::uint64_t>(Stream::kPerThread) + stream);
}

AllocateResult CoreModel::allocate(std::uint32_t id, Bytes size, std::uint8_t stream) {
  const Stream on = stream_for(id, stream);
  const Result<Address> address = allocator_->allocate(size, on);
  if (!address.ok()) return AllocateResult::kOutOfMemory;
  blocks_[id] = {address.value(), size, on};
  if (!streams_.empty()) write_pattern(id, size, on);
  return AllocateResult::kOk;
}

void CoreModel::free(std::uint32_t id) {
  if (!streams_.empty()) check_pattern(id);
  if (sim_ != nullptr) {
    sim_->submit(blocks_[id].stream).status().ignore();
    work_.push_back({time_us_, blocks_[id].stream});
  }
  allocator_->free(blocks_[id].address).ignore();
  blocks_[id] = {};
}

void CoreModel::finish_until(std::uint32_t time_us) {
  for (; !work_.empty() && work_.front().time_us <= time_us; work_.pop_front()) {
    sim_->advance(work_.front().stream, 1);
  }
}

void CoreModel::write_pattern(std::uint32_t id, Bytes size, Stream stream) {
  const Bytes end = pattern_bytes(size);
  if (!end) return;
  const Address last{(blocks_[id].address + (size - end)).value / 4 * 4};
  bytes_->fill(blocks_[id].address, end, id, stream).ignore();
  bytes_->fill(last, end, id, stream).ignore();
}

void CoreModel::check_pattern(std::uint32_t id) {
  const Held& block = blocks_[id];
  const Bytes end = pattern_bytes(block.size);
  if (!end) return;
  const Address last{(block.address + (block.size - end)).value / 4 * 4};
  for (const Address at : {block.address, last}) {
    const Result<std::uint64_t> differing = bytes_->count_mismatches(at, end, id, block.stream);
    // A range that cannot be read back counts as wrong throughout.
    mismatches_ += differing.ok() ? differing.value() : end.count / 4;
  }
}

std::uint64_t CoreModel::retries() const {
  return static_cast<std::uint64_t>(allocator_->stats().num_alloc_retries);
}

Bytes CoreModel::peak_allocated() const {
  const auto all = static_cast<std::size_t>(PoolKind::kAll);
  return Bytes{static_cast<std::uint64_t>(stats().allocated_bytes[all].peak)};
}

std::vector<Placed> CoreModel::layout() const {
  std::unordered_map<std::uint64_t, std::int64_t> ids;
  for (std::size_t id = 0; id < blocks_.size(); ++id) {
    if (blocks_[id].address) ids[blocks_[id].address.value] = static_cast<std::int64_t>(id);
  }
  std::vector<Placed> placed;
  for (const SpanInfo& span : allocator_->layout()) {
    if (span.state == SpanState::kFree) {
      placed.push_back({span.address, span.size, Placed::Kind::kFree, -1});
    } else if (span.state == SpanState::kUsed && span.block) {
      const auto kind = span.is_in_alias ? Placed::Kind::kAlias : Placed::Kind::kBlock;
      placed.push_back({span.address, span.size, kind, ids[span.block.value]});
    }
  }
  return placed;
}

}  // namespace vramx::replay
