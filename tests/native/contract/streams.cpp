// The contract of streams and events, for any Driver: order, identity, and calls from threads of
// which none has the device's context. Linked into driver_contract.
#include <array>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "contract.h"

namespace vramx::contract::streams_claims {

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

CHECK(OnDevice, an_event_that_was_never_recorded_is_complete_and_one_of_no_device_refused) {
  const AnEvent event(device);
  REQUIRE(event);
  EXPECT(event.is_complete());
  EXPECT(driver.create_event(-1).status().code == StatusCode::kInvalidValue);
}

CHECK(OnDevice, a_wait_orders_two_streams) {
  const Bytes size = unit * 8;
  Chunk chunk(device, size);
  Range range(device, size);
  REQUIRE(chunk && range && range.map_with_access({}, size, chunk.handle()).ok());
  const AStream writer(device);
  const AStream reader(device);
  const AnEvent event(device);
  for (std::uint32_t round = 1; round <= 20; ++round) {
    EXPECT(bytes.fill(range.at({}), size, round, *writer).ok());
    EXPECT(driver.record_event(*event, writer.name()).ok());
    EXPECT(driver.wait_event(reader.name(), *event).ok());
    const auto mismatches = bytes.count_mismatches(range.at({}), size, round, *reader);
    EXPECT(mismatches.ok() && mismatches.value() == 0);
  }
}

CHECK(OnDevice, a_comparison_waits_for_its_stream) {
  Chunk chunk(device, unit);
  Range range(device, unit);
  REQUIRE(chunk && range && range.map_with_access({}, unit, chunk.handle()).ok());
  const AnEvent event(device);
  EXPECT(bytes.fill(range.at({}), unit, 2, kStream).ok());
  EXPECT(driver.record_event(*event, name(device, kStream)).ok());
  const auto mismatches = bytes.count_mismatches(range.at({}), unit, 3, kStream);
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

CHECK(OnDevice, an_event_of_the_device_covers_every_stream) {
  expect_both_are_covered(device, 0);
  expect_both_are_covered(device, 1);
}

CHECK(OnDevice, a_synchronized_device_has_run_every_stream) {
  TwoAtWork work(device);
  REQUIRE(work.is_ready);
  EXPECT(driver.synchronize(driver.ordinal()).ok());
  EXPECT(work.events[0].is_complete() && work.events[1].is_complete());
}

CHECK(OnDevice, an_event_of_another_device_is_waited_for_and_not_recorded_here) {
  SKIP_UNLESS(device.peer >= 0, "one device");
  const AnEvent event(device, device.peer);
  REQUIRE(event);
  const StreamName here = name(device, kStream);
  EXPECT(driver.record_event(*event, here).code == StatusCode::kInvalidValue);
  EXPECT(driver.record_event(*event, {kStream, device.peer}).ok());
  EXPECT(driver.wait_event(here, *event).ok());
  EXPECT(driver.synchronize(device.peer).ok());
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

CHECK(OnDevice, live_streams_have_different_ids) {
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

CHECK(OnDevice, the_default_stream_has_two_names) {
  SKIP_UNLESS(has_ids(device), "the driver is older than CUDA 12.0");
  EXPECT(id_of(device, Stream::kDefault) == id_of(device, Stream::kLegacy));
}

CHECK(OnDevice, the_per_thread_stream_is_each_threads_own) {
  SKIP_UNLESS(has_ids(device), "the driver is older than CUDA 12.0");
  const std::uint64_t here = id_of(device, Stream::kPerThread);
  std::uint64_t there = here;
  std::thread([&] { there = id_of(device, Stream::kPerThread); }).join();
  EXPECT(there != here);
  EXPECT(id_of(device, Stream::kPerThread) == here);
}

CHECK(OnDevice, the_per_thread_stream_can_be_recorded_on_at_once) {
  const AnEvent event(device);
  EXPECT(driver.record_event(*event, name(device, Stream::kPerThread)).ok());
  EXPECT(driver.wait_event(name(device, Stream::kPerThread), *event).ok());
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

CHECK(OnDevice, threads_without_a_context_do_not_disturb_each_other) {
  std::vector<std::thread> threads;
  for (std::uint32_t i = 1; i <= 4; ++i)
    threads.emplace_back([&, i] { work_in_a_thread(device, i); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace vramx::contract::streams_claims
