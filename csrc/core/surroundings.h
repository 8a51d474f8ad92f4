// What the program around an allocator knows of streams and the driver cannot be asked for.
//
// A stream's handle says neither whether the stream still exists nor whether it is the one that had
// the handle before: drivers crash on a handle that was destroyed. Torch knows of its own streams
// that they are never destroyed, and of a thread which stream it works on.
//
// Implemented by the shim for torch. Where nobody implements it only the default stream is known to
// last, and every other one takes the safe and slower way. Called under the allocator's lock, from
// the thread that allocates or frees: it calls nothing of the allocator and takes no lock that is
// held around a call of it. Thread-safe.
#pragma once

#include "core/units.h"

namespace vramx {

class Surroundings {
 public:
  Surroundings() = default;
  Surroundings(const Surroundings&) = delete;
  Surroundings& operator=(const Surroundings&) = delete;
  virtual ~Surroundings() = default;

  // Whether the stream lives as long as the process. Asked about a stream that the calling thread
  // allocates on; a wrong "no" costs time alone.
  virtual bool is_lasting(StreamName stream) const = 0;
  // Whether the calling thread works on the stream now, which therefore exists.
  virtual bool is_current(StreamName stream) const = 0;
  // Whether a graph is being captured on the device, as far as is known. While one is, the device
  // as a whole can be neither waited for nor recorded.
  virtual bool is_capturing(int device) const = 0;
};

// A program whose streams all last, as a recorded one's do.
class LastingStreams final : public Surroundings {
 public:
  bool is_lasting(StreamName) const override { return true; }
  bool is_current(StreamName) const override { return true; }
  bool is_capturing(int) const override { return false; }
};

}  // namespace vramx
