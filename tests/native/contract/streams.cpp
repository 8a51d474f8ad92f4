// The contract of streams and events, for any Driver: order, captures, and calls from threads of
// which none has the device's context. Linked into driver_contract.
#include <array>
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

// --- streams and events -------------------------------------------------------------------------

void an_event_that_was_never_recorded_is_complete(Device& device) {
  const Result<Event> event = device.driver.create_event();
  REQUIRE(event.ok());
  const Result<bool> is_complete = device.driver.query_event(event.value());
  EXPECT(is_complete.ok() && is_complete.value());
  EXPECT(device.driver.synchronize_event(event.value()).ok());
  EXPECT(device.driver.destroy_event(event.value()).ok());
}

void a_wait_orders_two_streams(Device& device) {
  const Bytes size = device.unit() * 8;
  Chunk chunk(device, size);
  Range range(device, size);
  REQUIRE(chunk && range && range.map_with_access({}, size, chunk.handle()).ok());
  const Result<Stream> writer = device.bytes.create_stream();
  const Result<Stream> reader = device.bytes.create_stream();
  const Result<Event> event = device.driver.create_event();
  REQUIRE(writer.ok() && reader.ok() && event.ok());
  for (std::uint32_t round = 1; round <= 20; ++round) {
    EXPECT(device.bytes.fill(range.at({}), size, round, writer.value()).ok());
    EXPECT(device.driver.record_event(event.value(), writer.value()).ok());
    EXPECT(device.driver.wait_event(reader.value(), event.value()).ok());
    const auto mismatches =
        device.bytes.count_mismatches(range.at({}), size, round, reader.value());
    EXPECT(mismatches.ok() && mismatches.value() == 0);
  }
  EXPECT(device.driver.destroy_event(event.value()).ok());
  EXPECT(device.bytes.destroy_stream(writer.value()).ok());
  EXPECT(device.bytes.destroy_stream(reader.value()).ok());
}

void a_synchronized_event_is_complete(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit);
  Range range(device, unit);
  REQUIRE(chunk && range && range.map_with_access({}, unit, chunk.handle()).ok());
  const Result<Event> event = device.driver.create_event();
  REQUIRE(event.ok());
  EXPECT(device.bytes.fill(range.at({}), unit, 1, kStream).ok());
  EXPECT(device.driver.record_event(event.value(), kStream).ok());
  EXPECT(device.driver.query_event(event.value()).ok());
  EXPECT(device.driver.synchronize_event(event.value()).ok());
  const Result<bool> is_complete = device.driver.query_event(event.value());
  EXPECT(is_complete.ok() && is_complete.value());
  EXPECT(device.driver.destroy_event(event.value()).ok());
}

void a_stream_is_idle_once_its_last_event_is_complete(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit);
  Range range(device, unit);
  REQUIRE(chunk && range && range.map_with_access({}, unit, chunk.handle()).ok());
  const Result<Event> event = device.driver.create_event();
  const Result<Stream> stream = device.bytes.create_stream();
  REQUIRE(event.ok() && stream.ok());
  const Result<bool> before = device.driver.is_idle(stream.value());
  EXPECT(before.ok() && before.value());
  EXPECT(device.bytes.fill(range.at({}), unit, 1, stream.value()).ok());
  EXPECT(device.driver.is_idle(stream.value()).ok());
  EXPECT(device.driver.record_event(event.value(), stream.value()).ok());
  EXPECT(device.driver.synchronize_event(event.value()).ok());
  const Result<bool> after = device.driver.is_idle(stream.value());
  EXPECT(after.ok() && after.value());
  EXPECT(device.driver.destroy_event(event.value()).ok());
  EXPECT(device.bytes.destroy_stream(stream.value()).ok());
}

void a_comparison_waits_for_its_stream(Device& device) {
  const Bytes unit = device.unit();
  Chunk chunk(device, unit);
  Range range(device, unit);
  REQUIRE(chunk && range && range.map_with_access({}, unit, chunk.handle()).ok());
  const Result<Event> event = device.driver.create_event();
  REQUIRE(event.ok());
  EXPECT(device.bytes.fill(range.at({}), unit, 2, kStream).ok());
  EXPECT(device.driver.record_event(event.value(), kStream).ok());
  const auto mismatches = device.bytes.count_mismatches(range.at({}), unit, 3, kStream);
  EXPECT(mismatches.ok() && mismatches.value() == unit.count / 4);
  const Result<bool> is_complete = device.driver.query_event(event.value());
  EXPECT(is_complete.ok() && is_complete.value());
  EXPECT(device.driver.destroy_event(event.value()).ok());
}

// Growing while a graph is captured must not break the capture, whatever thread captures.
void memory_calls_leave_a_capture_valid(Device& device) {
  const Bytes unit = device.unit();
  const Result<Stream> stream = device.bytes.create_stream();
  const Result<Stream> other = device.bytes.create_stream();
  const Result<Event> event = device.driver.create_event();
  REQUIRE(stream.ok() && other.ok() && event.ok());
  REQUIRE(device.driver.record_event(event.value(), kStream).ok());
  REQUIRE(device.bytes.begin_capture(stream.value()).ok());
  const Result<bool> during = device.driver.is_capturing(stream.value());
  EXPECT(during.ok() && during.value());
  const Result<bool> idle = device.driver.is_idle(stream.value());
  EXPECT(idle.ok() && !idle.value());
  {
    Chunk chunk(device, unit);
    Range range(device, unit);
    EXPECT(chunk && range && range.map_with_access({}, unit, chunk.handle()).ok());
    EXPECT(device.driver.memory_info().ok());
    EXPECT(device.driver.query_event(event.value()).ok());
    EXPECT(device.driver.is_idle(other.value()).ok());
  }
  EXPECT(device.bytes.end_capture(stream.value()).ok());
  const Result<bool> after = device.driver.is_capturing(stream.value());
  EXPECT(after.ok() && !after.value());
  EXPECT(device.driver.destroy_event(event.value()).ok());
  EXPECT(device.bytes.destroy_stream(stream.value()).ok());
  EXPECT(device.bytes.destroy_stream(other.value()).ok());
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
    Check<Device>{"a wait orders two streams", a_wait_orders_two_streams},
    Check<Device>{"a synchronized event is complete", a_synchronized_event_is_complete},
    Check<Device>{"a stream is idle once its last event is complete",
                  a_stream_is_idle_once_its_last_event_is_complete},
    Check<Device>{"a comparison waits for its stream", a_comparison_waits_for_its_stream},
    Check<Device>{"memory calls leave a capture valid", memory_calls_leave_a_capture_valid},
    Check<Device>{"threads without a context do not disturb each other",
                  threads_without_a_context_do_not_disturb_each_other},
};

}  // namespace
}  // namespace streams_claims

std::span<const Check<Device>> stream_checks() { return streams_claims::kChecks; }

}  // namespace vramx::contract
