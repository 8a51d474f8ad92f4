#include "core/chunk_table.h"

#include <algorithm>

#include "core/make_room.h"

namespace vramx {

ChunkId ChunkTable::add(Address begin, Bytes size, ChunkHandle handle) {
  ChunkId id = static_cast<ChunkId>(chunks_.size());
  if (vacant_.empty()) {
    make_room(chunks_, chunks_.size() + 1);
    chunks_.emplace_back();
  } else {
    id = vacant_.back();
    vacant_.pop_back();
  }
  chunks_[id] = Chunk{.begin = begin, .size = size, .handle = handle};
  const std::size_t first = page_of(begin);
  const std::size_t last = first + (size.count >> page_shift_);
  make_room(pages_, last);
  if (pages_.size() < last) pages_.resize(last, kNoId);
  std::fill(pages_.begin() + static_cast<std::ptrdiff_t>(first),
            pages_.begin() + static_cast<std::ptrdiff_t>(last), id);
  bytes_ += size;
  return id;
}

void ChunkTable::remove(ChunkId id) {
  const Chunk& chunk = chunks_[id];
  const auto first = pages_.begin() + static_cast<std::ptrdiff_t>(page_of(chunk.begin));
  std::fill(first, first + static_cast<std::ptrdiff_t>(chunk.size.count >> page_shift_), kNoId);
  bytes_ -= chunk.size;
  times_aliased_ -= chunk.times_aliased;
  chunks_[id] = Chunk{};
  vacant_.push_back(id);
}

Bytes ChunkTable::whole_bytes(Address begin, Address end) const {
  if (begin == end) return {};
  const Address first = round_up(begin);
  const Address last = round_down(end);
  return first < last ? last - first : Bytes{};
}

std::size_t ChunkTable::host_bytes() const {
  return chunks_.capacity() * sizeof(Chunk) + pages_.capacity() * sizeof(ChunkId) +
         vacant_.capacity() * sizeof(ChunkId);
}

std::string ChunkTable::check() const {
  std::size_t mapped_pages = 0;
  Bytes sum{};
  std::string broken;
  for_each([&](ChunkId id, const Chunk& chunk) {
    sum += chunk.size;
    const std::size_t end = page_of(chunk.end());
    for (std::size_t page = page_of(chunk.begin); page < end; ++page, ++mapped_pages) {
      if (page >= pages_.size() || pages_[page] != id)
        broken = "chunk " + std::to_string(id) + ": page table";
    }
  });
  if (!broken.empty()) return broken;
  if (sum != bytes_) return "chunks: bytes say " + std::to_string(bytes_.count);
  const auto named = static_cast<std::size_t>(
      std::count_if(pages_.begin(), pages_.end(), [](ChunkId id) { return id != kNoId; }));
  if (named != mapped_pages) return "chunks: a page names a chunk that is not there";
  return {};
}

}  // namespace vramx
