// The allocator's promise to streams, for any program: whoever gets memory runs after everyone who
// used it before. The simulated device knows the order of all work; a shadow remembers, for every
// 4 KiB of the arena, the work that used it last.
//
// The program is deterministic. Its negative control uses blocks on streams that it never recorded,
// which the shadow must notice.
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "units/units.h"

namespace vramx::units::handed_over_claims {

constexpr Bytes kGranularity = 64_KiB;
constexpr Bytes kShadowed = 4_KiB;
constexpr std::uint64_t kStreams = 3;

enum class Recording { kEveryUse, kNone };

class Program {
 public:
  Program(std::uint64_t seed, CrossStream mode, Recording recording)
      : recording_(recording),
        random_(seed),
        sim_(contract::open_sim(
            {.capacity = 16_MiB, .granularity = kGranularity, .mode = SimMode::kAccounting})) {
    auto made = DeviceAllocator::create(
        *sim_, {.cross_stream = mode, .alias_addresses = 1_GiB, .patience = {}});
    if (made.ok()) allocator_ = std::move(made.value());
  }

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      const std::uint64_t choice = random_() % 100;
      if (choice < 55) take();
      if (choice >= 55 && choice < 90) free_one();
      if (choice >= 90 && choice < 97) sim_->advance(any_stream(), 1 + random_() % 4);
      if (choice >= 97) allocator_->trim();
    }
  }

  // Pieces of memory handed out before their last use was sure to be over.
  std::uint64_t early() const { return early_; }
  AllocatorStats stats() const { return allocator_->stats(); }
  std::string check() const { return allocator_->check(); }

 private:
  struct Owned {
    Address address;
    std::vector<std::uint64_t> pieces;  // of the shadow
    std::vector<Stream> users;
  };

  Stream any_stream() { return Stream{11 + random_() % kStreams}; }

  std::vector<std::uint64_t> pieces_of(Address block) const {
    std::vector<std::uint64_t> pieces;
    for (const SpanInfo& span : allocator_->layout()) {
      if (span.block != block) continue;
      for (Bytes at{}; at < span.size; at += kShadowed) {
        pieces.push_back((span.address + at).value / kShadowed.count);
      }
    }
    return pieces;
  }

  void take() {
    const Stream stream = any_stream();
    const Bytes size = kShadowed * (1 + (random_() % 1024 >> random_() % 10));
    const Result<Address> made = allocator_->allocate(size, stream);
    if (!made.ok()) return;
    Owned owned{made.value(), pieces_of(made.value()), {stream}};
    for (const std::uint64_t piece : owned.pieces) {
      for (const StreamPoint& use : last_uses_[piece]) {
        if (!sim_->happens_before(use, stream)) ++early_;
      }
    }
    if (random_() % 4 == 0) use_elsewhere(owned);
    owned_.push_back(std::move(owned));
  }

  void use_elsewhere(Owned& owned) {
    const Stream other = any_stream();
    if (recording_ == Recording::kEveryUse) {
      allocator_->record_stream(owned.address, {other, 0}, true).ignore();
    }
    owned.users.push_back(other);
  }

  // The block is used on all of its streams up to the moment it is freed.
  void free_one() {
    if (owned_.empty()) return;
    std::swap(owned_[random_() % owned_.size()], owned_.back());
    const Owned owned = std::move(owned_.back());
    owned_.pop_back();
    std::vector<StreamPoint> uses;
    for (const Stream user : owned.users) uses.push_back(sim_->submit(user).value());
    for (const std::uint64_t piece : owned.pieces) last_uses_[piece] = uses;
    allocator_->free(owned.address).ignore();
  }

  const Recording recording_;
  std::mt19937_64 random_;
  std::unique_ptr<SimDriver> sim_;  // outlives the allocator
  std::unique_ptr<DeviceAllocator> allocator_;
  std::vector<Owned> owned_;
  std::map<std::uint64_t, std::vector<StreamPoint>> last_uses_;
  std::uint64_t early_ = 0;
};

CHECK(Nothing, memory_is_handed_over_in_order_however_it_is_shared) {
  for (const CrossStream mode :
       {CrossStream::kUnderPressure, CrossStream::kAlways, CrossStream::kNever}) {
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      Program program(seed, mode, Recording::kEveryUse);
      program.run(1200);
      EXPECT(program.early() == 0);
      EXPECT(program.check().empty());
      EXPECT(program.stats().num_stitches > 0);
    }
  }
}

CHECK(Nothing, a_use_that_was_not_recorded_is_noticed) {
  Program program(1, CrossStream::kUnderPressure, Recording::kNone);
  program.run(1200);
  EXPECT(program.early() > 0);
}

}  // namespace vramx::units::handed_over_claims
