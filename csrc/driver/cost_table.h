// What a driver call costs, by the size of the chunk it touches: the model behind simulated time.
//
// The default is the H200 (driver 580.159, CUDA 13.0, idle), measured one call at a time. Between
// measured sizes the cost is interpolated over log2(size); outside them it is the nearest one's.
// Chunks are whole mebibytes and most of them small: what such a one costs is worked out once.
// Immutable values, no locking.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <vector>

#include "core/units.h"

namespace vramx {

class CostCurve {
 public:
  struct Point {
    double mebibytes = 0;
    double us = 0;
  };
  // Ascending.
  CostCurve(std::initializer_list<Point> measured);

  double at_us(Bytes size) const;

 private:
  static constexpr std::size_t kKnown = 65;

  double between_us(double mebibytes) const;

  std::vector<Point> points_;
  std::array<double, kKnown> known_us_;  // of so many mebibytes
};

struct CostTable {
  CostCurve create;
  CostCurve map;
  CostCurve set_access;  // for each mapping in the range
  CostCurve unmap;       // for each mapping in the range
  CostCurve release;
  CostCurve malloc;  // cudaMalloc, for the models of torch's own allocators
  CostCurve free;    // cudaFree, idle; under load it waits for the running kernels

  static const CostTable& h200();
};

}  // namespace vramx
