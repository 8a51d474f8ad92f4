// The allocator of one device: composes everything else here, and owns the lock.
//
// A request takes what its stream may have at once (core/quick_placement). Where nothing fits it is
// planned (core/planner) and the plan carried out without the lock (core/executor), first with
// memory that it need not wait for and with growth, and only where that fails with memory that it
// waits for, on the device. Nothing is moved, no live mapping is unmapped, and the host waits for
// the device only where a caller asks for memory to be given back.
//
// Thread-safe: every public method takes the lock, and lets it go around driver calls that may take
// long and around user callbacks. Inert in a forked child: allocate fails, free does nothing, looks
// find nothing. Allocate and free are O(log extents) and call the driver only where an extent is
// missing and, with several streams, to mark a stream.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/adaptive_mutex.h"
#include "core/block_book.h"
#include "core/config.h"
#include "core/device_state.h"
#include "core/driver.h"
#include "core/executor.h"
#include "core/fork_guard.h"
#include "core/out_of_memory.h"
#include "core/planner.h"
#include "core/quick_placement.h"
#include "core/reclaimer.h"
#include "core/surroundings.h"

namespace vramx {

struct SpanInfo {
  Address address;
  Bytes size;
  SpanState state = SpanState::kUnmapped;
  Address block;             // of a used span: the address its owner holds
  bool is_in_alias = false;  // and whether that is an alias
};

// A block that somebody holds.
struct LiveBlock {
  Address address;
  Bytes size{};  // what it takes: a multiple of 512
  Bytes requested{};
  Stream stream = Stream::kDefault;  // of its allocation
};

// Part of what is held. A block in an alias is one piece at the address that its owner has; what
// lies under it in the arena is not listed again.
struct HeldPiece {
  LiveBlock block;  // no address: free
  Address begin;
  Bytes size{};
};

class DeviceAllocator {
 public:
  // The driver outlives the allocator. Fails where the addresses cannot be reserved.
  static Result<std::unique_ptr<DeviceAllocator>> create(Driver& driver,
                                                         const AllocatorConfig& config);
  ~DeviceAllocator();
  DeviceAllocator(const DeviceAllocator&) = delete;
  DeviceAllocator& operator=(const DeviceAllocator&) = delete;

  // At least `size` bytes, aligned to 512; a request of none is one of a single unit. The calling
  // thread works on the stream. kOutOfMemory after everything was tried; what was there then is
  // built at `why`, and last_out_of_memory() has it until the next failure of any thread.
  Result<Address> allocate(Bytes size, Stream stream, OutOfMemory* why = nullptr);
  // kInvalidValue for an address that is not a live block's. `freed` gets what the block was.
  Status free(Address address, LiveBlock* freed = nullptr);
  // `stream`, on which the calling thread works, or which lasts, uses the block too: its memory
  // waits for that stream as well once it is freed.
  Status record_stream(Address address, StreamName stream, bool is_lasting);

  // Waits until freed memory is idle, then gives whole free chunks back to the device.
  DefragmentReport trim();
  // The same after collecting every idle alias.
  DefragmentReport defragment();
  void set_limit(Bytes limit);
  // Called without the lock when memory runs out, in order; what it frees is there for the request.
  void add_relief(std::function<void()> callback);
  // Called without the lock for every range that was mapped (it is held already, and nobody's yet)
  // or unmapped (it is held still, and mapped again only after). An empty one ends it; calls that
  // are under way may still come.
  void set_observer(HoldingObserver observer);
  // Null for none; it outlives the allocator.
  void set_surroundings(const Surroundings* surroundings);
  // Gives the device `peer` access to all that is mapped and will be. Where it fails some mappings
  // may have it and some not; it may be called again.
  Status allow_peer(int peer);

