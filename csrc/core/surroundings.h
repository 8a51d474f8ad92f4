// What the program around an allocator knows of streams and the driver cannot be asked for.
//
// A stream's handle says neither whether the stream still exists nor whether it is the one that had
// the handle before: drivers crash on a handle that was destroyed. Torch knows of its own streams
// that they are never destroyed, and of a thread which stream it works on.
//
// Nor can it be asked in time whether a graph is being captured: a capture may begin, in another
// thread, between the answer and the call that would spoil it.
//
// Implemented by the shim for torch. Where nobody implements it only the default stream is known to
// last, and every other one takes the safe and slower way. Called from the thread that allocates or
// frees, mostly under the allocator's lock: it calls nothing of the allocator and takes no lock
// that is held around a call of it. Thread-safe.
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
  // Before a call of the driver on a stream, whichever thread works on that, and after. False where
  // a graph is captured on the device, as far as is known, and not elsewhere than on that stream:
  // then the call is not made. After true a capture that is about to begin waits for the end.
  virtual bool begin_call(StreamName stream) const = 0;
  virtual void end_call(int device) const = 0;
  // The same of a call that is for the device as a whole, which waits for it or records it.
  virtual bool begin_device_call(int device) const = 0;
};

// One such call: begun where it may be made, and ended with this. Without surroundings it may.
class OutsideCapture {
 public:
  OutsideCapture(const Surroundings* surroundings, StreamName stream)
      : surroundings_(surroundings),
        device_(stream.device),
        may_call_(surroundings == nullptr || surroundings->begin_call(stream)) {}
  OutsideCapture(const Surroundings* surroundings, int device)
      : surroundings_(surroundings),
        device_(device),
        may_call_(surroundings == nullptr || surroundings->begin_device_call(device)) {}
  ~OutsideCapture() {
    if (surroundings_ != nullptr && may_call_) surroundings_->end_call(device_);
  }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

  bool may_call() const { return may_call_; }

 private:
  const Surroundings* const surroundings_;
  const int device_;
  const bool may_call_;
};

// A program whose streams all last, as a recorded one's do.
class LastingStreams final : public Surroundings {
 public:
  bool is_lasting(StreamName) const override { return true; }
  bool is_current(StreamName) const override { return true; }
  bool begin_call(StreamName) const override { return true; }
  void end_call(int) const override {}
  bool begin_device_call(int) const override { return true; }
};

}  // namespace vramx
