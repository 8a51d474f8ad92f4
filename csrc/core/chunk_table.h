// Which chunk lies where in the arena.
//
// A page table at the driver's granularity finds the chunk of an address in O(1); four bytes a
// page. Chunks that were given back leave their number to the next. Knows nothing of spans but the
// one at each chunk's first byte, which the arena keeps current. Not thread-safe.
#pragma once

#include <string>
#include <vector>

#include "core/types.h"

namespace vramx {

class ChunkTable {
 public:
  ChunkTable(Address base, Bytes page) : base_(base), page_(page) {}

  ChunkId add(Address begin, Bytes size, ChunkHandle handle);
  void remove(ChunkId id);

  Chunk& operator[](ChunkId id) { return chunks_[id]; }
  const Chunk& operator[](ChunkId id) const { return chunks_[id]; }

  // The chunk that holds `address`, which must be mapped; `find` gives kNoId where it is not.
  ChunkId at(Address address) const { return pages_[page_of(address)]; }
  ChunkId find(Address address) const;

  // The first chunk boundary at or after `address`, and the last one at or before it. The bytes
  // before a range's end, or at its begin, must be mapped.
  Address round_up(Address address) const;
  Address round_down(Address address) const;
  // Bytes of the chunks that lie wholly inside a mapped range.
  Bytes whole_bytes(Address begin, Address end) const;

  std::size_t count() const { return chunks_.size() - vacant_.size(); }
  Bytes bytes() const { return bytes_; }
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
  std::size_t page_of(Address address) const { return (address - base_) / page_; }

  Address base_;
  Bytes page_;
  std::vector<Chunk> chunks_;
  std::vector<ChunkId> vacant_;
  std::vector<ChunkId> pages_;  // kNoId where nothing is mapped
  Bytes bytes_{};
};

}  // namespace vramx
