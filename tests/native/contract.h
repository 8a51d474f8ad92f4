// The few pieces that the native checks share: what is under test, a macro that records a broken
// expectation, a runner that prints one line a check, and mappings, streams and events that clean
// up after themselves.
//
// No framework, so that the suite builds with one compiler call on any machine. Checks run one
// after another; an expectation may be stated from several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/driver.h"
#include "core/units.h"
#include "driver/data_path.h"
#include "driver/sim_driver.h"

namespace vramx::contract {

struct Device {
  Driver& driver;
  Bytewise& bytes;
  // Another device that can reach this one's memory, and what it writes there with; none: -1, null.
  int peer = -1;
  Bytewise* peer_bytes = nullptr;

  Bytes unit() const { return driver.granularity(); }
};

// Results of all checks so far; `broken` and `skipped_for` are of the check that is running.
struct Tally {
  int passed = 0;
  int failed = 0;
  int skipped = 0;
  std::atomic<int> broken{0};
  const char* skipped_for = nullptr;
};
inline Tally& tally() {
  static Tally instance;
  return instance;
}

inline bool expect(bool holds, const char* claim, const char* file, int line) {
  if (holds) return true;
  ++tally().broken;
  std::printf("  %s:%d: expected %s\n", file, line, claim);
  return false;
}

#define EXPECT(claim) vramx::contract::expect(static_cast<bool>(claim), #claim, __FILE__, __LINE__)
// For what the rest of the check stands on.
#define REQUIRE(claim) \
  if (!EXPECT(claim)) return

// For a check that cannot be made here.
#define SKIP_UNLESS(possible, reason)                \
  if (!(possible)) {                                 \
    vramx::contract::tally().skipped_for = (reason); \
    return;                                          \
  }

// A check, which a program has from its definition on: the name is the claim, and the body a member
// of a fixture that is made for it alone.
//   CHECK(Fixture, a_freed_block_is_found) { EXPECT(find(block)); }
#define CHECK(Fixture, claim)                                                                     \
  struct claim final : Fixture {                                                                  \
    void hold();                                                                                  \
  };                                                                                              \
  const vramx::contract::Registered registered_##claim(__FILE__, #claim, [] { claim().hold(); }); \
  void claim::hold()

// Reveals a private member to the check that needs it, by the one way that the language
// leaves open: an explicit instantiation may name it.
//   REVEAL(FreeBytes, &Arena::free_bytes_);
//   arena.*member(FreeBytes{}) = ...;
#define REVEAL(Name, pointer)                    \
  struct Name {                                  \
    friend auto member(Name);                    \
  };                                             \
  template <auto kMember>                        \
  struct Reveal##Name {                          \
    friend auto member(Name) { return kMember; } \
  };                                             \
  template struct Reveal##Name<pointer>

// For a check that has no state to set up.
struct Nothing {};

struct Check {
  std::string file;  // without its folder and ending
  std::string claim;
  void (*run)();
};
inline std::vector<Check>& all_checks() {
  static std::vector<Check> instance;
  return instance;
}

struct Registered {
  Registered(const char* file, std::string claim, void (*run)()) {
    std::ranges::replace(claim, '_', ' ');
    all_checks().push_back({std::filesystem::path(file).stem(), std::move(claim), run});
  }
};

inline void run_check(const Check& check) {
  tally().broken = 0;
  tally().skipped_for = nullptr;
  check.run();
  const bool holds = tally().broken == 0;
  const bool is_skipped = holds && tally().skipped_for != nullptr;
  ++(is_skipped ? tally().skipped : holds ? tally().passed : tally().failed);
  std::printf("%s %s%s%s\n",
              is_skipped ? "skip  "
              : holds    ? "ok    "
                         : "FAILED",
              check.claim.c_str(), is_skipped ? ": " : "", is_skipped ? tally().skipped_for : "");
  std::fflush(stdout);
}

// Runs the checks of these files, or all.
inline void run_checks(std::span<const std::string> files = {}) {
  for (const Check& check : all_checks()) {
    if (files.empty() || std::ranges::find(files, check.file) != files.end()) run_check(check);
  }
}

// Prints how many passed; returns the program's exit code.
inline int closing_line() {
  std::printf("%d passed, %d failed, %d skipped\n", tally().passed, tally().failed,
              tally().skipped);
  return tally().failed == 0 && tally().passed > 0 ? 0 : 1;
}

