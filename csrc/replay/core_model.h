// The real core under replay: device_allocator on a simulated or a real device.
//
// Not a model of the core but the core itself, given the interface that the models of torch's
// allocators share, so that one loop runs them all. On a device with bytes it can also prove that
// blocks do not overlap: it writes a pattern of its own into every block and looks for it before
// the block is freed.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/device_allocator.h"
#include "core/surroundings.h"
#include "driver/data_path.h"
#include "driver/sim_driver.h"
#include "replay/allocator_model.h"

namespace vramx::replay {

struct CoreOptions {
  Bytes capacity{UINT64_MAX};  // the allocator's limit; the device itself may be larger
  std::uint64_t id_count = 0;
  enum class Device : std::uint8_t { kSimulated, kCuda } device = Device::kSimulated;
  int ordinal = 0;
  // Streams to deal the blocks out over, with patterns written and checked; 0 keeps the trace's own
  // streams and leaves the bytes alone.
  std::uint32_t pattern_streams = 0;
  // Frees on the simulated device are work that is over when finish_until() says so; else at once.
  bool has_work = false;
};

struct Placed {
  Address address;
  Bytes size;
  enum class Kind : std::uint8_t { kBlock, kAlias, kFree } kind = Kind::kFree;
  std::int64_t id = -1;
};

class CoreModel final : public AllocatorModel {
 public:
  // Fails where the device cannot be opened.
  static Result<std::unique_ptr<CoreModel>> open(const CoreOptions& options);
  ~CoreModel() override;

  AllocateResult allocate(std::uint32_t id, Bytes size, std::uint8_t stream) override;
  void free(std::uint32_t id) override;
  void set_time(std::uint32_t time_us) override { time_us_ = time_us; }
  void finish_until(std::uint32_t time_us) override;
  Bytes reserved() const override { return allocator_->held(); }
  Bytes peak_allocated() const override;
  DriverCalls driver_calls() const override { return driver_->calls(); }
  std::uint64_t retries() const override;
  std::string check() const override { return allocator_->check(); }

  std::uint64_t mismatches() const { return mismatches_; }
  AllocatorStats stats() const { return allocator_->stats(); }
  // The arena in address order: what each block holds of it, and what is free.
  std::vector<Placed> layout() const;

 private:
  explicit CoreModel(const CoreOptions& options);
  Status start();
  template <class AnyDriver>
  Status start_on(Result<std::unique_ptr<AnyDriver>> opened);
  Stream stream_for(std::uint32_t id, std::uint8_t stream) const;
  void write_pattern(std::uint32_t id, Bytes size, Stream stream);
  void check_pattern(std::uint32_t id);

  struct Held {
    Address address;
    Bytes size;
    Stream stream = Stream::kDefault;
  };

  // Work on a stream that is not over.
  struct Work {
    std::uint32_t time_us = 0;
    Stream stream = Stream::kDefault;
  };

  const CoreOptions options_;
  const LastingStreams surroundings_;
  std::unique_ptr<Driver> driver_;
  SimDriver* sim_ = nullptr;   // the same object, where work is simulated
  Bytewise* bytes_ = nullptr;  // the same object as driver_
  std::unique_ptr<DeviceAllocator> allocator_;
  std::vector<Held> blocks_;  // by id
  std::vector<Stream> streams_;
  std::uint64_t mismatches_ = 0;
  std::uint32_t time_us_ = 0;
  std::deque<Work> work_;
};

}  // namespace vramx::replay
