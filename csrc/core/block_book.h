// The live blocks: found by the address that their owner holds, with what only few of them have.
//
// A block's spans say where it lies, how much was asked for and on which stream; this book adds the
// address of one in an alias, and the streams that one is recorded on. Not thread-safe. O(1).
#pragma once

#include <algorithm>
#include <vector>

#include "core/arena.h"
#include "core/block_table.h"
#include "core/plan.h"

namespace vramx {

class BlockBook {
 public:
  explicit BlockBook(Arena& arena) : arena_(arena) {}

  // Its first span has the stream and what was requested.
  void insert(const Placement& placement) {
    if (placement.alias != kNoId) {
      Details& details = details_of(placement.first_span);
      details.address = placement.address;
      details.alias = placement.alias;
    }
    table_.insert(placement.address, placement.first_span);
  }
  BlockTable::Entry find(Address address) const {
    return table_.find(address, [&](SpanId first) { return address_of(first) == address; });
  }
  // The block's details, if any, stay until drop_details().
  void erase(const BlockTable::Entry& entry) { table_.erase(entry); }

  Address address_of(SpanId first) const {
    const std::uint32_t details = arena_.used(first).details;
    return details == kNoId ? arena_.span(first).begin : details_[details].address;
  }
  AliasId alias_of(SpanId first) const {
    const std::uint32_t details = arena_.used(first).details;
    return details == kNoId ? kNoId : details_[details].alias;
  }
  // The streams that use it, beside that of its allocation.
  const std::vector<StreamIndex>& users_of(SpanId first) const {
    static const std::vector<StreamIndex> kNone;
    const std::uint32_t details = arena_.used(first).details;
    return details == kNoId ? kNone : details_[details].users;
  }
  // False where it is known already.
  bool add_user(SpanId first, StreamIndex user) {
    if (user == arena_.used(first).stream) return false;
    std::vector<StreamIndex>& users = details_of(first).users;
    if (std::find(users.begin(), users.end(), user) != users.end()) return false;
    users.push_back(user);
    return true;
  }
  void drop_details(std::uint32_t details) {
    if (details == kNoId) return;
    details_[details].alias = kNoId;
    details_[details].users.clear();
    vacant_.push_back(details);
  }

  template <class Visit>
  void for_each(Visit visit) const {
    table_.for_each(visit);
  }
  std::size_t host_bytes() const {
    return table_.host_bytes() + details_.capacity() * sizeof(Details);
  }

 private:
  struct Details {
    Address address;  // that its owner holds
    AliasId alias = kNoId;
    std::vector<StreamIndex> users{};
  };
  // It has some from now on.
  Details& details_of(SpanId first) {
    std::uint32_t& details = arena_.used(first).details;
    if (details != kNoId) return details_[details];
    if (vacant_.empty()) {
      vacant_.push_back(static_cast<std::uint32_t>(details_.size()));
      details_.emplace_back();
    }
    details = vacant_.back();
    vacant_.pop_back();
    details_[details].address = arena_.span(first).begin;
    return details_[details];
  }

  Arena& arena_;
  BlockTable table_;
  std::vector<Details> details_;
  std::vector<std::uint32_t> vacant_;
};

}  // namespace vramx
