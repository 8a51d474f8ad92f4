// The contract of captures, for any Driver: what it is asked for meanwhile leaves them valid.
// Linked into driver_contract.
#include <functional>

#include "contract.h"

namespace vramx::contract::captures_claims {

// Growing while a graph is captured must not break the capture, whatever thread captures.
CHECK(OnDevice, memory_calls_leave_a_capture_valid) {
  const AStream stream(device);
  const AStream other(device);
  const AnEvent event(device);
  REQUIRE(driver.record_event(*event, name(device, Stream::kDefault)).ok());
  REQUIRE(bytes.begin_capture(*stream).ok());
  {
    Chunk chunk(device, unit);
    Range range(device, unit);
    EXPECT(chunk && range && range.map_with_access({}, unit, chunk.handle()).ok());
    EXPECT(driver.memory_info().ok());
    EXPECT(driver.query_event(*event).ok());
    EXPECT(driver.record_event(*event, other.name()).ok());
    EXPECT(driver.wait_event(other.name(), *event).ok());
    EXPECT(driver.stream_id(other.name()).status().code != StatusCode::kDriverError);
  }
  EXPECT(bytes.end_capture(*stream).ok());
}

CHECK(OnDevice, records_waits_and_questions_leave_a_captured_stream_alone) {
  const AStream stream(device);
  const AnEvent event(device);
  REQUIRE(driver.record_event(*event, name(device, Stream::kDefault)).ok());
  const std::function<Status()> calls[] = {
      [&] { return driver.record_event(*event, stream.name()); },
      [&] { return driver.wait_event(stream.name(), *event); },
      [&] { return driver.stream_id(stream.name()).status(); }};
  for (const auto& call : calls) {
    REQUIRE(bytes.begin_capture(*stream).ok());
    EXPECT(call().code == StatusCode::kNotSupported);
    EXPECT(bytes.end_capture(*stream).ok());
  }
}

}  // namespace vramx::contract::captures_claims
