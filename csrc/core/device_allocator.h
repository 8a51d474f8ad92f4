// The allocator of one device: the only class that composes the others, and the owner of the lock.
//
// A request takes the best-fitting extent, or the largest where a block that stays would split one
// that it does not fit well; or, in a program that repeats itself, the place that it had the last
// time round. Where none fits it goes, in this order, to memory that another stream freed, to an
// alias that exists, to growth where the block is small, to a new alias over free pieces with
// growth by what they lack, and at last to relief: what the callbacks free. Nothing is moved, no
// live mapping is unmapped, and the host waits for the device only where a caller asks for memory
// to be given back.
//
// Thread-safe: every public method takes the lock, and lets it go around driver calls and user
// callbacks. Inert in a forked child: allocate fails, free does nothing, looks find nothing.
// Allocate and free are O(log extents) and make no driver call unless an extent is missing.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/adaptive_mutex.h"
#include "core/alias_cache.h"
#include "core/arena.h"
#include "core/block_table.h"
#include "core/config.h"
#include "core/driver.h"
#include "core/event_trace.h"
#include "core/fork_guard.h"
#include "core/lifetimes.h"
#include "core/mapper.h"
#include "core/range_set.h"
#include "core/recurrence.h"
#include "core/stats.h"
#include "core/stitch_plan.h"
#include "core/stream_clocks.h"
#include "core/surroundings.h"

namespace vramx {

// What an out-of-memory error should tell.
struct OutOfMemory {
  Bytes requested{};
  Bytes live{};
  Bytes held{};
  Bytes limit{};
  Bytes free{};
  Bytes largest_extent{};
  Bytes whole_chunks{};  // free, hence stitchable
  std::size_t extents = 0;
  MemoryInfo device{};
  Status cause = ok_status();

  // One line, as torch's callers look for it; `device` is the GPU's ordinal, -1 where it has none.
  std::string message(int device = -1) const;
};

struct DefragmentReport {
  std::size_t aliases_collected = 0;
  Bytes alias_addresses{};  // that those took
  std::size_t extents_before = 0;
  std::size_t extents_after = 0;
  std::size_t chunks_released = 0;
  Bytes released{};
};

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

// What is held has changed by a range of the arena.
enum class Holding : std::uint8_t { kMapped, kUnmapped };
using HoldingObserver = std::function<void(Holding, const Piece&)>;

class DeviceAllocator {
 public:
  // The driver outlives the allocator. Fails where the addresses cannot be reserved.
  static Result<std::unique_ptr<DeviceAllocator>> create(Driver& driver,
                                                         const AllocatorConfig& config);
  ~DeviceAllocator();
  DeviceAllocator(const DeviceAllocator&) = delete;
  DeviceAllocator& operator=(const DeviceAllocator&) = delete;

  // At least `size` bytes, aligned to 512; a request of none is one of a single unit. kOutOfMemory
  // after everything was tried; what was there then is built at `why`, and last_out_of_memory() has
  // it until the next failure of any thread.
  Result<Address> allocate(Bytes size, Stream stream, OutOfMemory* why = nullptr);
  // kInvalidValue for an address that is not a live block's. `freed` gets what the block was.
  Status free(Address address, LiveBlock* freed = nullptr);
  // `stream` uses the block too: its memory waits for that stream as well once it is freed.
  // `is_lasting` says that the stream is never destroyed.
  Status record_stream(Address address, StreamName stream, bool is_lasting);
  // To be called before a stream is destroyed.
  Status forget_stream(Stream stream);

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
  // What the program around it knows of streams; null for nothing. It outlives the allocator.
  void set_surroundings(const Surroundings* surroundings);
  // Gives the device `peer` access to all that is mapped and will be. Where it fails some mappings
  // may have it and some not; it may be called again.
  Status allow_peer(int peer);

