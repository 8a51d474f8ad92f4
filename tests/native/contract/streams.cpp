// The contract of streams and events, for any Driver: order, identity, and calls from threads of
// which none has the device's context. Linked into driver_contract.
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "contract.h"
#include "core/driver.h"
#include "core/units.h"
#include "driver/data_path.h"

namespace vramx::contract {
namespace streams_claims {
namespace {

constexpr Stream kStream = Stream::kDefault;
constexpr std::uint32_t kLongWork = 64;  // fills, of 16 MiB on an H100: half a millisecond

// Two streams with work queued on both and an event behind each; it has run when they end.
struct TwoAtWork {
  explicit TwoAtWork(Device& on)
      : device(on),
        size(on.unit() * 8),
        chunk(on, size * 2),
        range(on, size * 2),
        streams{AStream(on), AStream(on)},
        events{AnEvent(on), AnEvent(on)} {
    is_ready = chunk && range && range.map_with_access({}, size * 2, chunk.handle()).ok();
    for (std::uint32_t round = 0; is_ready && round < kLongWork; ++round) {
      for (std::size_t i : {0u, 1u}) {
        is_ready &= device.bytes.fill(range.at(size * i), size, round, *streams[i]).ok();
      }
    }
    for (std::size_t i : {0u, 1u}) {
      is_ready &= device.driver.record_event(*events[i], streams[i].name()).ok();
    }
  }
  ~TwoAtWork() { EXPECT(finish(0) && finish(1)); }
  bool finish(std::size_t i) {
    const auto asked =
        device.bytes.count_mismatches(range.at(size * i), size, kLongWork - 1, *streams[i]);
    return asked.ok() && asked.value() == 0;
  }

