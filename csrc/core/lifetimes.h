// How long a large block will live, judged by how long its like lived.
//
// What a program asks for tells where in its course it stands: the sizes of a request and of the
// two before it come again with every layer, and what was asked for there lives about as long each
// time. Time is counted in large requests and frees.
//
//   requests   ... A B C ... A B C ...        C, after A and B, was freed 9 later: so it is brief
//                                  ?
//
// It is a guess, and a wrong one costs no more than a hole. It depends on nothing but the requests
// and their order. Small requests take no part and cost nothing: their holes are small.
//
// Plain data; not thread-safe: the device allocator holds the lock. Each call is O(1), a few
// operations and a line of the cache. It takes 16 KiB.
//
//   lifetimes 1   what is known of a context is a lifetime, of one or more
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <string>

#include "core/types.h"

namespace vramx {

class Lifetimes {
 public:
  // Requests from this size on take part.
  static constexpr Bytes kSmallest{std::uint64_t{1} << 20};
  // Blocks are kin if the lifetimes of their likes have as many bits.
  static constexpr std::uint32_t kKins = 17;

  // When a block was requested and in which context: the caller keeps it until the free.
  struct Request {
    std::uint32_t time = 0;
    std::uint32_t context = 0;
  };

  // Below kKins; 0 where nothing is known.
  std::uint32_t kin_of(Bytes size) const {
    const std::uint32_t context = context_of(size);
    const Known& known = known_[slot_of(context)];
    return known.tag == tag_of(context) ? static_cast<std::uint32_t>(std::bit_width(known.lifetime))
                                        : 0;
  }
  // Whether they were freed fewer than 64 large requests and frees later: those of a few layers.
  static bool is_brief(std::uint32_t kin) { return kin != 0 && kin <= 6; }
  Request note_request(Bytes size) {
    const Request request{++now_, context_of(size)};
    before_last_ = last_;
    last_ = size;
    return request;
  }
  // The block of this request is freed.
  void note_free(const Request& request) {
    const std::uint32_t lifetime = std::min(++now_ - request.time, kLongest);
    known_[slot_of(request.context)] = {tag_of(request.context),
                                        static_cast<std::uint16_t>(lifetime)};
  }

  std::size_t host_bytes() const { return sizeof known_; }
  // Recomputes lifetimes 1, and names the first context of which it does not hold.
  std::string check() const;

 private:
  // The context that had the slot last, and how long its block lived; 0: nothing is known. Another
  // context with the same tag, one in 2^16, spoils a guess.
  struct Known {
    std::uint16_t tag = 0;
    std::uint16_t lifetime = 0;
  };
  static constexpr std::uint32_t kLongest = UINT16_MAX;
  static constexpr std::uint32_t kContexts = 1 << 12;  // a step has some hundreds

  static std::uint64_t mix(std::uint64_t word) {
    const std::uint64_t product = word * 0x9E3779B97F4A7C15ull;
    return product ^ product >> 32;
  }
  std::uint32_t context_of(Bytes size) const {
    const std::uint64_t before = mix(last_.count + mix(before_last_.count));
    return static_cast<std::uint32_t>(mix(size.count + before));
  }
  static std::size_t slot_of(std::uint32_t context) { return context % kContexts; }
  static std::uint16_t tag_of(std::uint32_t context) {
    return static_cast<std::uint16_t>(context >> std::countr_zero(kContexts));
  }

  std::array<Known, kContexts> known_{};
  Bytes last_;
  Bytes before_last_;
  std::uint32_t now_ = 0;  // it may wrap round
};

}  // namespace vramx
