#include "driver/cost_table.h"

#include <cmath>
#include <cstddef>

namespace vramx {

CostCurve::Point::Point(double of_mebibytes, double costs_us)
    : mebibytes(of_mebibytes), us(costs_us), log2(std::log2(of_mebibytes)) {}

double CostCurve::at_us(Bytes size) const {
  const double mebibytes = static_cast<double>(size.count) / (1 << 20);
  if (mebibytes <= points.front().mebibytes) return points.front().us;
  const Point& last = points[count - 1];
  if (mebibytes >= last.mebibytes) return last.us;
  std::size_t upper = 1;
  while (points[upper].mebibytes < mebibytes) ++upper;
  const Point& low = points[upper - 1];
  const Point& high = points[upper];
  const double share = (std::log2(mebibytes) - low.log2) / (high.log2 - low.log2);
  return low.us + share * (high.us - low.us);
}

const CostTable& CostTable::h200() {
  static const CostTable table{
      .create = {{{{2, 14.2}, {20, 11.3}, {64, 11.1}, {512, 17.8}}}},
      .map = {{{{2, 1.7}, {20, 0.6}, {64, 0.6}, {512, 0.7}}}},
      .set_access = {{{{2, 31}, {20, 28}, {64, 26}, {512, 46}}}},
      .unmap = {{{{2, 18}, {20, 24}, {64, 17}, {512, 22}}}},
      .release = {{{{2, 11.5}, {20, 16.5}, {64, 36.7}, {512, 174}}}},
      .malloc = {.points = {{{2, 52}, {2048, 205}}}, .count = 2},
      .free = {.points = {{{2, 44}, {2048, 1273}}}, .count = 2},
  };
  return table;
}

}  // namespace vramx
