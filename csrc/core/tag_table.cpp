#include "core/tag_table.h"

#include <algorithm>

namespace vramx {

void TagTable::set(FreeSpan& extent, const TagSet& tags) {
  if (tags.size() == 1) {
    extent.tag_stream = tags[0].stream;
    extent.tag_number = tags[0].number;
  } else if (tags.size() > 1) {
    if (vacant_.empty()) {
      vacant_.push_back(static_cast<std::uint32_t>(sets_.size()));
      sets_.emplace_back();
    }
    extent.tag_set = vacant_.back();
    vacant_.pop_back();
    sets_[extent.tag_set] = tags;
  }
}

// The same marks: memory that waits for another stream than its own is a buffer that was handed
// over, and the next one is wanted as soon as the oldest is over.
bool TagTable::sets_are_alike(const FreeSpan& a, const FreeSpan& b) const {
  if (a.tag_set == kNoId || b.tag_set == kNoId) return false;
  const TagSet& left = sets_[a.tag_set];
  const TagSet& right = sets_[b.tag_set];
  if (left.size() != right.size()) return false;
  const auto is_in_right = [&](const Tag& tag) {
    for (std::size_t i = 0; i < right.size(); ++i) {
      if (right[i] == tag) return true;
    }
    return false;
  };
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (!is_in_right(left[i])) return false;
  }
  return true;
}

}  // namespace vramx
