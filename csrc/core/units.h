// Numbers with a unit: bytes, addresses, and the opaque names of chunks, streams and events.
//
// Everything in the core that is a quantity goes through these types, so that a size is never added
// to a stream and a function that rounds says so in its name. They are free at run time: each holds
// one integer and every operation is constexpr. No state, no locking.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>

namespace vramx {

struct Bytes {
  std::uint64_t count = 0;

  constexpr auto operator<=>(const Bytes&) const = default;
  constexpr explicit operator bool() const { return count != 0; }
  constexpr Bytes& operator+=(Bytes other) { return count += other.count, *this; }
  constexpr Bytes& operator-=(Bytes other) { return count -= other.count, *this; }
};

constexpr Bytes operator+(Bytes a, Bytes b) { return {a.count + b.count}; }
constexpr Bytes operator-(Bytes a, Bytes b) { return {a.count - b.count}; }
constexpr Bytes operator*(Bytes a, std::uint64_t factor) { return {a.count * factor}; }
constexpr std::uint64_t operator/(Bytes a, Bytes b) { return a.count / b.count; }
constexpr Bytes operator%(Bytes a, Bytes b) { return {a.count % b.count}; }

constexpr Bytes min(Bytes a, Bytes b) { return a < b ? a : b; }
constexpr Bytes max(Bytes a, Bytes b) { return a < b ? b : a; }

namespace literals {
constexpr Bytes operator""_B(unsigned long long n) { return {n}; }
constexpr Bytes operator""_KiB(unsigned long long n) { return {n << 10}; }
constexpr Bytes operator""_MiB(unsigned long long n) { return {n << 20}; }
constexpr Bytes operator""_GiB(unsigned long long n) { return {n << 30}; }
}  // namespace literals

// `unit` need not be a power of two. The caller keeps n + unit below 2^64.
constexpr Bytes round_up(Bytes n, Bytes unit) {
  return {(n.count + unit.count - 1) / unit.count * unit.count};
}
constexpr Bytes round_down(Bytes n, Bytes unit) { return {n.count / unit.count * unit.count}; }

// A device virtual address. Zero is never a valid one.
struct Address {
  std::uint64_t value = 0;

  constexpr auto operator<=>(const Address&) const = default;
  constexpr explicit operator bool() const { return value != 0; }
};

constexpr Address operator+(Address a, Bytes n) { return {a.value + n.count}; }
constexpr Address operator-(Address a, Bytes n) { return {a.value - n.count}; }
constexpr Bytes operator-(Address a, Address b) { return {a.value - b.value}; }

// Names that only the driver can interpret. A stream is the raw cudaStream_t as an integer; chunk
// handles and events are never 0.
enum class ChunkHandle : std::uint64_t { kNone = 0 };
enum class Stream : std::uint64_t {
  kDefault = 0,
  kLegacy = 1,     // CUDA's other name for the default stream
  kPerThread = 2,  // another stream in each thread that says it
};
enum class Event : std::uint64_t { kNone = 0 };

// A stream as a driver call needs it: a handle means nothing without the device that it belongs to.
struct StreamName {
  Stream handle = Stream::kDefault;
  std::int32_t device = 0;

  constexpr bool operator==(const StreamName&) const = default;
};

}  // namespace vramx
