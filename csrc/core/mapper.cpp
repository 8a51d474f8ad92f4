#include "core/mapper.h"

namespace vramx {
namespace {

Bytes total(const std::vector<MappedChunk>& chunks) {
  Bytes sum{};
  for (const MappedChunk& chunk : chunks) sum += chunk.size;
  return sum;
}

void release_all(Driver& driver, const std::vector<MappedChunk>& chunks) {
  for (auto chunk = chunks.rbegin(); chunk != chunks.rend(); ++chunk) {
    driver.release_chunk(chunk->handle).ignore();
  }
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
  const bool is_clean = !mapped || driver.unmap(at, mapped).ok();
  return {status, is_clean};
}

MapOutcome create_and_map(Driver& driver, Address at, const std::vector<Bytes>& sizes,
                          std::vector<MappedChunk>& chunks) {
  for (const Bytes size : sizes) {
    const Result<ChunkHandle> made = driver.create_chunk(size);
    if (!made.ok()) {
      release_all(driver, chunks);
      return {made.status()};
    }
    chunks.push_back({size, made.value()});
  }
  const MapOutcome outcome = map_again(driver, at, chunks);
  if (!outcome.status.ok()) release_all(driver, chunks);
  return outcome;
}

MapOutcome unmap(Driver& driver, Address at, Bytes size) {
  const Status status = driver.unmap(at, size);
  return {status, status.ok()};
}

MapOutcome unmap_and_release(Driver& driver, Address at, const std::vector<MappedChunk>& chunks) {
  const MapOutcome outcome = unmap(driver, at, total(chunks));
  if (outcome.status.ok()) release_all(driver, chunks);
  return outcome;
}

}  // namespace vramx
