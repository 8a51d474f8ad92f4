// What extents wait for: the rule by which two of them are alike, and the sets of those that wait
// for several streams, which are few and kept apart from the spans.
//
// Extents whose tags are alike may be one. While one stream alone asks for memory, those of each
// stream are. Where several ask, memory that is over stays apart from memory that is not, and newer
// from older: otherwise a tiny block freed beside a large extent would make all of it wait for the
// newest free. Tags of one stream are alike in groups of consecutive marks, so that what a stream
// frees in one go is one extent to itself. Not thread-safe.
#pragma once

#include <vector>

#include "core/types.h"

namespace vramx {

class TagTable {
 public:
  // From now on there is memory of several streams.
  void note_several() {
    if (!has_several_) has_several_ = is_apart_ = true;
  }
  bool has_several() const { return has_several_; }
  // Several of them ask for memory now, or one alone does.
  void tell_apart() { is_apart_ = true; }
  void let_mix() { is_apart_ = false; }
  bool is_apart() const { return is_apart_; }

  bool are_alike(const FreeSpan& a, const FreeSpan& b) const {
    if ((a.tag_set & b.tag_set) != kNoId) return sets_are_alike(a, b);
    if (!is_apart_) {
      return a.tag_stream == b.tag_stream || a.tag_stream == kNoId || b.tag_stream == kNoId;
    }
    return a.tag_stream == b.tag_stream && a.tag_number / kTagGroup == b.tag_number / kTagGroup;
  }
  // Whether memory that is over, or older on the same stream, may become one with what was freed
  // now. Then it waits longer than it need: no more of it than is freed, or all would in time.
  bool may_tie(const FreeSpan& freed, const FreeSpan& other) const {
    return (freed.tag_set & other.tag_set) == kNoId && freed.tag_stream != kNoId &&
           (other.tag_stream == kNoId ||
            (other.tag_stream == freed.tag_stream && other.tag_number <= freed.tag_number));
  }
  // Of two that are alike; the kept one gets the tags of both.
  void unite(FreeSpan& kept, const FreeSpan& gone) {
    if (kept.tag_set != kNoId) return drop(gone.tag_set);  // the two are equal
    if (kept.tag_stream == kNoId) kept.tag_stream = gone.tag_stream;
    if (kept.tag_number < gone.tag_number) kept.tag_number = gone.tag_number;
  }

  TagSet get(const FreeSpan& extent) const {
    if (extent.tag_set != kNoId) return sets_[extent.tag_set];
    return TagSet(Tag{extent.tag_stream, extent.tag_number});
  }
  // Of an extent that has none; and takes them all from one.
  void set(FreeSpan& extent, const TagSet& tags);
  void clear(FreeSpan& extent) {
    drop(extent.tag_set);
    extent.tag_stream = extent.tag_set = kNoId;
    extent.tag_number = 0;
  }
  // An extent that is no longer free had this set, if any.
  void drop(std::uint32_t set) {
    if (set != kNoId) vacant_.push_back(set);
  }
  // The tags of a part of an extent that had these.
  void copy(FreeSpan& part, const Tag& tag, std::uint32_t set) {
    part.tag_stream = tag.stream;
    part.tag_number = tag.number;
    part.tag_set = kNoId;
    if (set != kNoId) [[unlikely]] {
      this->set(part, TagSet(sets_[set]));
    }
  }

  std::size_t host_bytes() const {
    return sets_.capacity() * sizeof(TagSet) + vacant_.capacity() * sizeof(std::uint32_t);
  }

 private:
  bool sets_are_alike(const FreeSpan& a, const FreeSpan& b) const;

  bool has_several_ = false;
  bool is_apart_ = false;
  std::vector<TagSet> sets_;
  std::vector<std::uint32_t> vacant_;
};

}  // namespace vramx
