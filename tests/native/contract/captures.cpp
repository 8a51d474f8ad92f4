// The contract of captures, for any Driver: what it is asked for meanwhile leaves them valid.
// Linked into driver_contract.
#include <array>
#include <span>

#include "contract.h"
#include "core/driver.h"
#include "core/units.h"
#include "driver/data_path.h"

namespace vramx::contract {
namespace captures_claims {
namespace {

// Growing while a graph is captured must not break the capture, whatever thread captures.
void memory_calls_leave_a_capture_valid(Device& device) {
  const Bytes unit = device.unit();
  const AStream stream(device);
  const AStream other(device);
  const AnEvent event(device);
  REQUIRE(device.driver.record_event(*event, name(device, Stream::kDefault)).ok());
  REQUIRE(device.bytes.begin_capture(*stream).ok());
  {
    Chunk chunk(device, unit);
    Range range(device, unit);
    EXPECT(chunk && range && range.map_with_access({}, unit, chunk.handle()).ok());
    EXPECT(device.driver.memory_info().ok());
    EXPECT(device.driver.query_event(*event).ok());
    EXPECT(device.driver.record_event(*event, other.name()).ok());
    EXPECT(device.driver.wait_event(other.name(), *event).ok());
    EXPECT(device.driver.stream_id(other.name()).status().code != StatusCode::kDriverError);
  }
  EXPECT(device.bytes.end_capture(*stream).ok());
}

void expect_refused_in_a_capture(Device& device, Status (*call)(Driver&, StreamName, Event)) {
  const AStream stream(device);
  const AnEvent event(device);
  REQUIRE(device.driver.record_event(*event, name(device, Stream::kDefault)).ok());
  REQUIRE(device.bytes.begin_capture(*stream).ok());
  EXPECT(call(device.driver, stream.name(), *event).code == StatusCode::kNotSupported);
  EXPECT(device.bytes.end_capture(*stream).ok());
}

void a_record_leaves_a_captured_stream_alone(Device& device) {
  expect_refused_in_a_capture(device, [](Driver& driver, StreamName stream, Event event) {
    return driver.record_event(event, stream);
  });
}

void a_wait_leaves_a_captured_stream_alone(Device& device) {
  expect_refused_in_a_capture(device, [](Driver& driver, StreamName stream, Event event) {
    return driver.wait_event(stream, event);
  });
}

void the_question_for_an_id_leaves_a_captured_stream_alone(Device& device) {
  expect_refused_in_a_capture(device, [](Driver& driver, StreamName stream, Event) {
    return driver.stream_id(stream).status();
  });
}

constexpr std::array kChecks{
    Check<Device>{"memory calls leave a capture valid", memory_calls_leave_a_capture_valid},
    Check<Device>{"a record leaves a captured stream alone",
                  a_record_leaves_a_captured_stream_alone},
    Check<Device>{"a wait leaves a captured stream alone", a_wait_leaves_a_captured_stream_alone},
    Check<Device>{"the question for an id leaves a captured stream alone",
                  the_question_for_an_id_leaves_a_captured_stream_alone},
};

}  // namespace
}  // namespace captures_claims

std::span<const Check<Device>> capture_checks() { return captures_claims::kChecks; }

}  // namespace vramx::contract
