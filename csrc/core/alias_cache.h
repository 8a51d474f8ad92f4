// Second mappings of chunks, kept after their block is freed so that the next one like it costs no
// driver call.
//
// An alias can serve any block that fits into a run of it whose memory is free at the time: whole
// free chunks, with the free end of a chunk before them and the free start of one behind. An alias
// is pinned while a block lives in it, and turned down while it is being unmapped. Makes no driver
// call; not thread-safe. A search looks at no more than 1024 aliases, at one chunk of most: some
// microseconds, where the driver takes hundreds for a new alias.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/stitch_plan.h"
#include "core/types.h"

namespace vramx {

struct Alias {
  Address base;
  Bytes size{};
  std::vector<ChunkId> chunks;  // in address order of the alias; none twice
  std::uint32_t pins = 0;       // the blocks that live in it
  Bytes pinned{};               // and their bytes
  bool is_leaving = false;      // it is being unmapped: no block may move in
  std::uint64_t last_use = 0;
  TagSet last_tags;  // what must have run before it may be unmapped
};

// Where a block would lie in an alias, and on which pieces of the arena.
struct AliasFit {
  AliasId alias = kNoId;
  Address address;
  std::vector<Piece> pieces;
};

class AliasCache {
 public:
  AliasId add(Address base, const std::vector<ChunkId>& chunks, Arena& arena);
  // Also for an alias whose unmapping failed: it is forgotten, and its addresses are never reused.
  void remove(AliasId id, Arena& arena);

  // The smallest alias with a free run of `size` bytes; accept(pieces) may turn it down.
  template <class Accept>
  AliasFit find(const Arena& arena, Bytes size, Accept accept) const;
  // What lies under this range of an alias; no alias where none has it, or it is being unmapped.
  AliasFit at(const Arena& arena, const Piece& range) const;

  // A block of so many bytes moves in, or out: what its memory then waits for.
  void pin(AliasId id, Bytes size) {
    ++aliases_[id].pins;
    aliases_[id].pinned += size;
    aliases_[id].last_use = ++clock_;
  }
  void unpin(AliasId id, Bytes size, const TagSet& tags) {
    --aliases_[id].pins;
    aliases_[id].pinned -= size;
    aliases_[id].last_tags.add(tags);
  }

  void set_leaving(AliasId id, bool is_leaving) { aliases_[id].is_leaving = is_leaving; }

  const Alias& operator[](AliasId id) const { return aliases_[id]; }
  // The idle ones, least recently used first.
  std::vector<AliasId> idle() const;
  std::vector<AliasId> all() const;
  std::size_t count() const { return by_size_.size(); }
  std::size_t mappings() const { return mappings_; }
  Bytes bytes() const { return bytes_; }
  std::size_t host_bytes() const;

  // Recomputes alias 1 and alias 2 of types.h.
  std::string check(const Arena& arena) const;

 private:
  static constexpr std::size_t kSearched = 1024;

  struct Sized {
    Bytes size;
    // Where the chunk in its middle begins, in the alias and in the arena: most runs need it.
    Bytes middle;
    Address under_middle;
    AliasId id = kNoId;

    bool needs_middle(Bytes run) const { return size - run <= middle && middle < run; }
  };
  // The first that is as large.
  std::vector<Sized>::const_iterator first_of(Bytes size) const {
    return std::partition_point(by_size_.begin(), by_size_.end(),
                                [size](const Sized& each) { return each.size < size; });
  }

  static std::optional<Bytes> find_run(const Alias& alias, const Arena& arena, Bytes size);
  AliasFit fit_at(AliasId id, const Arena& arena, Bytes begin, Bytes size) const;

  std::vector<Alias> aliases_;  // an empty slot has no chunks
  std::vector<AliasId> vacant_;
  std::vector<Sized> by_size_;  // ascending; of equals the oldest first
  std::map<Address, AliasId> by_base_;
  std::size_t mappings_ = 0;
  Bytes bytes_{};
  std::uint64_t clock_ = 0;
};

template <class Accept>
AliasFit AliasCache::find(const Arena& arena, Bytes size, Accept accept) const {
  std::size_t searched = 0;
  for (auto entry = first_of(size); entry != by_size_.end(); ++entry) {
    if (++searched > kSearched) break;
    if (entry->needs_middle(size) && !arena.is_free_at(entry->under_middle)) continue;
    const AliasId id = entry->id;
    const std::optional<Bytes> begin = find_run(aliases_[id], arena, size);
    if (!begin) continue;
    AliasFit fit = fit_at(id, arena, *begin, size);
    if (accept(fit.pieces)) return fit;
  }
  return {};
}

}  // namespace vramx
