// What the allocator may not see and has to be right about: who owns each physical unit of 512
// bytes, which work used it last, and which freed addresses work may still go through.
//
// Independent of the allocator: it is fed with the driver's own mappings, and asks the simulated
// device which work comes before which. A claim or a release costs a few nanoseconds a unit. Not
// thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "driver/sim_driver.h"
#include "stress/layered_driver.h"

namespace vramx::stress {

// All work queued on some streams, up to these items, may touch the bytes.
using Use = std::vector<StreamPoint>;

class Shadow {
 public:
  static constexpr std::uint32_t kNobody = 0;

  explicit Shadow(const SimDriver& sim) : sim_(sim) { uses_.emplace_back(); }

  // Each returns what is broken, or nothing.
  std::string claim(const std::vector<PhysicalPiece>& pieces, std::uint32_t owner,
                    StreamName stream);
  std::string on_unmap(Address at, Bytes size);
  std::string on_chunk_gone(ChunkHandle chunk);

  void give_back(const std::vector<PhysicalPiece>& pieces, Address at, Bytes size, const Use& use);

  bool is_done(const Use& use) const;
  // Bytes of the chunks that nobody owns any of, and how many chunks there are.
  Bytes unowned_chunks(const ObservedDriver::Chunks& chunks) const;

 private:
  struct Unit {
    std::uint32_t owner = kNobody;
    std::uint32_t last_use = 0;  // into uses_; 0 is none
  };
  // Addresses that were a block's, and the work that may still go through them.
  struct Trail {
    Address at;
    Bytes size{};
    std::uint32_t use = 0;
  };

  template <class Visit>
  void for_each_unit(const std::vector<PhysicalPiece>& pieces, Visit visit);
  bool comes_before(const Use& use, StreamName stream) const;
  void drop_finished_trails();

  const SimDriver& sim_;
  std::unordered_map<std::uint64_t, std::vector<Unit>> units_;  // by chunk handle
  std::vector<Use> uses_;
  std::vector<Trail> trails_;
  std::size_t trails_before_drop_ = 256;
};

}  // namespace vramx::stress
