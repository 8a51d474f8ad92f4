// Notices that the sequence of large requests repeats, and then says where each of them went the
// last time round.
//
// A program of fixed shapes asks for the same sizes each step, but a few blocks that live across
// the step's end shift a little, and best fit then permutes all others: each step puts new blocks
// together from new pieces. Placed where their counterparts went, requests find the free ranges
// that the last step left.
//
//   requests   ... A B C D E F A B C D E F A B ?      distance 6, run 8:
//                              └─────────────┘        the next was C, and went where it says
//
// A place is a hint: the caller makes sure that the memory is there and free. It takes a whole
// period, as it was the last time, until one is given; and for a short period, which may be that of
// equal layers in a program of varying shapes, two thousand requests. Small requests take no part:
// they find room anywhere, and the sequence of the others shows the period as well.
//
// Plain data; not thread-safe: the device allocator holds the lock. Noting a request is O(1), a
// store and a few operations. It takes 8 KiB; 8 KiB to 256 KiB more, by the period, once anything
// recurs.
//
//   recurrence 1   a distance is below the number of requests that are remembered
//   recurrence 2   each remembered request of the run is as the one a distance before it
#pragma once

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "core/types.h"

namespace vramx {

class Recurrence {
 public:
  // Places are kept in relation to `base`, where the arena begins.
  explicit Recurrence(Address base) : base_(base), past_(1), seen_(kSeen) {}

  // Requests from this size on take part.
  static constexpr Bytes kSmallest{std::uint64_t{64} << 10};
  // The longest period that is noticed, in requests.
  static constexpr std::uint32_t kLongest = 1 << 15;
  // A shorter period than this may be a layer's, and its recurrences are then over when the layers
  // are: it takes so many requests in a row that were as before. A longer one takes one recurrence.
  static constexpr std::uint32_t kLongestLayer = 1 << 8;
  static constexpr std::uint32_t kLayers = 2000;

  // Whether requests may have a counterpart at all.
  bool is_running() const { return run_ >= needed_; }
  // Where in the arena the counterpart of this request went; no address where it has none or went
  // elsewhere.
  Address expect(Bytes size, StreamIndex stream) const {
    if (!is_running() || size < kSmallest) return {};
    const Request& last = past(count_ - distance_);
    if (last.place == kNowhere || last.key != key_of(mix(size, stream))) return {};
    return base_ + kBlockUnit * last.place;
  }

  // The request was served at `address`, of the arena or not.
  void note(Bytes size, StreamIndex stream, Address address) {
    const std::uint64_t mixed = mix(size, stream);
    if (distance_ != 0) follow(key_of(mixed));
    past(count_) = {key_of(mixed), place_of(address)};
    ++count_;
    window_ = (window_ << kWindowShift) + mixed;
    Seen& seen = seen_[window_ >> kSlotShift];
    const auto tag = static_cast<std::uint32_t>(window_ >> kTagShift);
    const bool is_known = seen.tag == tag;
    if (distance_ == 0 && is_known) [[unlikely]] {
      begin_run(count_ - seen.position);
    }
    // A store costs less than a guess that fails.
    const bool is_new = is_known || count_ % kStride == 0;
    seen.tag = is_new ? tag : seen.tag;
    seen.position = is_new ? count_ : seen.position;
  }

  // Memory was given back to the device. Requests whose places are gone go elsewhere, into the
  // places of others, so following those that are left makes a layout worse than a new one.
  void forget() {
    distance_ = run_ = 0;
    std::fill(seen_.begin(), seen_.end(), Seen{});
  }

  std::size_t host_bytes() const {
    return past_.capacity() * sizeof(Request) + seen_.capacity() * sizeof(Seen);
  }
  // Recomputes recurrence 1 and 2, and names the first that does not hold.
  std::string check() const;

 private:
  // Collisions of 32 bits are harmless: they spoil a hint.
  struct Request {
    std::uint32_t key = 0;  // of its size and stream
    std::uint32_t place = kNowhere;
  };
  // A window of requests that were seen, and the number of the one behind it.
  struct Seen {
    std::uint32_t tag = 0;
    std::uint32_t position = 0;
  };
  // A place is an offset from the base in block units, which two terabytes are addressed by.
  static constexpr std::uint32_t kNowhere = ~std::uint32_t{0};
  // Requests that are remembered from the first recurrence on, which is mostly that of a layer: the
  // step, when it recurs, is then often there already.
  static constexpr std::uint32_t kFewest = 1 << 10;
  // Windows that are remembered: one in kStride, and each is looked for; one that comes again is
  // remembered where it came last. Of a period of kLongest a few are still there when they do.
  static constexpr std::uint32_t kSeen = 1 << 10;
  static constexpr std::uint32_t kStride = 4;
  // A request leaves the window when it has been shifted out of the word: after 16 others. The
  // upper bits have something of all of them.
  static constexpr int kWindowShift = 4;
  static constexpr int kSlotShift = 64 - std::countr_zero(kSeen);
  static constexpr int kTagShift = kSlotShift - 32;

  static std::uint64_t mix(Bytes size, StreamIndex stream) {
    const std::uint64_t word = (size / kBlockUnit ^ std::uint64_t{stream} << 40);
    const std::uint64_t product = word * 0x9E3779B97F4A7C15ull;
    return product ^ product >> 32;
  }
  static std::uint32_t key_of(std::uint64_t mixed) { return static_cast<std::uint32_t>(mixed); }
  // Below the base the difference wraps round to what is out of range too.
  std::uint32_t place_of(Address address) const {
    const std::uint64_t units = (address - base_) / kBlockUnit;
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(units, kNowhere));
  }
  Request& past(std::uint32_t position) { return past_[position & mask_]; }
  const Request& past(std::uint32_t position) const { return past_[position & mask_]; }

  void follow(std::uint32_t key) {
    const bool is_as_before = past(count_ - distance_).key == key;
    run_ = is_as_before ? run_ + 1 : 0;
    if (!is_as_before) distance_ = 0;
  }
  void begin_run(std::uint32_t distance);
  void remember(std::uint32_t requests);

  const Address base_;
  std::vector<Request> past_;  // a ring; its size is a power of two
  std::uint32_t mask_ = 0;     // of its positions
  std::vector<Seen> seen_;
  std::uint64_t window_ = 0;        // the last requests, mixed
  std::uint32_t count_ = 0;         // requests ever; it may wrap round
  std::uint32_t distance_ = 0;      // to the request's counterpart; 0: it has none
  std::uint32_t needed_ = kLayers;  // length of a run that convinces
  std::uint32_t run_ = 0;           // requests in a row that were as their counterparts
};

}  // namespace vramx
