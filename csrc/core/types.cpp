#include "core/types.h"

#include <algorithm>

namespace vramx {

void TagSet::add(Tag tag) {
  if (empty()) {
    first_ = tag;
    return;
  }
  if (first_.stream == tag.stream) {
    first_.number = std::max(first_.number, tag.number);
    return;
  }
  const auto known = std::find_if(others_.begin(), others_.end(),
                                  [&](const Tag& own) { return own.stream == tag.stream; });
  if (known == others_.end()) {
    others_.push_back(tag);
  } else {
    known->number = std::max(known->number, tag.number);
  }
}

void TagSet::add(const TagSet& other) {
  for (std::size_t i = 0; i < other.size(); ++i) add(other[i]);
}

}  // namespace vramx
