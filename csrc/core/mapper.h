// The driver operations that take several calls, each done whole or undone.
//
// Stateless beyond the driver. Called without the allocator's lock: everything they touch was set
// aside for them. Undoing runs in reverse order; where even that fails, `is_clean` says that the
// addresses still have something behind them and must not be used again.
#pragma once

#include <vector>

#include "core/driver.h"
#include "core/status.h"
#include "core/types.h"

namespace vramx {

struct MapOutcome {
  Status status;
  bool is_clean = true;  // on failure: nothing is left mapped
};

// Creates chunks of these sizes and maps them one behind the other from `at`; fills in `chunks`.
MapOutcome create_and_map(Driver& driver, Address at, const std::vector<Bytes>& sizes,
                          std::vector<MappedChunk>& chunks);
// Maps chunks that exist once more.
MapOutcome map_again(Driver& driver, Address at, const std::vector<MappedChunk>& chunks);
// Unmaps [at, at + size), and releases the chunks that were there.
MapOutcome unmap(Driver& driver, Address at, Bytes size);
MapOutcome unmap_and_release(Driver& driver, Address at, const std::vector<MappedChunk>& chunks);

}  // namespace vramx
