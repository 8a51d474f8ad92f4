// The nouns of the core and the equations that tie them together. Read this file first.
//
//   chunk    physical memory: one driver handle, indivisible, mapped whole
//   arena    virtual: the range where every chunk has its first mapping, in address order
//   alias    virtual: a further mapping of chunks, in any order, elsewhere
//   span     a range of the arena in one state: used, free (then it is an *extent*), unmapped, or
//            being mapped or unmapped, or the border between the zones of the arena
//   block    what a caller holds: one span, or a chain of spans that an alias makes contiguous
//   mark     an event on a stream, numbered: it covers everything queued there when it was recorded
//   tag      "free once stream S is past its n-th mark"; an extent may carry several
//   run      neighbouring extents that one request may take together
//
//   arena   |  used  |   free   | used |     free     |         unmapped          |
//   chunks  |      0      |   1  |      2      |  3  |  4  |
//   alias          | 3 | 1 |            a block of chunk 3 and the start of chunk 1
//
// Invariants; each class's check() tests its own, in this order:
//   span 1   spans tile the arena: the first begins at its base, each begins where the last ended
//   span 2   a used or free span lies on chunks; an unmapped one on none
//   span 3   no two neighbours are both unmapped, or both free with tags that are alike
//   span 4   mapped bytes = sum of the used and free spans' sizes = sum of the chunks' sizes
//   span 5   free bytes = sum of the extents' sizes; each extent is in exactly one index
//   block 1  allocated bytes = sum of the used spans' sizes
//   block 2  a used span belongs to exactly one block; a block's spans add up to its size
//   alias 1  an alias maps only chunks that exist, none of them twice
//   alias 2  mapping count of a chunk = 1 + the aliases that map it
//   alias 3  a block at an alias address has its bytes pinned in that alias
//   order 1  a tag's number is at most that of its stream's next mark
//   order 2  a stream's marks are numbered upwards, from above what is over to below its next
//   order 3  what R is known to come behind of S is below S's next mark
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/units.h"

namespace vramx {

// The finest size the allocator deals in: torch promises its callers 512-byte alignment, and every
// size is a multiple of it.
constexpr Bytes kBlockUnit{512};

using SpanId = std::uint32_t;
using ChunkId = std::uint32_t;
using AliasId = std::uint32_t;
using StreamIndex = std::uint32_t;  // dense number of a stream, never given to another one

constexpr std::uint32_t kNoId = ~std::uint32_t{0};

// "Usable once `stream` is past its mark of this number, or a later one."
struct Tag {
  StreamIndex stream = kNoId;
  std::uint64_t number = 0;

  constexpr bool operator==(const Tag&) const = default;
};

// Memory that a stream frees with tags of one group, of so many consecutive numbers, may be one
// extent. With smaller ones its memory is in as many pieces as it frees blocks; with far larger
// ones others find it over later.
constexpr std::uint64_t kTagGroup = 128;

// What must have run before an extent is reused. Empty: nothing, it may be used on any stream.
// Nearly always there is one tag; a vector is only touched for the others.
class TagSet {
 public:
  TagSet() = default;
  explicit TagSet(Tag tag) : first_(tag) {}

  bool empty() const { return first_.stream == kNoId; }
  std::size_t size() const { return empty() ? 0 : 1 + others_.size(); }
  const Tag& operator[](std::size_t i) const { return i == 0 ? first_ : others_[i - 1]; }

  // Raises the stream's entry or adds one.
  void add(Tag tag);
  void add(const TagSet& other);
  // Takes out the tags for which `is_done(tag)`; false where there are none. The first, which says
  // whose own the memory is, goes last: a set is told from memory of one stream.
  template <class IsDone>
  bool drop(IsDone is_done);

 private:
  Tag first_;
  std::vector<Tag> others_;
};

template <class IsDone>
bool TagSet::drop(IsDone is_done) {
  const std::size_t had = size();
  std::erase_if(others_, is_done);
  if (had != 0 && others_.empty() && is_done(first_)) first_ = Tag{};
  return size() != had;
}

enum class SpanState : std::uint8_t {
  kUsed,
  kFree,
  kUnmapped,
  kBuilding,  // a thread is mapping or unmapping it, outside the lock
  kBorder,    // nothing is ever mapped there
};

// What an extent has beside its range: its place in its index, and its tag, when one is enough
// (stream kNoId: no tag); several are in the arena's table under `tag_set`.
struct FreeSpan {
  SpanId left = kNoId;
  SpanId right = kNoId;
  SpanId parent = kNoId;
  StreamIndex tag_stream = kNoId;
  std::uint32_t tag_set = kNoId;
  std::uint32_t bin = 0;  // of its index
  std::uint64_t tag_number = 0;
};

// What a used span has: the first of a block all of this, the others `next` alone.
struct UsedSpan {
  SpanId next = kNoId;            // of the same block
  StreamIndex stream = kNoId;     // of the allocation
  std::uint32_t details = kNoId;  // entry in the table of what only few blocks have
  std::uint32_t time = 0;         // of a large block's request, and its context: see Lifetimes
  std::uint32_t context = 0;
  Bytes requested;
};

// One line of the cache.
struct alignas(64) Span {
  Address begin;
  Bytes size;
  SpanId previous = kNoId;  // neighbours in address order
  SpanId next = kNoId;
  union {  // by state; in the other states neither means anything
    FreeSpan free;
    UsedSpan used;
  };
  SpanState state = SpanState::kUnmapped;

  Span() : free() {}
  Address end() const { return begin + size; }
};
static_assert(sizeof(Span) == 64);

// A range of addresses, of the arena or of an alias.
struct Piece {
  Address begin;
  Bytes size;

  Address end() const { return begin + size; }
};

// Physical memory, wherever it is mapped.
struct MappedChunk {
  Bytes size;
  ChunkHandle handle = ChunkHandle::kNone;
};

struct Chunk {
  Address begin;  // of its mapping in the arena
  Bytes size;
  ChunkHandle handle = ChunkHandle::kNone;
  std::uint32_t alias_count = 0;    // aliases that map it
  std::uint32_t times_aliased = 0;  // those that were made

  Address end() const { return begin + size; }
};

}  // namespace vramx
