// The driver operations that take several calls, each done whole or undone.
//
// Stateless beyond the driver. Called without the allocator's lock: everything they touch was set
// aside for them. Undoing runs in reverse order. A driver that refuses even that leaves something
// behind, and the outcome says what, so that the caller can try again later.
#pragma once

#include <vector>

#include "core/driver.h"
#include "core/status.h"
#include "core/types.h"

namespace vramx {

struct MapOutcome {
  Status status;
  Bytes left_mapped{};                    // from the first address on
  std::vector<ChunkHandle> unreleased{};  // chunks that are nobody's but still on the device
};

// Creates chunks of these sizes and maps them one behind the other from `at`; fills in `chunks`.
MapOutcome create_and_map(Driver& driver, Address at, const std::vector<Bytes>& sizes,
                          std::vector<MappedChunk>& chunks);
// Maps chunks that exist once more.
MapOutcome map_again(Driver& driver, Address at, const std::vector<MappedChunk>& chunks);
// Undoes what create_and_map did, because of `why`.
MapOutcome undo_map(Driver& driver, Address at, const std::vector<MappedChunk>& chunks,
                    const Status& why);
// Unmaps them and releases the chunks. Where the first fails nothing has changed.
MapOutcome unmap_and_release(Driver& driver, Address at, const std::vector<MappedChunk>& chunks);

}  // namespace vramx
