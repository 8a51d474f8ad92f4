// Lock, count, delegate: the simulated device's public face; see the header.
#include "driver/sim_driver.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace vramx {
namespace {

std::uint32_t* words(Address address) { return reinterpret_cast<std::uint32_t*>(address.value); }

}  // namespace

Result<std::unique_ptr<SimDriver>> SimDriver::open(const SimOptions& options) {
  const bool has_bytes = options.mode == SimMode::kBytes;
  const Bytes unit = has_bytes ? SimPages::page_size() : Bytes{1};
  if (options.ordinal < 0 || !options.granularity || options.granularity % unit) {
    return failure(StatusCode::kInvalidValue, "open");
  }
  std::unique_ptr<SimPages> pages;
  if (has_bytes) {
    Result<std::unique_ptr<SimPages>> opened = SimPages::open();
    if (!opened.ok()) return opened.status();
    pages = std::move(opened.value());
  }
  return std::unique_ptr<SimDriver>(new SimDriver(options, std::move(pages)));
}

SimDriver::SimDriver(const SimOptions& options, std::unique_ptr<SimPages> pages)
    : ordinal_(options.ordinal),
      granularity_(options.granularity),
      mode_(options.mode),
      desk_(options.journal_entries),
      memory_(options, std::move(pages)),
      streams_(options.ordinal) {}

Result<MemoryInfo> SimDriver::memory_info() {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kMemoryInfo},
                   [&]() -> Result<MemoryInfo> { return memory_.info(); });
}

Result<Address> SimDriver::reserve_address(Bytes size) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kReserveAddress, .size = size},
                   [&] { return memory_.reserve_address(size); });
}

Status SimDriver::release_address(Address address, Bytes size) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kReleaseAddress, .address = address, .size = size},
                   [&] { return memory_.release_address(address, size); });
}

Result<ChunkHandle> SimDriver::create_chunk(Bytes size) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kCreateChunk, .size = size},
                   [&] { return memory_.create_chunk(size); });
}

Status SimDriver::release_chunk(ChunkHandle chunk) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kReleaseChunk, .chunk = chunk},
                   [&] { return memory_.release_chunk(chunk); });
}

Status SimDriver::map(Address address, Bytes size, ChunkHandle chunk) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kMap, .address = address, .size = size, .chunk = chunk},
                   [&] { return memory_.map(address, size, chunk); });
}

Status SimDriver::unmap(Address address, Bytes size) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kUnmap, .address = address, .size = size},
                   [&] { return memory_.unmap(address, size); });
}

Status SimDriver::set_access(Address address, Bytes size) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kSetAccess, .address = address, .size = size},
                   [&] { return memory_.set_access(address, size); });
}

Status SimDriver::allow_peer(int device) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kAllowPeer}, [&] { return memory_.allow_peer(device); });
}

Result<Event> SimDriver::create_event(int device) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kCreateEvent, .stream = {.device = device}},
                   [&] { return streams_.create_event(device); });
}

Status SimDriver::destroy_event(Event event) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kDestroyEvent, .event = event},
                   [&] { return streams_.destroy_event(event); });
}

Status SimDriver::record_event(Event event, StreamName stream) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kRecordEvent, .stream = stream, .event = event},
                   [&] { return streams_.record_event(event, stream); });
}

Status SimDriver::record_device(Event event, int device) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kRecordDevice, .stream = {.device = device}, .event = event},
                   [&] { return streams_.record_device(event, device); });
}

Result<bool> SimDriver::query_event(Event event) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kQueryEvent, .event = event},
                   [&] { return streams_.query_event(event); });
}

Status SimDriver::wait_event(StreamName stream, Event event) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kWaitEvent, .stream = stream, .event = event},
                   [&] { return streams_.wait_event(stream, event); });
}

Status SimDriver::synchronize(int device) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kSynchronize, .stream = {.device = device}},
                   [&] { return streams_.synchronize(device); });
}

Result<std::uint64_t> SimDriver::stream_id(StreamName stream) {
  const std::lock_guard lock(mutex_);
  return desk_.run({.kind = CallKind::kStreamId, .stream = stream},
                   [&] { return streams_.stream_id(stream); });
}

DriverCalls SimDriver::calls() const {
  const std::lock_guard lock(mutex_);
  return desk_.driver_calls(memory_.time_us());
}

// A real device answers a stray access with a sticky error; here it is a refusal.
Status SimDriver::admit_bytes(Address address, Bytes size, const char* call) const {
  if (mode_ == SimMode::kAccounting) return failure(StatusCode::kNotSupported, call);
  const bool is_words = !(size % kWord) && !(Bytes{address.value} % kWord);
  if (!is_words || !memory_.is_touchable(address, size)) {
    return failure(StatusCode::kInvalidValue, call);
  }
  return ok_status();
}

