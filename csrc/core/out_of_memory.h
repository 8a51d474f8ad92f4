// What an out-of-memory error tells, as values and as the one line that torch's callers look for.
#pragma once

#include <cstddef>
#include <string>

#include "core/driver.h"
#include "core/status.h"
#include "core/units.h"

namespace vramx {

struct OutOfMemory {
  Bytes requested{};
  Bytes live{};
  Bytes held{};
  Bytes limit{};
  Bytes free{};
  Bytes largest_extent{};
  Bytes whole_chunks{};  // free, hence stitchable
  std::size_t extents = 0;
  MemoryInfo device{};
  Status cause = ok_status();

  // `device` is the GPU's ordinal, -1 where it has none.
  std::string message(int device = -1) const;
};

}  // namespace vramx
