#include "core/types.h"

#include <algorithm>

namespace vramx {

void TagSet::add(Tag tag) {
  if (empty()) {
    first_ = tag;
    return;
  }
  if (first_.stream == tag.stream) {
    first_.sequence = std::max(first_.sequence, tag.sequence);
    return;
  }
  const auto known = std::find_if(others_.begin(), others_.end(),
                                  [&](const Tag& own) { return own.stream == tag.stream; });
  if (known == others_.end()) {
    others_.push_back(tag);
  } else {
    known->sequence = std::max(known->sequence, tag.sequence);
  }
}

void TagSet::add(const TagSet& other) {
  for (std::size_t i = 0; i < other.size(); ++i) add(other[i]);
}

bool TagSet::has_streams_of(const TagSet& other) const {
  if (size() != other.size()) return false;
  TagSet united = *this;
  united.add(other);
  return united.size() == size();
}

}  // namespace vramx
