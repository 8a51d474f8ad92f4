// Failure as a value. Nothing in the core throws for out of memory: a call that can fail returns a
// Status, or a Result<T> that holds either a value or the Status that says why there is none.
#pragma once

#include <cassert>
#include <cstdint>
#include <utility>

namespace vramx {

enum class StatusCode : std::uint8_t {
  kOk,
  kOutOfMemory,     // the device, the limit or the mapping ceiling is exhausted
  kInvalidValue,    // the caller broke the contract of the call
  kNotSupported,    // this driver or device cannot do it (a partial mapping of a chunk, say)
  kNotInitialized,  // no driver, no device, or used in a forked child
  kDriverError,     // anything else that the driver reported; `driver_code` has its number
};

struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  std::int32_t driver_code = 0;  // the CUresult, 0 where there is none
  const char* call = "";         // static string: the call that failed

  constexpr bool ok() const { return code == StatusCode::kOk; }
  // Says on purpose that a failure here cannot be acted on (undo paths, destructors).
  constexpr void ignore() const {}
};

constexpr Status ok_status() { return {}; }

// Either a T or the Status that explains its absence, never both.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(status) { assert(!status.ok()); }  // NOLINT

  bool ok() const { return status_.ok(); }
  Status status() const { return status_; }
  T& value() { return assert(ok()), value_; }
  const T& value() const { return assert(ok()), value_; }

 private:
  T value_{};
  Status status_{};
};

}  // namespace vramx
