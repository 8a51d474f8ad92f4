// The allocators of this process as a table of C functions: the one way in for code that is
// compiled apart from the core, which is torch's shim.
//
// Plain data and function pointers only, so that the two sides may come from different compilers.
// They do share the headers of core/ that are included here: `version` and `size_bytes` must be
// equal on both sides, or the shim is refused. Nothing throws. Thread-safe; inert in a forked
// child, where allocate fails and free does nothing.
//
// Every function takes `self`, the table's own field. A device that is not there yet is started by
// the first allocate on it, and not before: its context and its addresses cost something.
#pragma once

#include <cstdint>

#include "core/stats.h"
#include "core/units.h"

namespace vramx {

enum class CoreCode : std::int32_t {
  kOk,
  kOutOfMemory,  // out_of_memory_text() says more
  kNotOurs,      // the address is no block of any device
  kUnavailable,  // the device cannot be used by the core at all; failure_text() says why
  kForked,       // in a forked child
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

struct CoreTable {
  static constexpr std::uint32_t kVersion = 1;

  std::uint32_t version = kVersion;
  std::uint32_t size_bytes = 0;  // of this struct
  void* self = nullptr;

  // --- blocks: the hot path ---------------------------------------------------------------------
  // `size` is above zero. `address` is written on kOk alone.
  CoreCode (*allocate)(void* self, std::int32_t device, Bytes size, Stream stream,
                       Address* address) = nullptr;
  // `freed` may be null.
  CoreCode (*free)(void* self, Address address, CoreBlock* freed) = nullptr;
  CoreCode (*record_stream)(void* self, Address address, Stream stream) = nullptr;
  CoreCode (*find)(void* self, Address address, CoreBlock* block) = nullptr;

  // --- memory given back, and bounded -----------------------------------------------------------
  // Each takes device -1 for all that were started. The first two wait for the device.
  void (*trim)(void* self, std::int32_t device) = nullptr;
  CoreReport (*defragment)(void* self, std::int32_t device) = nullptr;
  // Of what is held; UINT64_MAX for none. Kept for a device that is not started yet, and with -1
  // for all that are not.
  void (*set_limit)(void* self, std::int32_t device, Bytes limit) = nullptr;
  // Called, in order, without a lock, when memory runs out.
  void (*add_relief)(void* self, void (*relieve)(void* context, std::int32_t device),
                     void* context) = nullptr;

  // --- looks ------------------------------------------------------------------------------------
  // These two, the two resets and for_each_piece take device -1 for all that were started.
  Bytes (*held)(void* self, std::int32_t device) = nullptr;       // one read, without a lock
  Bytes (*allocated)(void* self, std::int32_t device) = nullptr;  // likewise
  // The largest request that would succeed now, as far as can be told without trying.
  Bytes (*largest_obtainable)(void* self, std::int32_t device) = nullptr;
  AllocatorStats (*stats)(void* self, std::int32_t device) = nullptr;  // zeros before its start
  void (*reset_peak_stats)(void* self, std::int32_t device) = nullptr;
  void (*reset_accumulated_stats)(void* self, std::int32_t device) = nullptr;
  // In address order, under the device's lock: `visit` calls nothing of this table. Memory that is
  // set aside for a request under way is listed as free.
  void (*for_each_piece)(void* self, std::int32_t device,
                         void (*visit)(void* context, const CorePiece& piece),
                         void* context) = nullptr;
  // Called without a lock, after the fact: what was mapped is held then, and what was unmapped is
  // no longer there but still counted. One observer; null for none, though calls that are under way
  // may still come.
  void (*set_observer)(void* self, void (*observe)(void* context, const CoreEvent& event),
                       void* context) = nullptr;
  // Of this thread's last failure; valid until its next one. Never null.
  const char* (*out_of_memory_text)(void* self) = nullptr;
  const char* (*failure_text)(void* self) = nullptr;
  bool (*is_in_child)(void* self) = nullptr;

  // --- other devices ----------------------------------------------------------------------------
  // From now on kernels and copies of `peer` may touch all memory of `device`. Kept for a device
  // that is not started yet. kUnavailable where they cannot.
  CoreCode (*allow_peer)(void* self, std::int32_t device, std::int32_t peer) = nullptr;
};

}  // namespace vramx
