// Which chunk lies where in the arena.
//
// A page table finds the chunk of an address in O(1), by a shift; four bytes a page. A page is the
// driver's granularity or, where that is no power of two, the largest one that divides it. Chunks
// that were given back leave their number to the next. Not thread-safe.
#pragma once

#include <bit>
#include <string>
#include <vector>

#include "core/types.h"

namespace vramx {

class ChunkTable {
 public:
  ChunkTable(Address base, Bytes granularity)
      : base_(base), page_shift_(std::countr_zero(granularity.count)) {}

  ChunkId add(Address begin, Bytes size, ChunkHandle handle);
  void remove(ChunkId id);
  // Another alias maps it.
  void note_aliased(ChunkId id) {
    ++chunks_[id].alias_count;
    ++chunks_[id].times_aliased;
    ++times_aliased_;
  }

  Chunk& operator[](ChunkId id) { return chunks_[id]; }
  const Chunk& operator[](ChunkId id) const { return chunks_[id]; }

  std::size_t page_of(Address address) const { return (address - base_).count >> page_shift_; }
  // The first page that begins at or after `address`.
  std::size_t page_from(Address address) const {
    return ((address - base_).count + (std::uint64_t{1} << page_shift_) - 1) >> page_shift_;
  }

  // The chunk that holds `address`, which must be mapped; `find` gives kNoId where it is not.
  ChunkId at(Address address) const { return pages_[page_of(address)]; }
  ChunkId find(Address address) const {
    const std::size_t page = page_of(address);  // beyond every page, below the base
    return page < pages_.size() ? pages_[page] : kNoId;
  }

  // The first chunk boundary at or after `address`, and the last one at or before it. The bytes
  // before a range's end, or at its begin, must be mapped.
  Address round_up(Address address) const {
    const ChunkId id = find(address);
    // Where nothing is mapped the byte before ends a chunk.
    return id == kNoId || chunks_[id].begin == address ? address : chunks_[id].end();
  }
  Address round_down(Address address) const {
    const ChunkId id = find(address);
    return id == kNoId ? address : chunks_[id].begin;
  }
  // True only where no chunk begins or ends anywhere in [begin, end]; costs no look at a chunk.
  bool is_inside_page(Address begin, Address end) const {
    return page_of(begin - Bytes{1}) == page_of(end);
  }
  // Whether a chunk begins or ends somewhere in [begin, end], a mapped range.
  bool has_bound_in(Address begin, Address end) const {
    return !is_inside_page(begin, end) && round_up(begin) <= end;
  }
  // Bytes of the chunks that lie wholly inside a mapped range.
  Bytes whole_bytes(Address begin, Address end) const;

  std::size_t count() const { return chunks_.size() - vacant_.size(); }
  Bytes bytes() const { return bytes_; }
  // How often the chunks that are here were mapped by an alias, all together.
  std::uint64_t times_aliased() const { return times_aliased_; }
  std::size_t host_bytes() const;

  // Calls visit(id) for each chunk that begins in [begin, end), in address order. Every chunk from
  // the one at `begin` on must be there.
  template <class Visit>
  void for_each_beginning_in(Address begin, Address end, Visit visit) const {
    if (end <= begin) return;
    Address next = round_up(begin);
    while (next < end) {
      const ChunkId id = at(next);
      next = chunks_[id].end();
      visit(id);
    }
  }

  template <class Visit>
  void for_each(Visit visit) const {
    for (ChunkId id = 0; id < chunks_.size(); ++id) {
      if (chunks_[id].handle != ChunkHandle::kNone) visit(id, chunks_[id]);
    }
  }

  // Chunks do not overlap and the page table names each of them on its pages; else what is broken.
  std::string check() const;

 private:
  Address base_;
  int page_shift_;
  std::vector<Chunk> chunks_;
  std::vector<ChunkId> vacant_;
  std::vector<ChunkId> pages_;  // kNoId where nothing is mapped
  Bytes bytes_{};
  std::uint64_t times_aliased_ = 0;
};

}  // namespace vramx