  bool owns(Address address) const;
  Piece arena_addresses() const { return {arena_base_, arena_size_}; }
  Piece alias_addresses() const { return {alias_base_, config_.alias_addresses}; }
  Bytes capacity() const { return capacity_; }
  // Bytes held from the driver, and those of live blocks. Read one word each, without the lock.
  Bytes held() const { return {held_.load(std::memory_order_relaxed)}; }
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
  // A request on the slow path.
  struct Request {
    Bytes size;
    StreamIndex stream = kNoId;
    bool is_alone = false;            // takes no memory for which it would have to wait
    bool has_failed_to_wait = false;  // a wait that it needed could not be made
  };
  // How the arena would grow for a contiguous block: in `gap`, behind the extent `before`, if any.
  struct Growth {
    Bytes bytes{};
    SpanId gap = kNoId;
    SpanId before = kNoId;
  };
  // Part of the arena that is set aside for a request.
  struct HeldSpan {
    SpanId id = kNoId;
    TagSet tags;  // to give it back as it was
  };
  using Held = std::vector<HeldSpan>;  // in the order of the block
  // Addresses that could not be emptied: the first `mapped` bytes have something behind them.
  struct Leftover {
    Piece range;
    Bytes mapped;
    SpanId building = kNoId;  // in the arena; none for addresses of aliases
  };
  // Memory is set aside by an operation of this thread that lets the lock go: what it does not use
  // it gives back. Made and destroyed under the lock.
  class InFlight {
   public:
    explicit InFlight(DeviceAllocator& allocator) : allocator_(allocator) {
      ++allocator_.operations_in_flight_;
    }
    ~InFlight() {
      --allocator_.operations_in_flight_;
      ++allocator_.operations_landed_;
    }
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;

   private:
    DeviceAllocator& allocator_;
  };
  using Deadline = std::chrono::steady_clock::time_point;
  struct Placement {
    Address address;
    SpanId first_span = kNoId;
    AliasId alias = kNoId;
  };

  // Of a block that lies in an alias, or that further streams use.
  struct BlockDetails {
    Address address;  // that its owner holds
    AliasId alias = kNoId;
    std::vector<StreamIndex> users;  // other than the stream of its allocation
  };

  struct Grounds {  // what the driver granted
    Bytes capacity;
    Piece arena;
    Address aliases;
  };
  DeviceAllocator(Driver& driver, const AllocatorConfig& config, const Grounds& grounds);

  // device_allocator.cpp
  Placement place_as_before(Bytes size, StreamIndex stream, Lock& lock);
  SpanId take_as_before(Address place, Bytes size, StreamIndex stream, Lock& lock);
  bool is_at_once(SpanId extent, StreamIndex stream) const;
  SpanId take_best(Bytes size, StreamIndex stream);
  SpanId take_large(SpanId best, Bytes size, StreamIndex stream);
  Bytes usual_chunk() const;
  Address publish(const Placement& placement, Bytes requested, Bytes size, StreamIndex stream);
  void give_back_block(SpanId first, const UsedSpan& block);
  TagSet stamp_free(const UsedSpan& block);
  void note_allocated();
  BlockTable::Entry find_block(Address address) const;
  Address address_of(SpanId first) const;
  AliasId alias_of(SpanId first) const;
  BlockDetails& details_of(SpanId first);
  LiveBlock live_block(SpanId first) const;
  Status note_out_of_memory(Bytes requested, const Status& cause, OutOfMemory* why, Lock& lock);

  // inspect.cpp
  AllocatorStats interval_stats() const;
  std::unordered_map<SpanId, SpanId> owners() const;
  Bytes largest_stitch(StreamIndex stream) const;
  std::string check_blocks() const;

  static Status nothing_here() { return {StatusCode::kOutOfMemory, 0, "allocate"}; }

  // placement.cpp: each step fails where it has nothing to offer, and leaves no trace then
  Result<Placement> place_slowly(Bytes size, StreamIndex stream, Lock& lock);
  SpanId take_range(const Piece& range, StreamIndex stream, Lock& lock);
  Placement reuse_as_before(AliasId alias, Bytes size, StreamIndex stream, Lock& lock);
  Result<Placement> try_all(Request& request, Lock& lock);
  bool wait_for_others(Deadline deadline, Lock& lock);
  SpanId find_extent(const Request& request);
  Result<Placement> take_extent(Request& request, Lock& lock);
  AliasFit find_alias(const Request& request) const;
  Result<Placement> reuse_alias(Request& request, Lock& lock);
  Result<Placement> move_in(const AliasFit& fit, Request& request, Lock& lock);
  bool may_take(const TagSet& tags, const Request& request) const;
  Held hold(const std::vector<Piece>& pieces);
  void give_back(const Held& held);
  Status order(Request& request, const Held& held, Lock& lock);
  SpanId chain(const Held& held);

