// The contract of peers, for any Driver: who is let in, and from which set_access on. Linked into
// driver_contract. On a GPU it takes a second one that reaches the first.
#include <cstdint>

#include "contract.h"

namespace vramx::contract::peers_claims {

constexpr Stream kStream = Stream::kDefault;
constexpr const char* kNoPeer = "no second device is here";
constexpr const char* kNoReach = "the second device cannot reach this one's memory";

// A peer stays let in, so all checks share what the first one has done. The simulated device writes
// by itself, whoever its peer is: which of its mappings are open to a peer is checked beside it.
bool peer_writes(Device& device, Address address, Bytes size, std::uint32_t pattern) {
  if (!device.peer_bytes->fill(address, size, pattern, kStream).ok()) return false;
  const auto by_peer = device.peer_bytes->count_mismatches(address, size, pattern, kStream);
  const auto by_own = device.bytes.count_mismatches(address, size, pattern, kStream);
  return by_peer.ok() && by_own.ok() && by_peer.value() == 0 && by_own.value() == 0;
}

CHECK(OnDevice, a_device_that_does_not_exist_is_refused) {
  Chunk chunk(device, unit);
  Range range(device, unit);
  REQUIRE(chunk && range);
  EXPECT(driver.allow_peer(-1).code == StatusCode::kInvalidValue);
  EXPECT(range.map_with_access({}, unit, chunk.handle()).ok());
}

CHECK(OnDevice, a_peer_gets_access_where_it_is_set_again) {
  SKIP_UNLESS(device.peer >= 0, kNoPeer);
  Chunk chunk(device, unit);
  Range range(device, unit);
  REQUIRE(chunk && range);
  REQUIRE(range.map_with_access({}, unit, chunk.handle()).ok());
  REQUIRE(bytes.fill(range.at({}), unit, 41, kStream).ok());
  const Status allowed = driver.allow_peer(device.peer);
  SKIP_UNLESS(allowed.code != StatusCode::kNotSupported, kNoReach);
  REQUIRE(allowed.ok() && driver.set_access(range.at({}), unit).ok());
  const auto kept = bytes.count_mismatches(range.at({}), unit, 41, kStream);
  EXPECT(kept.ok() && kept.value() == 0);
  EXPECT(peer_writes(device, range.at({}), unit, 42));
}

CHECK(OnDevice, a_peer_has_access_to_later_mappings) {
  SKIP_UNLESS(device.peer >= 0, kNoPeer);
  const Status allowed = driver.allow_peer(device.peer);
  SKIP_UNLESS(allowed.code != StatusCode::kNotSupported, kNoReach);
  REQUIRE(allowed.ok() && driver.allow_peer(device.peer).ok());
  Chunk chunk(device, unit);
  Range range(device, unit * 2);
  REQUIRE(chunk && range);
  REQUIRE(range.map({}, unit, chunk.handle()).ok() && range.map(unit, unit, chunk.handle()).ok());
  REQUIRE(driver.set_access(range.at({}), unit * 2).ok());
  EXPECT(peer_writes(device, range.at({}), unit, 43));
  EXPECT(peer_writes(device, range.at(unit), unit, 44));
}

}  // namespace vramx::contract::peers_claims
