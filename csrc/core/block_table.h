// From the address that a caller holds to the first span of its block: a hash table of buckets.
//
// A bucket is a line of the cache with room for seven entries, and all of them are compared at
// once: the processor has no end of a search to guess. An entry that finds its bucket full goes to
// the next that is not, and those it passes count it: a search goes on behind a bucket only while
// something does lie there. An entry is the span's number and as much of the address as fits beside
// it. Whether the span's block has the whole address is for the caller to say, who has the spans
// and looks at this one anyway. Once it has grown the table has two to four entries a bucket. Not
// thread-safe. O(1); growing to twice the size copies every entry, once in as many insertions.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "core/types.h"

namespace vramx {

class BlockTable {
 public:
  // Where an entry is, until the next insertion.
  struct Entry {
    SpanId span = kNoId;  // kNoId: there is none
    std::uint32_t slot = 0;
    std::size_t bucket = 0;
  };

  BlockTable() : buckets_(kInitialBuckets) {}

  void insert(Address address, SpanId span) {
    if (count_ >= buckets_.size() * kFilled) [[unlikely]] {
      grow();
    }
    place(key_of(address), span);
    ++count_;
  }

  // The entry of the span for which is_at(span) says that its block begins at `address`.
  template <class IsAt>
  Entry find(Address address, IsAt is_at) const {
    const std::uint32_t key = key_of(address);
    std::size_t at = home(key);
    do {
      const Bucket& bucket = buckets_[at];
      for (std::uint32_t hits = slots_with(bucket.keys, key); hits != 0; hits &= hits - 1) {
        const auto slot = static_cast<std::uint32_t>(std::countr_zero(hits));
        const SpanId span = bucket.spans[slot];
        if (span != kNoId && is_at(span)) return {span, slot, at};
      }
      if (bucket.passed() == 0) return {};
      at = next(at);
    } while (at != home(key));  // once round, where every bucket was passed
    return {};
  }

  // `entry` is what find returned.
  void erase(const Entry& entry) {
    Bucket& bucket = buckets_[entry.bucket];
    bucket.spans[entry.slot] = kNoId;
    std::size_t at = home(bucket.keys[entry.slot]);
    for (; at != entry.bucket; at = next(at)) --buckets_[at].passed();
    --count_;
  }

  // Calls visit(span) for the first span of every block.
  template <class Visit>
  void for_each(Visit visit) const {
    for (const Bucket& bucket : buckets_) {
      for (std::uint32_t slot = 1; slot < kWords; ++slot) {
        if (bucket.spans[slot] != kNoId) visit(bucket.spans[slot]);
      }
    }
  }

  std::size_t count() const { return count_; }
  std::size_t host_bytes() const { return buckets_.capacity() * sizeof(Bucket); }

 private:
  static constexpr std::size_t kInitialBuckets = 128;  // a power of two, as every size after it
  static constexpr std::size_t kFilled = 4;            // entries of a bucket at most, on average
  static constexpr std::uint32_t kWords = 8;
  using Words = std::array<std::uint32_t, kWords>;

  // The slots are numbered from 1.
  struct alignas(64) Bucket {
    Words keys{};  // of the addresses: their block units, less what is above 2 TiB
    Words spans;   // kNoId: the slot is empty

    Bucket() { spans.fill(kNoId); }
    // Entries that lie behind it for want of room.
    std::uint32_t& passed() { return keys[0]; }
    std::uint32_t passed() const { return keys[0]; }
  };

  // A bit for each slot that has the value there.
  static std::uint32_t slots_with(const Words& words, std::uint32_t value) {
    constexpr std::uint32_t kSlots = (1u << kWords) - 2;
    std::uint32_t found = 0;
#if defined(__SSE2__)
    const __m128i wanted = _mm_set1_epi32(static_cast<int>(value));
    const auto* const quads = reinterpret_cast<const __m128i*>(words.data());
    for (int i = 0; i < 2; ++i) {
      const __m128i equal = _mm_cmpeq_epi32(_mm_load_si128(quads + i), wanted);
      found |= static_cast<std::uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(equal))) << (4 * i);
    }
#else
    for (std::uint32_t i = 0; i < kWords; ++i) {
      found |= static_cast<std::uint32_t>(words[i] == value) << i;
    }
#endif
    return found & kSlots;
  }

  static std::uint32_t key_of(Address address) {
    return static_cast<std::uint32_t>(address.value / kBlockUnit.count);
  }
  std::size_t next(std::size_t bucket) const { return (bucket + 1) & mask_; }
  // Fibonacci hashing: addresses at any regular distance fall evenly over the buckets.
  std::size_t home(std::uint32_t key) const { return key * 0x9E3779B9u >> shift_; }

  void place(std::uint32_t key, SpanId span) {
    std::size_t at = home(key);
    std::uint32_t room = slots_with(buckets_[at].spans, kNoId);
    for (; room == 0; room = slots_with(buckets_[at].spans, kNoId)) {
      ++buckets_[at].passed();
      at = next(at);
    }
    const auto slot = static_cast<std::size_t>(std::countr_zero(room));
    buckets_[at].keys[slot] = key;
    buckets_[at].spans[slot] = span;
  }

  void grow() {
    std::vector<Bucket> old(buckets_.size() * 2);
    old.swap(buckets_);
    --shift_;
    mask_ = buckets_.size() - 1;
    for (const Bucket& bucket : old) {
      for (std::uint32_t slot = 1; slot < kWords; ++slot) {
        if (bucket.spans[slot] != kNoId) place(bucket.keys[slot], bucket.spans[slot]);
      }
    }
  }

  std::vector<Bucket> buckets_;
  std::size_t mask_ = kInitialBuckets - 1;
  int shift_ = 32 - std::countr_zero(kInitialBuckets);  // leaves as many bits as number the buckets
  std::size_t count_ = 0;
};

}  // namespace vramx