  // growth.cpp
  Result<Placement> grow(Request& request, Lock& lock);
  Growth growth_for(const Request& request) const;
  Bytes room() const;
  bool is_within_limit(Bytes growth) const;
  Result<SpanId> add_chunks(const Growth& growth, Bytes request, Lock& lock);
  MapOutcome build_chunks(const Piece& range, const std::vector<Bytes>& sizes,
                          std::vector<MappedChunk>& chunks, Lock& lock);
  bool is_growth_in_doubt(Bytes growth) const;
  void observe(Holding change, const Piece& range, Lock& lock);

  // stitching.cpp
  Result<Placement> stitch(Request& request, Lock& lock);
  bool is_growth_as_good(const Request& request, Bytes missing) const;
  StitchPlan plan(const Request& request) const;
  Result<Held> hold_with_growth(StitchPlan& plan, Bytes request, Lock& lock);
  std::vector<ChunkId> chunks_under(const Held& held) const;
  Status map_alias(const Held& held, Lock& lock, Placement* placement);
  Address take_alias_addresses(Bytes size, Lock& lock);
  MapOutcome map_unlocked(Address base, const std::vector<MappedChunk>& chunks, Lock& lock);

  // peers.cpp
  Status catch_up_access(const Piece& range, std::uint64_t generation, Lock& lock);
  std::vector<Piece> mappings() const;
  bool is_mapping(const Piece& range) const;

  // reclaim.cpp
  void relieve(Lock& lock);
  enum class Merge : std::uint8_t { kNone, kAlike };
  void drop_complete_tags(Merge merge);
  void ask_all_streams(Lock& lock);
  void ask_streams_of(const TagSet& tags, StreamIndex reader, Lock& lock);
  bool is_idle(AliasId id) const;
  bool collect_aliases(std::size_t mappings, Lock& lock);
  bool unmap_aliases(const std::vector<AliasId>& ids, Lock& lock, DefragmentReport* report);
  void note_leftovers(const MapOutcome& outcome, const Piece& range, SpanId building);
  void give_up_range(const Piece& range, SpanId building);
  void retry_leftovers(Lock& lock);
  std::vector<ChunkId> releasable_chunks(std::vector<AliasId>* aliases) const;
  bool is_releasable(ChunkId id, const Chunk& seen) const;
  void release_whole_chunks(Lock& lock, DefragmentReport* report);
  bool release_chunk(const Chunk& chunk, Lock& lock);
  void settle_all(Lock& lock);

  Driver& driver_;
  const AllocatorConfig config_;
  const ForkGuard fork_guard_;
  const Bytes capacity_;  // of the device, all processes counted
  const Address arena_base_;
  const Bytes arena_size_;
  const Address alias_base_;

  mutable AdaptiveMutex mutex_;
  Bytes limit_;
  Arena arena_;
  AliasCache aliases_;
  RangeSet alias_addresses_;
  StreamClocks clocks_;
  BlockTable blocks_;
  std::vector<BlockDetails> details_;
  std::vector<std::uint32_t> vacant_details_;
  Recurrence recurrence_;
  Lifetimes lifetimes_;
  std::array<Address, Lifetimes::kKins> kin_ends_{};  // behind the last large block of each
  AllocatorStats stats_;                              // its peaks are those of the interval
  AllocatorStats earlier_peaks_;  // of the intervals before; the rest of it is nothing
  EventTrace trace_;
  std::atomic<std::uint64_t> held_{0};
  std::atomic<std::uint64_t> allocated_{0};
  Bytes building_{};                   // growth that is under way, counted against the limit
  std::size_t building_mappings_ = 0;  // of aliases under way, counted against their ceiling
  std::size_t operations_in_flight_ = 0;
  std::uint64_t operations_landed_ = 0;
  bool has_growth_failed_ = false;       // the last one
  std::uint64_t access_generation_ = 0;  // how often a peer was let in
  std::vector<Leftover> leftovers_;
  std::vector<ChunkHandle> unreleased_;
  OutOfMemory last_out_of_memory_;
  std::vector<std::function<void()>> relief_;
  HoldingObserver observer_;
  const Surroundings* surroundings_ = nullptr;
};

}  // namespace vramx
