// What a driver call costs, by the size of the chunk it touches: the model behind simulated time.
//
// The default is the H200 (driver 580.159, CUDA 13.0, idle), measured one call at a time. Between
// measured sizes the cost is interpolated over log2(size); outside them it is the nearest one's.
// Immutable values, no locking.
#pragma once

#include <array>
#include <cstddef>

#include "core/units.h"

namespace vramx {

struct CostCurve {
  struct Point {
    Point() = default;
    Point(double of_mebibytes, double costs_us);

    double mebibytes = 0;
    double us = 0;
    double log2 = 0;  // of the mebibytes: known once, asked for at every simulated call
  };
  std::array<Point, 4> points;  // ascending; the first `count` are measured sizes
  std::size_t count = 4;

  double at_us(Bytes size) const;
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
