#include "core/mapper.h"

namespace vramx {
namespace {

Bytes total(const std::vector<MappedChunk>& chunks) {
  Bytes sum{};
  for (const MappedChunk& chunk : chunks) sum += chunk.size;
  return sum;
}

// The chunks that the driver would not take back.
std::vector<ChunkHandle> release_all(Driver& driver, const std::vector<MappedChunk>& chunks) {
  std::vector<ChunkHandle> refused;
  for (auto chunk = chunks.rbegin(); chunk != chunks.rend(); ++chunk) {
    if (!driver.release_chunk(chunk->handle).ok()) refused.push_back(chunk->handle);
  }
  return refused;
}

}  // namespace

MapOutcome map_again(Driver& driver, Address at, const std::vector<MappedChunk>& chunks) {
  Bytes mapped{};
  Status status = ok_status();
  for (const MappedChunk& chunk : chunks) {
    status = driver.map(at + mapped, chunk.size, chunk.handle);
    if (!status.ok()) break;
    mapped += chunk.size;
  }
  // One call for the range: the driver charges for each mapping in it, but locks itself once.
  if (status.ok()) status = driver.set_access(at, mapped);
  if (status.ok()) return {status};
  if (mapped && driver.unmap(at, mapped).ok()) mapped = Bytes{};
  return {status, mapped};
}

MapOutcome create_and_map(Driver& driver, Address at, const std::vector<Bytes>& sizes,
                          std::vector<MappedChunk>& chunks) {
  chunks.reserve(sizes.size());
  for (const Bytes size : sizes) {
    const Result<ChunkHandle> made = driver.create_chunk(size);
    if (!made.ok()) return {made.status(), Bytes{}, release_all(driver, chunks)};
    chunks.push_back({size, made.value()});
  }
  MapOutcome outcome = map_again(driver, at, chunks);
  // A chunk that is still mapped goes when its mapping does.
  if (!outcome.status.ok()) outcome.unreleased = release_all(driver, chunks);
  return outcome;
}

MapOutcome undo_map(Driver& driver, Address at, const std::vector<MappedChunk>& chunks,
                    const Status& why) {
  const Bytes left = driver.unmap(at, total(chunks)).ok() ? Bytes{} : total(chunks);
  return {why, left, release_all(driver, chunks)};
}

MapOutcome unmap_and_release(Driver& driver, Address at, const std::vector<MappedChunk>& chunks) {
  const Status status = driver.unmap(at, total(chunks));
  if (!status.ok()) return {status, total(chunks)};
  return {status, Bytes{}, release_all(driver, chunks)};
}

}  // namespace vramx
