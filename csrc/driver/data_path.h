// What tests and the pattern check of replays need beside the Driver: bytes to write and compare,
// streams to order them on, and captures to do it under. The core never sees this interface.
//
// Both drivers implement it, so that one contract suite proves on either that mapped memory holds
// what was written and that the order between streams is kept. Every call is thread-safe. A fill
// is asynchronous, as a kernel is; a count waits for its stream.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "core/units.h"

namespace vramx {

class Bytewise {
 public:
  Bytewise() = default;
  Bytewise(const Bytewise&) = delete;
  Bytewise& operator=(const Bytewise&) = delete;
  virtual ~Bytewise() = default;

  // Of a pattern.
  static constexpr Bytes kWord{sizeof(std::uint32_t)};

  // Writes `pattern` to every word of the range. Address and size are multiples of kWord and the
  // range is mapped with access; the driver for CUDA cannot check the latter.
  virtual Status fill(Address address, Bytes size, std::uint32_t pattern, Stream stream) = 0;

  // The words that differ from `pattern`, once everything queued on `stream` has run.
  virtual Result<std::uint64_t> count_mismatches(Address address, Bytes size, std::uint32_t pattern,
                                                 Stream stream) = 0;

  // A stream that does not synchronise with the default stream.
  virtual Result<Stream> create_stream() = 0;
  // Work already queued still runs; any later use of the name fails.
  virtual Status destroy_stream(Stream stream) = 0;

  // Between the two, work on `stream` is collected into a graph. The graph is thrown away: what
  // matters to a test is whether end_capture says that the capture had remained valid.
  virtual Status begin_capture(Stream stream) = 0;
  virtual Status end_capture(Stream stream) = 0;
};

}  // namespace vramx
