#include "core/alias_cache.h"

#include <algorithm>
#include <set>

#include "core/make_room.h"

namespace vramx {

AliasId AliasCache::add(Address base, std::vector<ChunkId> chunks, Arena& arena) {
  AliasId id = static_cast<AliasId>(aliases_.size());
  if (vacant_.empty()) {
    make_room(aliases_, aliases_.size() + 1);
    aliases_.emplace_back();
  } else {
    id = vacant_.back();
    vacant_.pop_back();
  }
  Alias& alias = aliases_[id];
  alias = Alias{};
  alias.base = base;
  alias.chunks = std::move(chunks);
  for (const ChunkId chunk : alias.chunks) {
    ++arena.chunks()[chunk].alias_count;
    alias.size += arena.chunks()[chunk].size;
  }
  by_size_.emplace(alias.size, id);
  mappings_ += alias.chunks.size();
  bytes_ += alias.size;
  return id;
}

void AliasCache::remove(AliasId id, Arena& arena) {
  Alias& alias = aliases_[id];
  auto [entry, end] = by_size_.equal_range(alias.size);
  while (entry != end && entry->second != id) ++entry;
  by_size_.erase(entry);
  for (const ChunkId chunk : alias.chunks) --arena.chunks()[chunk].alias_count;
  mappings_ -= alias.chunks.size();
  bytes_ -= alias.size;
  alias = Alias{};
  vacant_.push_back(id);
}

// Walks the chunks once, keeping the free run that ends before the current one. The free end of a
// chunk is only looked up where a run could begin with it.
AliasFit AliasCache::fit_in(AliasId id, const Arena& arena, Bytes size) const {
  if (id >= aliases_.size()) return {};
  const Alias& alias = aliases_[id];
  if (alias.is_leaving || alias.size < size) return {};
  AliasFit fit{.alias = id, .address = alias.base, .pieces = {}};
  Bytes run{};
  Address at = alias.base;
  Bytes prefix = arena.free_prefix(alias.chunks.front());
  for (std::size_t i = 0; i < alias.chunks.size(); ++i) {
    const Chunk& chunk = arena.chunks()[alias.chunks[i]];
    if (run + prefix >= size) {
      fit.pieces.push_back({chunk.begin, size - run});
      return fit;
    }
    const bool is_last = i + 1 == alias.chunks.size();
    const Bytes next_prefix = is_last ? Bytes{} : arena.free_prefix(alias.chunks[i + 1]);
    if (prefix == chunk.size) {
      fit.pieces.push_back({chunk.begin, chunk.size});
      run += chunk.size;
    } else {
      const bool may_begin = next_prefix || chunk.size >= size;
      const Bytes suffix = may_begin ? arena.free_suffix(alias.chunks[i]) : Bytes{};
      fit.pieces.clear();
      fit.address = at + (chunk.size - suffix);
      // Later runs have less room still.
      if (fit.address + size > alias.base + alias.size) return {};
      run = suffix;
      if (suffix) fit.pieces.push_back({chunk.end() - suffix, min(suffix, size)});
      if (suffix >= size) return fit;
    }
    at = at + chunk.size;
    prefix = next_prefix;
  }
  return {};
}

std::vector<AliasId> AliasCache::all() const {
  std::vector<AliasId> ids;
  for (const auto& [size, id] : by_size_) ids.push_back(id);
  std::sort(ids.begin(), ids.end(),
            [&](AliasId a, AliasId b) { return aliases_[a].last_use < aliases_[b].last_use; });
  return ids;
}

std::vector<AliasId> AliasCache::idle() const {
  std::vector<AliasId> ids = all();
  std::erase_if(ids, [&](AliasId id) { return aliases_[id].pins != 0 || aliases_[id].is_leaving; });
  return ids;
}

std::size_t AliasCache::host_bytes() const {
  constexpr std::size_t kTreeNode = 48;  // of the map: links, colour, key and value
  std::size_t bytes = aliases_.capacity() * sizeof(Alias) + by_size_.size() * kTreeNode;
  for (const Alias& alias : aliases_) {
    bytes += alias.chunks.capacity() * sizeof(ChunkId) + alias.last_tags.size() * sizeof(Tag);
  }
  return bytes;
}

std::string AliasCache::check(const Arena& arena) const {
  std::vector<std::uint32_t> counts;
  for (const auto& [size, id] : by_size_) {
    const Alias& alias = aliases_[id];
    const std::set<ChunkId> distinct(alias.chunks.begin(), alias.chunks.end());
    if (distinct.size() != alias.chunks.size()) {
      return "alias 1: alias " + std::to_string(id) + " maps a chunk twice";
    }
    for (const ChunkId chunk : distinct) {
      if (arena.chunks()[chunk].handle == ChunkHandle::kNone) {
        return "alias 1: alias " + std::to_string(id) + " maps a chunk that is gone";
      }
      if (counts.size() <= chunk) counts.resize(chunk + 1);
      ++counts[chunk];
    }
  }
  std::string broken;
  arena.chunks().for_each([&](ChunkId id, const Chunk& chunk) {
    const std::uint32_t counted = id < counts.size() ? counts[id] : 0;
    if (counted != chunk.alias_count) {
      broken = "alias 2: chunk " + std::to_string(id) + " has " +
               std::to_string(chunk.alias_count) + " aliases, counted " + std::to_string(counted);
    }
  });
  return broken;
}

}  // namespace vramx
