// What is learnt from how long blocks lived: in which context, and the last time round.
#include "core/lifetimes.h"

#include <array>
#include <cstdint>

#include "units/units.h"

namespace vramx::units {

struct Known {
  friend auto member(Known);
};
template struct Reveal<Known, &Lifetimes::known_>;

namespace lifetimes_claims {
namespace {

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

void nothing_is_known_before_its_like_was_freed(Fixture& fixture) {
  EXPECT(fixture.kin_of(kSize) == 0);
  fixture.lifetimes.note_request(kSize);
  EXPECT(fixture.kin_of(kSize) == 0 && !fixture.is_brief(kSize));
}

void lifetimes_of_as_many_bits_make_kin(Fixture& fixture) {
  fixture.live(kSize, kLong);
  fixture.live(kSize * 2, kLong * 2 - 1);
  fixture.live(kSize * 4, kLong * 2);
  EXPECT(fixture.kin_of(kSize) == fixture.kin_of(kSize * 2));
  EXPECT(fixture.kin_of(kSize * 4) == fixture.kin_of(kSize) + 1);
}

void a_block_is_brief_if_its_like_was_freed_soon(Fixture& fixture) {
  fixture.live(kSize, kLong - 1);
  EXPECT(fixture.is_brief(kSize));
}

void a_block_stays_if_its_like_did(Fixture& fixture) {
  fixture.live(kSize, kLong);
  EXPECT(!fixture.is_brief(kSize));
}

void the_last_time_round_counts(Fixture& fixture) {
  fixture.live(kSize, kLong);
  fixture.live(kSize, 1);
  EXPECT(fixture.is_brief(kSize));
  fixture.live(kSize, kLong);
  EXPECT(!fixture.is_brief(kSize));
}

void another_size_is_another_context(Fixture& fixture) {
  fixture.live(kSize, 1);
  EXPECT(!fixture.is_brief(kSize + kBlockUnit));
}

void other_requests_before_it_are_another_context(Fixture& fixture) {
  fixture.live(kSize, 1);
  fixture.enter(kSize * 4);
  EXPECT(fixture.lifetimes.kin_of(kSize) == 0);
  fixture.lifetimes.note_request(kSize * 8);  // only the last is the same
  EXPECT(fixture.lifetimes.kin_of(kSize) == 0);
}

void a_life_beyond_what_a_number_holds_is_long(Fixture& fixture) {
  fixture.live(kSize, (1u << 16) + 1);
  EXPECT(fixture.kin_of(kSize) == Lifetimes::kKins - 1);
}

void a_thousand_contexts_are_told_apart(Fixture& fixture) {
  constexpr std::uint64_t kContexts = 1000;
  for (std::uint64_t n = 0; n < kContexts; ++n) fixture.live(kSize + kBlockUnit * n, 1);
  std::uint64_t known = 0;
  for (std::uint64_t n = 0; n < kContexts; ++n) known += fixture.is_brief(kSize + kBlockUnit * n);
  // Of a thousand in 4096 slots one in nine is overwritten by a later one, on average; more than
  // one in six is ten standard deviations off.
  EXPECT(known > kContexts * 5 / 6);
}

void check_names_a_context_without_a_lifetime(Fixture& fixture) {
  fixture.live(kSize, 1);
  EXPECT(fixture.lifetimes.check().empty());
  for (auto& known : fixture.lifetimes.*member(Known())) known.lifetime = 0;
  EXPECT(starts_with(fixture.lifetimes.check(), "lifetimes 1"));
}

constexpr Check<Fixture> kChecks[] = {
    {"nothing is known before its like was freed", nothing_is_known_before_its_like_was_freed},
    {"lifetimes of as many bits make kin", lifetimes_of_as_many_bits_make_kin},
    {"a block is brief if its like was freed soon", a_block_is_brief_if_its_like_was_freed_soon},
    {"a block stays if its like did", a_block_stays_if_its_like_did},
    {"the last time round counts", the_last_time_round_counts},
    {"another size is another context", another_size_is_another_context},
    {"other requests before it are another context", other_requests_before_it_are_another_context},
    {"a life beyond what a number holds is long", a_life_beyond_what_a_number_holds_is_long},
    {"a thousand contexts are told apart", a_thousand_contexts_are_told_apart},
    {"check names a context without a lifetime", check_names_a_context_without_a_lifetime},
};

}  // namespace
}  // namespace lifetimes_claims

void check_lifetimes() { run_checks("lifetimes", lifetimes_claims::kChecks); }

}  // namespace vramx::units
