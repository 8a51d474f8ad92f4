// Two drivers that stand between the allocator and the simulated device.
//
//   allocator --> InterruptedDriver --> ObservedDriver --> DefectiveDriver --> SimDriver
//
// ForwardingDriver passes every call on. DefectiveDriver breaks one promise, to prove that the
// checks see it. ObservedDriver keeps its own book of what the allocator has asked for: which
// chunk lies at which address, and how often the calls that a policy may not make were made. The
// book is what the shadow trusts; it never asks the allocator. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/driver.h"
#include "stress/scenario.h"

namespace vramx::stress {

class ForwardingDriver : public Driver {
 public:
  explicit ForwardingDriver(Driver& inner) : inner_(inner) {}

  int ordinal() const override { return inner_.ordinal(); }
  Bytes granularity() const override { return inner_.granularity(); }
  Result<MemoryInfo> memory_info() override { return inner_.memory_info(); }
  Result<Address> reserve_address(Bytes size) override { return inner_.reserve_address(size); }
  Status release_address(Address at, Bytes size) override {
    return inner_.release_address(at, size);
  }
  Result<ChunkHandle> create_chunk(Bytes size) override { return inner_.create_chunk(size); }
  Status release_chunk(ChunkHandle chunk) override { return inner_.release_chunk(chunk); }
  Status map(Address at, Bytes size, ChunkHandle chunk) override {
    return inner_.map(at, size, chunk);
  }
  Status unmap(Address at, Bytes size) override { return inner_.unmap(at, size); }
  Status set_access(Address at, Bytes size) override { return inner_.set_access(at, size); }
  Status allow_peer(int device) override { return inner_.allow_peer(device); }
  Result<Event> create_event(int device) override { return inner_.create_event(device); }
  Status destroy_event(Event event) override { return inner_.destroy_event(event); }
  Status record_event(Event event, StreamName stream) override {
    return inner_.record_event(event, stream);
  }
  Status record_device(Event event, int device) override {
    return inner_.record_device(event, device);
  }
  Result<bool> query_event(Event event) override { return inner_.query_event(event); }
  Status wait_event(StreamName stream, Event event) override {
    return inner_.wait_event(stream, event);
  }
  Status synchronize(int device) override { return inner_.synchronize(device); }
  Result<std::uint64_t> stream_id(StreamName stream) override { return inner_.stream_id(stream); }
  DriverCalls calls() const override { return inner_.calls(); }

 protected:
  Driver& inner_;
};

class DefectiveDriver final : public ForwardingDriver {
 public:
  DefectiveDriver(Driver& inner, Defect defect) : ForwardingDriver(inner), defect_(defect) {}

  Status release_chunk(ChunkHandle chunk) override;
  Status map(Address at, Bytes size, ChunkHandle chunk) override;
  Status set_access(Address at, Bytes size) override;
  Status record_event(Event event, StreamName stream) override;
  Status record_device(Event event, int device) override;
  Result<bool> query_event(Event event) override;
  Status wait_event(StreamName stream, Event event) override;
  Result<std::uint64_t> stream_id(StreamName stream) override;

 private:
  const Defect defect_;
  std::unordered_map<std::uint64_t, StreamName> recorded_on_;  // by event
  std::unordered_map<std::uint64_t, ChunkHandle> last_of_size_;
  std::unordered_map<std::uint64_t, bool> is_mapped_;
};

// Bytes of one chunk.
struct PhysicalPiece {
  ChunkHandle chunk = ChunkHandle::kNone;
  Bytes offset{};
  Bytes size{};
};

class ObservedDriver final : public ForwardingDriver {
 public:
  // Told before the inner driver is: what is about to lose its bytes.
  class Listener {
   public:
    virtual void on_unmap(Address at, Bytes size) = 0;
    virtual void on_chunk_gone(ChunkHandle chunk) = 0;

   protected:
    ~Listener() = default;
  };
  struct Counts {
    std::uint64_t calls = 0;  // all that may fail
    std::uint64_t created = 0;
    std::uint64_t released = 0;
    std::uint64_t marks = 0;       // recorded
    std::uint64_t waits = 0;       // of a stream
    std::uint64_t host_waits = 0;  // for the device
    std::uint64_t failed_growths = 0;
    std::uint64_t failed_returns = 0;  // of unmap and release_chunk
  };
  struct Chunk {
    Bytes size{};
    Address canonical;  // its first mapping
    std::size_t mappings = 0;
    bool is_referenced = true;
  };
  using Chunks = std::map<ChunkHandle, Chunk>;

  ObservedDriver(Driver& inner, Listener& listener)
      : ForwardingDriver(inner), listener_(listener) {}

  Result<Address> reserve_address(Bytes size) override;
  Result<ChunkHandle> create_chunk(Bytes size) override;
  Status release_chunk(ChunkHandle chunk) override;
  Status map(Address at, Bytes size, ChunkHandle chunk) override;
  Status unmap(Address at, Bytes size) override;
  Status set_access(Address at, Bytes size) override;
  Result<Event> create_event(int device) override;
  Status record_event(Event event, StreamName stream) override;
  Status record_device(Event event, int device) override;
  Result<bool> query_event(Event event) override;
  Status wait_event(StreamName stream, Event event) override;
  Status synchronize(int device) override;
  Result<std::uint64_t> stream_id(StreamName stream) override;

  // What lies behind the range, in its order; nothing where a byte of it cannot be accessed.
  std::vector<PhysicalPiece> pieces(Address at, Bytes size) const;
  // The address less the begin of its reservation, plus 2^56 for each reservation before that: the
  // same in every process.
  std::uint64_t relative(Address at) const;

  const Counts& counts() const { return counts_; }
  // What was counted since then was another step's; failures are counted for all.
  void forget_since(const Counts& then);
  const Chunks& chunks() const { return chunks_; }
  std::size_t mappings() const { return mappings_.size(); }

 private:
  struct Mapping {
    Bytes size{};
    ChunkHandle chunk = ChunkHandle::kNone;
    bool is_accessible = false;
  };
  struct Reservation {
    Address base;
    Bytes size;
  };
  void forget_if_gone(ChunkHandle handle);

  Listener& listener_;
  Counts counts_;
  Chunks chunks_;
  std::map<Address, Mapping> mappings_;
  std::vector<Reservation> reservations_;
};

}  // namespace vramx::stress
