// The allocators of this process as one interface: the way in for code that is compiled apart from
// the core, which is torch's shim. Devices (process/devices.h) implements it.
//
// It is declared here and nowhere else. Two compilers of one platform agree on virtual calls, as
// they do for torch's own allocator interface; what they have to share are this header and those
// of core/ that it includes. So the interface comes in an AllocatorsHandle, whose version and
// layout must be equal on both sides before the first call. Callbacks are plain functions with a
// context, because the sides may have different standard libraries.
//
// Nothing throws. Thread-safe; inert in a child that was forked after note_use() or the first start
// of a device: allocate fails there and free does nothing. One that was forked before is none.
// A device that is not there yet is started by the first allocate on it, and not before: its
// context and its addresses cost something. A call is one indirect jump.
#pragma once

#include <cstdint>

#include "core/stats.h"
#include "core/surroundings.h"
#include "core/units.h"

namespace vramx {

enum class CoreCode : std::int32_t {
  kOk,
  kOutOfMemory,  // out_of_memory_text() says more
  kNotOurs,      // the address is no block of any device
  kUnavailable,  // the device cannot be used by the core at all; failure_text() says why
  kForked,       // is_in_child()
};

// A live block, as its owner sees it.
struct CoreBlock {
  Address address;
  Bytes size;       // what it takes: a multiple of 512
  Bytes requested;  // what was asked for
  Stream stream = Stream::kDefault;
  std::int32_t device = -1;
};

// A piece of what a device holds. Pieces that serve a block through an alias are not listed in the
// arena but once, whole, at the alias's address: sizes add up to what is held, and every live block
// is found at the address that its owner has.
struct CorePiece {
  CoreBlock block;  // no address: free
  Address begin;
  Bytes size;
  bool begins_segment = false;  // not contiguous with the piece before it
};

enum class CoreEventKind : std::int32_t { kMapped, kUnmapped };

// A change of what a device holds.
struct CoreEvent {
  CoreEventKind kind = CoreEventKind::kMapped;
  std::int32_t device = -1;
  Address begin;
  Bytes size;
};

// What defragment did.
struct CoreReport {
  std::uint64_t aliases_collected = 0;
  std::uint64_t extents_before = 0;
  std::uint64_t extents_after = 0;
  Bytes released;
};

class Allocators {
 public:
  static constexpr int kAll = -1;  // as a device: all that were started

  using Relieve = void (*)(void* context, std::int32_t device);
  using Observe = void (*)(void* context, const CoreEvent& event);
  using Visit = void (*)(void* context, const CorePiece& piece);

  Allocators() = default;
  Allocators(const Allocators&) = delete;
  Allocators& operator=(const Allocators&) = delete;

  // --- blocks: the hot path ---------------------------------------------------------------------
  // `size` is above zero. `address` is written on kOk alone.
  virtual CoreCode allocate(int device, Bytes size, Stream stream, Address* address) = 0;
  // `freed` may be null. An address that lies in no device's ranges is told without a lock.
  virtual CoreCode free(Address address, CoreBlock* freed) = 0;
  // `is_lasting` says that the stream is never destroyed.
  virtual CoreCode record_stream(Address address, StreamName stream, bool is_lasting) = 0;
  virtual CoreCode find(Address address, CoreBlock* block) const = 0;

  // --- memory given back, and bounded -----------------------------------------------------------
  // Each takes kAll, too. The first two wait for the device.
  virtual void trim(int device) = 0;
  virtual CoreReport defragment(int device) = 0;
  // Of what is held; UINT64_MAX for none. Kept for a device that is not started yet, and with kAll
  // for all that are not.
  virtual void set_limit(int device, Bytes limit) = 0;
  // Called, in order, without a lock, when memory runs out.
  virtual void add_relief(Relieve relieve, void* context) = 0;

  // --- looks ------------------------------------------------------------------------------------
  // These two, the two resets and for_each_piece take kAll, too.
  virtual Bytes held(int device) const = 0;       // one read, without a lock
  virtual Bytes allocated(int device) const = 0;  // likewise
  // The largest request that would succeed now, as far as can be told without trying.
  virtual Bytes largest_obtainable(int device) = 0;
  virtual AllocatorStats stats(int device) const = 0;  // zeros before its start
  // The same, with the peaks since this was last asked of the device.
  virtual AllocatorStats take_interval_stats(int device) = 0;
  virtual void reset_peak_stats(int device) = 0;
  virtual void reset_accumulated_stats(int device) = 0;
  // In address order, under the device's lock: `visit` calls nothing of this class. Memory that is
  // set aside for a request under way is listed as free.
  virtual void for_each_piece(int device, Visit visit, void* context) const = 0;
  // Called without a lock, after the fact: what was mapped is held then, and what was unmapped is
  // no longer there but still counted. One observer; null for none, though calls that are under way
  // may still come.
  virtual void set_observer(Observe observe, void* context) = 0;
  // What the program around the allocators knows of streams; null for nothing. Kept for devices
  // that are not started yet. It outlives all use of the allocators.
  virtual void set_surroundings(const Surroundings* surroundings) = 0;
  // Of this thread's last failure; valid until its next one. Never null.
  virtual const char* out_of_memory_text() const = 0;
  virtual const char* failure_text() const = 0;
  virtual bool is_in_child() const = 0;
  // CUDA is in use in this process, though no device may be started yet.
  virtual void note_use() = 0;

  // --- other devices ----------------------------------------------------------------------------
  // From now on kernels and copies of `peer` may touch all memory of `device`. Kept for a device
  // that is not started yet. kUnavailable where they cannot.
  virtual CoreCode allow_peer(int device, int peer) = 0;

 protected:
  ~Allocators() = default;  // nobody owns them through this interface
};

// How the interface travels: by the address of this, as a number.
struct AllocatorsHandle {
  // To be raised with every change of the class above, which no size tells.
  static constexpr std::uint32_t kVersion = 5;
  static constexpr std::uint32_t kLayout = sizeof(AllocatorStats) * 8 + sizeof(CoreBlock) * 4 +
                                           sizeof(CorePiece) * 2 + sizeof(CoreEvent);

  std::uint32_t version = kVersion;
  std::uint32_t layout = kLayout;
  Allocators* allocators = nullptr;

  // Whether the other side was compiled from these headers.
  bool fits() const { return version == kVersion && layout == kLayout && allocators != nullptr; }
};

}  // namespace vramx