  Device& device;
  Bytes size;
  Chunk chunk;
  Range range;
  std::array<AStream, 2> streams;
  std::array<AnEvent, 2> events;
  bool is_ready = false;
};

// --- events -------------------------------------------------------------------------------------

void an_event_that_was_never_recorded_is_complete(Device& device) {
  const AnEvent event(device);
  REQUIRE(event);
  EXPECT(event.is_complete());
}

void an_event_of_no_device_is_refused(Device& device) {
  EXPECT(device.driver.create_event(-1).status().code == StatusCode::kInvalidValue);
}

void a_wait_orders_two_streams(Device& device) {
  const Bytes size = device.unit() * 8;
  Chunk chunk(device, size);
  Range range(device, size);
  REQUIRE(chunk && range && range.map_with_access({}, size, chunk.handle()).ok());
  const AStream writer(device);
  const AStream reader(device);
  const AnEvent event(device);
  for (std::uint32_t round = 1; round <= 20; ++round) {
    EXPECT(device.bytes.fill(range.at({}), size, round, *writer).ok());
    EXPECT(device.driver.record_event(*event, writer.name()).ok());
    EXPECT(device.driver.wait_event(reader.name(), *event).ok());
    const auto mismatches = device.bytes.count_mismatches(range.at({}), size, round, *reader);
    EXPECT(mismatches.ok() && mismatches.value() == 0);
  }
}

void a_comparison_waits_for_its_stream(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit);
  Range range(device, unit);
  REQUIRE(chunk && range && range.map_with_access({}, unit, chunk.handle()).ok());
  const AnEvent event(device);
  EXPECT(device.bytes.fill(range.at({}), unit, 2, kStream).ok());
  EXPECT(device.driver.record_event(*event, name(device, kStream)).ok());
  const auto mismatches = device.bytes.count_mismatches(range.at({}), unit, 3, kStream);
  EXPECT(mismatches.ok() && mismatches.value() == unit.count / 4);
  EXPECT(event.is_complete());
}

// Which of the two ends first must not matter.
void expect_both_are_covered(Device& device, std::size_t first) {
  TwoAtWork work(device);
  const AnEvent event(device);
  REQUIRE(work.is_ready && event);
  const Status recorded = device.driver.record_device(*event, device.driver.ordinal());
  SKIP_UNLESS(recorded.code != StatusCode::kNotSupported, "the driver is older than CUDA 12.5");
  REQUIRE(recorded.ok());
  EXPECT(work.finish(first));
  // In this order: what has run stays so.
  const bool is_complete = event.is_complete();
  EXPECT(!is_complete || work.events[1 - first].is_complete());
  EXPECT(work.finish(1 - first));
  EXPECT(event.is_complete());
}

void an_event_of_the_device_covers_every_stream(Device& device) {
  expect_both_are_covered(device, 0);
  expect_both_are_covered(device, 1);
}

void a_synchronized_device_has_run_every_stream(Device& device) {
  TwoAtWork work(device);
  REQUIRE(work.is_ready);
  EXPECT(device.driver.synchronize(device.driver.ordinal()).ok());
  EXPECT(work.events[0].is_complete() && work.events[1].is_complete());
}

void an_event_of_another_device_is_waited_for_and_not_recorded_here(Device& device) {
  SKIP_UNLESS(device.peer >= 0, "one device");
  const AnEvent event(device, device.peer);
  REQUIRE(event);
  const StreamName here = name(device, kStream);
  EXPECT(device.driver.record_event(*event, here).code == StatusCode::kInvalidValue);
  EXPECT(device.driver.record_event(*event, {kStream, device.peer}).ok());
  EXPECT(device.driver.wait_event(here, *event).ok());
  EXPECT(device.driver.synchronize(device.peer).ok());
  EXPECT(event.is_complete());
}

// --- identity -----------------------------------------------------------------------------------

// 0 where there is none: on a driver older than CUDA 12.0.
std::uint64_t id_of(Device& device, Stream stream) {
  const Result<std::uint64_t> id = device.driver.stream_id(name(device, stream));
  EXPECT(id.ok() || id.status().code == StatusCode::kNotSupported);
  return id.ok() ? id.value() : 0;
}

bool has_ids(Device& device) {
  return device.driver.stream_id(name(device, kStream)).status().code != StatusCode::kNotSupported;
}

void live_streams_have_different_ids(Device& device) {
  SKIP_UNLESS(has_ids(device), "the driver is older than CUDA 12.0");
  const AStream first(device);
  const AStream second(device);
  const std::array ids{id_of(device, *first), id_of(device, *second), id_of(device, kStream),
                       id_of(device, Stream::kPerThread)};
  for (std::size_t i = 0; i < ids.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT(ids[i] != ids[j]);
  }
  EXPECT(id_of(device, *first) == ids[0]);
}

void the_default_stream_has_two_names(Device& device) {
  SKIP_UNLESS(has_ids(device), "the driver is older than CUDA 12.0");
  EXPECT(id_of(device, Stream::kDefault) == id_of(device, Stream::kLegacy));
}

void the_per_thread_stream_is_each_threads_own(Device& device) {
  SKIP_UNLESS(has_ids(device), "the driver is older than CUDA 12.0");
  const std::uint64_t here = id_of(device, Stream::kPerThread);
  std::uint64_t there = here;
  std::thread([&] { there = id_of(device, Stream::kPerThread); }).join();
  EXPECT(there != here);
  EXPECT(id_of(device, Stream::kPerThread) == here);
}

void the_per_thread_stream_can_be_recorded_on_at_once(Device& device) {
  const AnEvent event(device);
  EXPECT(device.driver.record_event(*event, name(device, Stream::kPerThread)).ok());
  EXPECT(device.driver.wait_event(name(device, Stream::kPerThread), *event).ok());
}

// --- threads ------------------------------------------------------------------------------------

void work_in_a_thread(Device& device, std::uint32_t seed) {
  const Bytes unit = device.unit();
  const Result<Stream> stream = device.bytes.create_stream();
  REQUIRE(stream.ok());
  for (std::uint32_t round = 0; round < 8; ++round) {
    Chunk chunk(device, unit);
    Range range(device, unit * 2);
    REQUIRE(chunk && range);
    REQUIRE(range.map_with_access(unit, unit, chunk.handle()).ok());
    const std::uint32_t pattern = seed * 1000 + round;
    EXPECT(device.bytes.fill(range.at(unit), unit, pattern, stream.value()).ok());
    const auto mismatches =
        device.bytes.count_mismatches(range.at(unit), unit, pattern, stream.value());
    EXPECT(mismatches.ok() && mismatches.value() == 0);
  }
  EXPECT(device.bytes.destroy_stream(stream.value()).ok());
}

void threads_without_a_context_do_not_disturb_each_other(Device& device) {
  std::vector<std::thread> threads;
  for (std::uint32_t i = 1; i <= 4; ++i)
    threads.emplace_back([&device, i] { work_in_a_thread(device, i); });
  for (std::thread& thread : threads) thread.join();
}

constexpr std::array kChecks{
    Check<Device>{"an event that was never recorded is complete",
                  an_event_that_was_never_recorded_is_complete},
    Check<Device>{"an event of no device is refused", an_event_of_no_device_is_refused},
    Check<Device>{"a wait orders two streams", a_wait_orders_two_streams},
    Check<Device>{"a comparison waits for its stream", a_comparison_waits_for_its_stream},
    Check<Device>{"an event of the device covers every stream",
                  an_event_of_the_device_covers_every_stream},
    Check<Device>{"a synchronized device has run every stream",
                  a_synchronized_device_has_run_every_stream},
    Check<Device>{"an event of another device is waited for and not recorded here",
                  an_event_of_another_device_is_waited_for_and_not_recorded_here},
    Check<Device>{"live streams have different ids", live_streams_have_different_ids},
    Check<Device>{"the default stream has two names", the_default_stream_has_two_names},
    Check<Device>{"the per-thread stream is each thread's own",
                  the_per_thread_stream_is_each_threads_own},
    Check<Device>{"the per-thread stream can be recorded on at once",
                  the_per_thread_stream_can_be_recorded_on_at_once},
    Check<Device>{"threads without a context do not disturb each other",
                  threads_without_a_context_do_not_disturb_each_other},
};

}  // namespace
}  // namespace streams_claims

std::span<const Check<Device>> stream_checks() { return streams_claims::kChecks; }

}  // namespace vramx::contract
