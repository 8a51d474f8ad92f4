// What the functions that a test calls have in common.
//
// Everything goes through CUDACachingAllocator::get(), so before an installation it is the native
// stand-in that answers. A function that raises returns a null or nothing and leaves the text for
// bench_error(). Pointers to text are valid until the next call. Not thread-safe.
#pragma once

#include <string>
#include <utility>

#include "json.h"
#include "native.h"

#define BENCH extern "C" __attribute__((visibility("default")))

namespace vramx::stub {

inline std::string& text() {
  static auto* text = new std::string;
  return *text;
}

inline std::string& error() {
  static auto* error = new std::string;
  return *error;
}

inline const char* keep(std::string result) {
  text() = std::move(result);
  return text().c_str();
}

template <class Call>
auto guarded(Call call) -> decltype(call()) {
  error().clear();
  try {
    return call();
  } catch (const c10::OutOfMemoryError& raised) {
    error() = std::string("OutOfMemoryError: ") + raised.what_without_backtrace();
  } catch (const c10::Error& raised) {
    error() = std::string("Error: ") + raised.what_without_backtrace();
  }
  return decltype(call())();
}

inline CUDAAllocator& current() { return *torch_cuda::get(); }

}  // namespace vramx::stub
