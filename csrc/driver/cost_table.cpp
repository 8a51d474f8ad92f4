#include "driver/cost_table.h"

#include <cmath>
#include <cstdint>

namespace vramx {

CostCurve::CostCurve(std::initializer_list<Point> measured) : points_(measured) {
  for (std::size_t size = 0; size < kKnown; ++size) {
    known_us_[size] = between_us(static_cast<double>(size));
  }
}

double CostCurve::at_us(Bytes size) const {
  constexpr Bytes kMebibyte{1 << 20};
  const std::uint64_t mebibytes = size / kMebibyte;
  if (mebibytes < kKnown && !(size % kMebibyte)) return known_us_[mebibytes];
  return between_us(static_cast<double>(size.count) / static_cast<double>(kMebibyte.count));
}

double CostCurve::between_us(double mebibytes) const {
  if (mebibytes <= points_.front().mebibytes) return points_.front().us;
  if (mebibytes >= points_.back().mebibytes) return points_.back().us;
  std::size_t upper = 1;
  while (points_[upper].mebibytes < mebibytes) ++upper;
  const Point& low = points_[upper - 1];
  const Point& high = points_[upper];
  const double share =
      std::log2(mebibytes / low.mebibytes) / std::log2(high.mebibytes / low.mebibytes);
  return low.us + share * (high.us - low.us);
}

const CostTable& CostTable::h200() {
  static const CostTable table{
      .create = {{2, 14.2}, {20, 11.3}, {64, 11.1}, {512, 17.8}},
      .map = {{2, 1.7}, {20, 0.6}, {64, 0.6}, {512, 0.7}},
      .set_access = {{2, 31}, {20, 28}, {64, 26}, {512, 46}},
      .unmap = {{2, 18}, {20, 24}, {64, 17}, {512, 22}},
      .release = {{2, 11.5}, {20, 16.5}, {64, 36.7}, {512, 174}},
      .malloc = {{2, 52}, {2048, 205}},
      .free = {{2, 44}, {2048, 1273}},
  };
  return table;
}

}  // namespace vramx
