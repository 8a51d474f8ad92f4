#include "core/alias_cache.h"

#include <algorithm>
#include <set>

#include "core/make_room.h"

namespace vramx {

AliasId AliasCache::add(Address base, const std::vector<ChunkId>& chunks, Arena& arena) {
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
  alias.chunks = chunks;  // with no room for more
  for (const ChunkId chunk : alias.chunks) {
    arena.chunks().note_aliased(chunk);
    alias.size += arena.chunks()[chunk].size;
  }
  const std::size_t middle = alias.chunks.size() / 2;
  Bytes before{};
  for (std::size_t i = 0; i < middle; ++i) before += arena.chunks()[alias.chunks[i]].size;
  make_room(by_size_, by_size_.size() + 1);
  const auto behind = std::partition_point(
      by_size_.begin(), by_size_.end(), [&](const Sized& each) { return each.size <= alias.size; });
  const Address under_middle = arena.chunks()[alias.chunks[middle]].begin;
  by_size_.insert(behind, {alias.size, before, under_middle, id});
  by_base_.emplace(base, id);
  mappings_ += alias.chunks.size();
  bytes_ += alias.size;
  return id;
}

void AliasCache::remove(AliasId id, Arena& arena) {
  Alias& alias = aliases_[id];
  auto entry = first_of(alias.size);
  while (entry->id != id) ++entry;
  by_size_.erase(entry);
  by_base_.erase(alias.base);
  for (const ChunkId chunk : alias.chunks) --arena.chunks()[chunk].alias_count;
  mappings_ -= alias.chunks.size();
  bytes_ -= alias.size;
  alias = Alias{};
  vacant_.push_back(id);
}

AliasFit AliasCache::at(const Arena& arena, const Piece& range) const {
  const auto behind = by_base_.upper_bound(range.begin);
  if (behind == by_base_.begin()) return {};
  const AliasId id = std::prev(behind)->second;
  const Alias& alias = aliases_[id];
  if (alias.is_leaving || range.end() > alias.base + alias.size) return {};
  return fit_at(id, arena, range.begin - alias.base, range.size);
}

AliasFit AliasCache::fit_at(AliasId id, const Arena& arena, Bytes begin, Bytes size) const {
  AliasFit fit{id, aliases_[id].base + begin, {}};
  Bytes at{};
  for (const ChunkId chunk_id : aliases_[id].chunks) {
    const Chunk& chunk = arena.chunks()[chunk_id];
    const Bytes from = max(at, begin);
    const Bytes to = min(at + chunk.size, begin + size);
    const Address in_arena = chunk.begin + (from - at);
    if (from < to && !fit.pieces.empty() && fit.pieces.back().end() == in_arena) {
      fit.pieces.back().size += to - from;
    } else if (from < to) {
      fit.pieces.push_back({in_arena, to - from});
    }
    at += chunk.size;
  }
  return fit;
}

// Where in the alias its first free run of `size` bytes begins. Walks the chunks once, keeping the
// run that ends before the current one. The free end of a chunk is only looked up where a run could
// begin with it.
std::optional<Bytes> AliasCache::find_run(const Alias& alias, const Arena& arena, Bytes size) {
  if (alias.is_leaving || alias.size - alias.pinned < size) return {};
  Bytes run{};
  Bytes at{};
  Bytes prefix = arena.free_prefix(alias.chunks.front());
  for (std::size_t i = 0; i < alias.chunks.size(); ++i) {
    const Bytes end = at + arena.chunks()[alias.chunks[i]].size;
    if (run + prefix >= size) return at - run;
    const bool is_last = i + 1 == alias.chunks.size();
    const Bytes next_prefix = is_last ? Bytes{} : arena.free_prefix(alias.chunks[i + 1]);
    if (at + prefix == end) {
      run += prefix;
    } else {
      // Later runs have less room still.
      if (at + prefix + size > alias.size) return {};
      const bool may_begin = next_prefix || end - at >= size;
      run = may_begin ? arena.free_suffix(alias.chunks[i]) : Bytes{};
      if (run >= size) return end - run;
    }
    at = end;
    prefix = next_prefix;
  }
  return {};
}

std::vector<AliasId> AliasCache::all() const {
  std::vector<AliasId> ids;
  for (const Sized& each : by_size_) ids.push_back(each.id);
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
  std::size_t bytes = aliases_.capacity() * sizeof(Alias) + by_size_.capacity() * sizeof(Sized);
  for (const Alias& alias : aliases_) {
    bytes += alias.chunks.capacity() * sizeof(ChunkId) + alias.last_tags.size() * sizeof(Tag);
  }
  return bytes;
}

std::string AliasCache::check(const Arena& arena) const {
  std::vector<std::uint32_t> counts;
  for (const Sized& each : by_size_) {
    const AliasId id = each.id;
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