  bool owns(Address address) const;
  Piece arena_addresses() const { return state_.grounds.arena; }
  Piece alias_addresses() const { return state_.grounds.aliases; }
  Bytes capacity() const { return state_.grounds.capacity; }
  // Bytes held from the driver, and those of live blocks. Read one word each, without the lock.
  Bytes held() const { return {state_.held.load(std::memory_order_relaxed)}; }
  Bytes allocated() const { return {allocated_.load(std::memory_order_relaxed)}; }
  // kInvalidValue for an address that is not a live block's.
  Result<LiveBlock> find(Address address) const;
  // The largest request that would succeed now without relief: where streams keep to themselves,
  // one of the default stream. Asks the device how much it has left.
  Bytes largest_obtainable();
  // In address order, under the lock: `visit` calls nothing of this class. Sizes add up to held().
  void for_each_piece(const std::function<void(const HeldPiece&)>& visit) const;
  AllocatorStats stats() const;
  // The same, with the peaks since this was last called: for a caller that holds memory of its own,
  // whose peak together with this is that of the sum in each interval in which its part is
  // constant.
  AllocatorStats take_interval_stats();
  void reset_peak_stats();
  void reset_accumulated_stats();
  OutOfMemory last_out_of_memory() const;
  std::vector<TraceEvent> events() const;
  std::vector<SpanInfo> layout() const;
  // Recomputes every equation of types.h and names the first that does not hold.
  std::string check() const;

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  DeviceAllocator(Driver& driver, const AllocatorConfig& config,
                  const DeviceState::Grounds& grounds);

  // device_allocator.cpp
  Address publish(const Placement& placement, Bytes requested, Bytes size, StreamIndex stream);
  void note_allocated();
  LiveBlock live_block(SpanId first) const;
  TagSet tags_of_free(const UsedSpan& block, SpanId first, bool is_marked, Lock& lock);
  void give_back(SpanId first, const UsedSpan& block, const TagSet& tags);
  DefragmentReport release(bool all_aliases);
  Status note_out_of_memory(Bytes requested, const Status& cause, OutOfMemory* why, Lock& lock);

  // slow_path.cpp
  Result<Placement> place_slowly(Bytes size, StreamIndex stream, Lock& lock);
  Result<Placement> try_all(Bytes size, StreamIndex stream, Lock& lock);
  Result<Placement> try_within(Request request, Lock& lock);
  void ask_streams(Lock& lock);
  void note_streams();
  void note_asker(StreamIndex stream);
  void tell_apart(bool is_apart);
  void relieve(Lock& lock);
  void learn_all(Lock& lock);
  bool wait_for_others(Deadline deadline, Lock& lock);
  bool wait_for_streams(Deadline deadline, Lock& lock);

  // inspect.cpp
  AllocatorStats interval_stats() const;
  void begin_interval();
  std::unordered_map<SpanId, SpanId> owners() const;
  std::string check_blocks() const;

  // peers.cpp
  std::vector<Piece> mappings() const;
  bool is_mapping(const Piece& range) const;

  const ForkGuard fork_guard_;
  mutable AdaptiveMutex mutex_;
  DeviceState state_;
  BlockBook blocks_{state_.arena};
  QuickPlacement quick_{state_};
  const Planner planner_{state_};
  Executor executor_{state_};
  Reclaimer reclaimer_{state_, planner_, executor_};
  // Between streams memory that is over becomes one with its neighbours once that is known, so they
  // are asked now and then; more rarely while one of them alone asks for memory, which has its own
  // as it is. A question takes a microsecond or more.
  static constexpr std::uint32_t kRequestsUnasked = 256;
  static constexpr std::uint32_t kRequestsUnaskedAlone = 4096;
  std::uint32_t ask_every_ = UINT32_MAX;  // so many requests; as good as never while there is one
  std::uint32_t ask_in_ = ask_every_;
  // The stream that came to the slow path last, and how many requests were made since it was
  // another one. A step of most programs makes fewer than kRequestsAlone.
  static constexpr std::uint32_t kRequestsAlone = 1 << 14;
  StreamIndex last_asker_ = kNoId;
  std::uint32_t requests_alone_ = 0;
  std::atomic<std::uint64_t> allocated_{0};
  AllocatorStats earlier_peaks_;  // of the intervals before; the rest of it is nothing
  OutOfMemory last_out_of_memory_;
  std::vector<std::function<void()>> relief_;
};

}  // namespace vramx
