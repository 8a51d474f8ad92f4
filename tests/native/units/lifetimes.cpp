// What is learnt from how long blocks lived: in which context, and the last time round.
#include "core/lifetimes.h"

#include <cstdint>

#include "units/units.h"

namespace vramx::units::lifetimes_claims {

REVEAL(Known, &Lifetimes::known_);

constexpr Bytes kSize = Lifetimes::kSmallest;
constexpr std::uint32_t kLong = 64;  // the shortest lifetime that is not brief

struct Fixture {
  Lifetimes lifetimes;

  // The request of this size whose context is the two of such sizes before it; freed after so many
  // further requests and frees.
  void live(Bytes size, std::uint32_t lifetime) {
    enter(kSize * 8);
    const Lifetimes::Request request = lifetimes.note_request(size);
    for (std::uint32_t passed = 1; passed < lifetime; ++passed) lifetimes.note_request(kSize * 16);
    lifetimes.note_free(request);
  }
  void enter(Bytes before) {
    lifetimes.note_request(before);
    lifetimes.note_request(before);
  }
  std::uint32_t kin_of(Bytes size) {
    enter(kSize * 8);
    return lifetimes.kin_of(size);
  }
  bool is_brief(Bytes size) { return Lifetimes::is_brief(kin_of(size)); }
};

CHECK(Fixture, nothing_is_known_before_its_like_was_freed) {
  EXPECT(kin_of(kSize) == 0);
  lifetimes.note_request(kSize);
  EXPECT(kin_of(kSize) == 0 && !is_brief(kSize));
}

CHECK(Fixture, lifetimes_of_as_many_bits_make_kin) {
  live(kSize, kLong);
  live(kSize * 2, kLong * 2 - 1);
  live(kSize * 4, kLong * 2);
  EXPECT(kin_of(kSize) == kin_of(kSize * 2));
  EXPECT(kin_of(kSize * 4) == kin_of(kSize) + 1);
}

CHECK(Fixture, a_block_is_brief_if_its_like_was_freed_soon_the_last_time) {
  for (const std::uint32_t lifetime : {kLong - 1, kLong, std::uint32_t{1}, kLong}) {
    live(kSize, lifetime);
    EXPECT(is_brief(kSize) == (lifetime < kLong));
  }
}

CHECK(Fixture, another_size_is_another_context) {
  live(kSize, 1);
  EXPECT(!is_brief(kSize + kBlockUnit));
}

CHECK(Fixture, other_requests_before_it_are_another_context) {
  live(kSize, 1);
  enter(kSize * 4);
  EXPECT(lifetimes.kin_of(kSize) == 0);
  lifetimes.note_request(kSize * 8);  // only the last is the same
  EXPECT(lifetimes.kin_of(kSize) == 0);
}

CHECK(Fixture, a_life_beyond_what_a_number_holds_is_long) {
  live(kSize, (1u << 16) + 1);
  EXPECT(kin_of(kSize) == Lifetimes::kKins - 1);
}

CHECK(Fixture, a_thousand_contexts_are_told_apart) {
  constexpr std::uint64_t kContexts = 1000;
  for (std::uint64_t n = 0; n < kContexts; ++n) live(kSize + kBlockUnit * n, 1);
  std::uint64_t known = 0;
  for (std::uint64_t n = 0; n < kContexts; ++n) known += is_brief(kSize + kBlockUnit * n);
  // Of a thousand in 4096 slots one in nine is overwritten by a later one, on average; more than
  // one in six is ten standard deviations off.
  EXPECT(known > kContexts * 5 / 6);
}

CHECK(Fixture, check_names_a_context_without_a_lifetime) {
  live(kSize, 1);
  EXPECT(lifetimes.check().empty());
  for (auto& known : lifetimes.*member(Known())) known.lifetime = 0;
  EXPECT(starts_with(lifetimes.check(), "lifetimes 1"));
}

}  // namespace vramx::units::lifetimes_claims
