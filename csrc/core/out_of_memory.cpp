#include "core/out_of_memory.h"

#include <cstdio>

namespace vramx {
namespace {

std::string binary(Bytes size) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB"};
  double value = static_cast<double>(size.count);
  std::size_t unit = 0;
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text;
}

}  // namespace

std::string OutOfMemory::message(int ordinal) const {
  std::string text = "CUDA out of memory. Tried to allocate " + binary(requested) + ". ";
  if (device.total) {
    text += ordinal < 0 ? "The device" : "GPU " + std::to_string(ordinal);
    // These are torch's own words: programs look for them.
    text += " has a total capacity of " + binary(device.total) + " of which " +
            binary(device.free) + " is free. ";
  }
  text += "vramx holds " + binary(held) + ": " + binary(live) + " live and " + binary(free) +
          " free in " + std::to_string(extents) + " pieces, the largest " + binary(largest_extent) +
          ", " + binary(whole_chunks) + " in whole chunks.";
  if (limit != Bytes{UINT64_MAX}) text += " Its limit is " + binary(limit) + ".";
  text += limit != Bytes{UINT64_MAX} ? " Try a smaller batch, or set a higher limit."
                                     : " Try a smaller batch.";
  return text;
}

}  // namespace vramx