Status SimDriver::fill(Address address, Bytes size, std::uint32_t pattern, Stream stream) {
  const std::lock_guard lock(mutex_);
  const Status admitted = admit_bytes(address, size, "fill");
  if (!admitted.ok()) return admitted;
  // A fill inside a capture belongs to a graph that never runs: it writes nothing.
  const Result<bool> captured = streams_.is_capturing(here(stream));
  if (!captured.ok()) return captured.status();
  if (captured.value()) return ok_status();
  std::fill_n(words(address), size / kWord, pattern);
  return streams_.submit(here(stream), 1).status();
}

Result<std::uint64_t> SimDriver::count_mismatches(Address address, Bytes size,
                                                  std::uint32_t pattern, Stream stream) {
  const std::lock_guard lock(mutex_);
  const Status admitted = admit_bytes(address, size, "count_mismatches");
  if (!admitted.ok()) return admitted;
  const Status drained = streams_.drain(here(stream));
  if (!drained.ok()) return drained;
  const std::uint64_t count = size / kWord;
  const auto equal = std::count(words(address), words(address) + count, pattern);
  return count - static_cast<std::uint64_t>(equal);
}

Result<Stream> SimDriver::create_stream() { return create_stream(ordinal_); }

Stream SimDriver::create_stream(int device) {
  const std::lock_guard lock(mutex_);
  return streams_.create_stream(device);
}

Status SimDriver::destroy_stream(Stream stream) {
  const std::lock_guard lock(mutex_);
  return streams_.destroy_stream(stream);
}

Status SimDriver::begin_capture(Stream stream) {
  const std::lock_guard lock(mutex_);
  return streams_.begin_capture(here(stream));
}

Status SimDriver::end_capture(Stream stream) {
  const std::lock_guard lock(mutex_);
  return streams_.end_capture(here(stream));
}

Result<StreamPoint> SimDriver::submit(StreamName stream, std::uint64_t items) {
  const std::lock_guard lock(mutex_);
  return streams_.submit(stream, items);
}

std::uint64_t SimDriver::advance(StreamName stream, std::uint64_t items) {
  const std::lock_guard lock(mutex_);
  return streams_.advance(stream, items);
}

void SimDriver::advance_all() {
  const std::lock_guard lock(mutex_);
  streams_.advance_all();
}

Status SimDriver::revive_stream(Stream stream) {
  const std::lock_guard lock(mutex_);
  return streams_.revive_stream(stream);
}

bool SimDriver::happens_before(StreamPoint point, StreamName stream) const {
  const std::lock_guard lock(mutex_);
  return streams_.happens_before(point, stream);
}

void SimDriver::fail_call(CallKind kind, std::uint64_t nth, StatusCode code) {
  const std::lock_guard lock(mutex_);
  desk_.fail_call(kind, nth, code);
}

void SimDriver::fail_nth_call(std::uint64_t nth, StatusCode code) {
  const std::lock_guard lock(mutex_);
  desk_.fail_nth_call(nth, code);
}

void SimDriver::clear_faults() {
  const std::lock_guard lock(mutex_);
  desk_.clear_faults();
}

std::uint64_t SimDriver::faults_fired() const {
  const std::lock_guard lock(mutex_);
  return desk_.faults_fired();
}

std::uint64_t SimDriver::call_count() const {
  const std::lock_guard lock(mutex_);
  return desk_.call_count();
}

std::uint64_t SimDriver::call_count(CallKind kind) const {
  const std::lock_guard lock(mutex_);
  return desk_.call_count(kind);
}

std::vector<CallRecord> SimDriver::journal() const {
  const std::lock_guard lock(mutex_);
  return desk_.journal();
}

std::size_t SimDriver::live_reservations() const {
  return locked([&] { return memory_.live_reservations(); });
}

std::size_t SimDriver::live_chunks() const {
  return locked([&] { return memory_.live_chunks(); });
}

std::size_t SimDriver::live_mappings() const {
  return locked([&] { return memory_.live_mappings(); });
}

std::size_t SimDriver::mappings_open_to(int peer) const {
  return locked([&] { return memory_.mappings_open_to(peer); });
}

std::size_t SimDriver::live_events() const {
  return locked([&] { return streams_.live_events(); });
}

Bytes SimDriver::used() const {
  return locked([&] { return memory_.used(); });
}

Bytes SimDriver::resident() const {
  return locked([&] { return memory_.resident(); });
}

std::string SimDriver::check() const {
  const std::lock_guard lock(mutex_);
  const std::string broken = memory_.check();
  return broken.empty() ? streams_.check() : broken;
}

}  // namespace vramx