// A reservation that unmaps what was mapped through it and goes back when it goes out of scope.
class Range {
 public:
  Range(Device& device, Bytes size) : driver_(device.driver), size_(size) {
    const Result<Address> reserved = driver_.reserve_address(size);
    if (reserved.ok()) address_ = reserved.value();
  }
  ~Range() {
    for (const Piece& piece : pieces_) EXPECT(driver_.unmap(piece.address, piece.size).ok());
    if (address_) EXPECT(driver_.release_address(address_, size_).ok());
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  explicit operator bool() const { return static_cast<bool>(address_); }
  Address at(Bytes offset) const { return address_ + offset; }

  // Maps without access; the mapping is undone at the end of the scope.
  Status map(Bytes offset, Bytes size, ChunkHandle chunk) {
    const Status status = driver_.map(at(offset), size, chunk);
    if (status.ok()) pieces_.push_back({at(offset), size});
    return status;
  }
  Status map_with_access(Bytes offset, Bytes size, ChunkHandle chunk) {
    const Status status = map(offset, size, chunk);
    return status.ok() ? driver_.set_access(at(offset), size) : status;
  }
  // The caller has unmapped, or will unmap, everything itself.
  void forget_mappings() { pieces_.clear(); }

 private:
  struct Piece {
    Address address;
    Bytes size;
  };
  Driver& driver_;
  const Bytes size_;
  Address address_{};
  std::vector<Piece> pieces_;
};

// A chunk whose reference goes back at the end of the scope, or when asked to.
class Chunk {
 public:
  Chunk(Device& device, Bytes size) : driver_(device.driver) {
    const Result<ChunkHandle> created = driver_.create_chunk(size);
    if (created.ok()) handle_ = created.value();
  }
  ~Chunk() { release(); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  explicit operator bool() const { return handle_ != ChunkHandle::kNone; }
  ChunkHandle handle() const { return handle_; }
  void release() {
    if (handle_ != ChunkHandle::kNone) EXPECT(driver_.release_chunk(handle_).ok());
    handle_ = ChunkHandle::kNone;
  }

 private:
  Driver& driver_;
  ChunkHandle handle_ = ChunkHandle::kNone;
};

inline StreamName name(const Device& device, Stream stream) {
  return {stream, device.driver.ordinal()};
}

// An event and a stream that are destroyed at the end of the scope.
class AnEvent {
 public:
  AnEvent(Device& device, int ordinal) : driver_(device.driver) {
    const Result<Event> created = driver_.create_event(ordinal);
    if (created.ok()) event_ = created.value();
  }
  explicit AnEvent(Device& device) : AnEvent(device, device.driver.ordinal()) {}
  ~AnEvent() {
    if (event_ != Event::kNone) EXPECT(driver_.destroy_event(event_).ok());
  }
  AnEvent(const AnEvent&) = delete;
  AnEvent& operator=(const AnEvent&) = delete;

  explicit operator bool() const { return event_ != Event::kNone; }
  Event operator*() const { return event_; }
  bool is_complete() const {
    const Result<bool> queried = driver_.query_event(event_);
    return EXPECT(queried.ok()) && queried.value();
  }

 private:
  Driver& driver_;
  Event event_ = Event::kNone;
};

class AStream {
 public:
  explicit AStream(Device& device) : device_(device) {
    const Result<Stream> created = device_.bytes.create_stream();
    if (EXPECT(created.ok())) stream_ = created.value();
  }
  ~AStream() {
    if (stream_ != Stream::kDefault) EXPECT(device_.bytes.destroy_stream(stream_).ok());
  }
  AStream(const AStream&) = delete;
  AStream& operator=(const AStream&) = delete;

  Stream operator*() const { return stream_; }
  inline StreamName name() const { return {stream_, device_.driver.ordinal()}; }

 private:
  Device& device_;
  Stream stream_ = Stream::kDefault;
};

// What the contract is checked on at the moment.
inline Device*& device_under_test() {
  static Device* instance = nullptr;
  return instance;
}

struct OnDevice {
  Device& device = *device_under_test();
  Driver& driver = device.driver;
  Bytewise& bytes = device.bytes;
  const Bytes unit = device.unit();
};

// --- the simulated device alone -----------------------------------------------------------------

constexpr Bytes kSimUnit{64 << 10};

// The device that each of its checks gets: 16 units with bytes.
inline SimOptions small_sim() { return {.capacity = kSimUnit * 16, .granularity = kSimUnit}; }

inline std::unique_ptr<SimDriver> open_sim(const SimOptions& options) {
  auto opened = SimDriver::open(options);
  return opened.ok() ? std::move(opened.value()) : nullptr;
}

inline bool is_empty(const SimDriver& sim) {
  return sim.live_mappings() == 0 && sim.live_chunks() == 0 && sim.live_reservations() == 0 &&
         sim.live_events() == 0 && !sim.used() && sim.check().empty();
}

// A simulated device that its check leaves empty.
struct SimAlone {
  explicit SimAlone(const SimOptions& options = small_sim()) : opened(open_sim(options)) {}
  ~SimAlone() { EXPECT(is_empty(sim)); }
  SimAlone(const SimAlone&) = delete;
  SimAlone& operator=(const SimAlone&) = delete;

  const std::unique_ptr<SimDriver> opened;
  SimDriver& sim = *opened;
  Device device{sim, sim};
};

}  // namespace vramx::contract
