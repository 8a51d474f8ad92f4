// The plain functions, called as torch calls them: by name, with its types.
#include "process/plain.h"

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "process/process.h"

extern "C" {
void* vramx_plain_malloc(std::size_t size, int device, void* stream);
void vramx_plain_free(void* pointer, std::size_t size, int device, void* stream);
void vramx_plain_record_stream(void* pointer, void* stream);
void vramx_plain_empty_cache();
void vramx_plain_memory_fraction(double fraction, int device);
void vramx_plain_begin_pool(int device, std::pair<unsigned long long, unsigned long long> pool,
                            std::function<bool(void*)> filter);
}

namespace vramx::process_checks::plain_claims {

constexpr std::size_t kPiece = 8 << 20;

// While alive, the plain functions use the fixture's devices.
struct Serving {
  explicit Serving(Fixture& fixture) { serve_plain_calls(&fixture.devices); }
  ~Serving() { serve_plain_calls(nullptr); }
};

template <class Call>
std::string words_of(Call call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::string words_of_malloc(std::size_t size, int device) {
  return words_of([&] { vramx_plain_malloc(size, device, nullptr); });
}

CHECK(Fixture, blocks_come_and_go) {
  const Serving serving(*this);
  void* const block = vramx_plain_malloc(kPiece, 1, nullptr);
  REQUIRE(block != nullptr);
  EXPECT(devices.started(1)->allocated() == Bytes{kPiece});
  int stream = 0;
  vramx_plain_record_stream(block, &stream);
  vramx_plain_free(block, 1, 0, &stream);  // stale figures do not matter
  EXPECT(devices.started(1)->allocated() == Bytes{});
  source.drivers[1]->advance_all();
  vramx_plain_empty_cache();
  EXPECT(devices.started(1)->held() == Bytes{});
}

CHECK(Fixture, a_request_of_nothing_starts_nothing) {
  const Serving serving(*this);
  EXPECT(vramx_plain_malloc(0, 0, nullptr) == nullptr);
  vramx_plain_free(nullptr, 0, 0, nullptr);
  vramx_plain_record_stream(nullptr, nullptr);
  EXPECT(source.opened == 0);
}

CHECK(Fixture, a_failure_is_thrown_in_words) {
  EXPECT(words_of_malloc(kPiece, 0) == "vramx: no devices were opened");
  const Serving serving(*this);
  EXPECT(words_of_malloc(kPiece * 16, 0).starts_with("CUDA out of memory. Tried to allocate 128"));
  EXPECT(words_of_malloc(kPiece, 99).starts_with("GPU 99 is not a device"));
}

CHECK(Fixture, a_pool_is_refused) {
  const Serving serving(*this);
  const std::string words = words_of([] { vramx_plain_begin_pool(0, {1, 0}, nullptr); });
  EXPECT(words.starts_with("vramx: CUDA graphs and memory pools need the compiled shim"));
}

CHECK(Fixture, a_fraction_is_of_the_device) {
  const Serving serving(*this);
  vramx_plain_memory_fraction(0.5, 0);
  EXPECT(vramx_plain_malloc(kPiece * 4, 0, nullptr) != nullptr);
  EXPECT(words_of_malloc(kPiece, 0).starts_with("CUDA out of memory."));
  vramx_plain_memory_fraction(1.0, 0);
  EXPECT(vramx_plain_malloc(kPiece, 0, nullptr) != nullptr);
}

CHECK(Fixture, a_fraction_does_not_lift_a_limit) {
  const Serving serving(*this);
  for (const bool is_started : {false, true}) {
    devices.set_limit(0, Bytes{kPiece});
    vramx_plain_memory_fraction(1.0, 0);
    if (!is_started) EXPECT(vramx_plain_malloc(kPiece, 0, nullptr) != nullptr);
    EXPECT(words_of_malloc(kPiece, 0).starts_with("CUDA out of memory."));
  }
}

}  // namespace vramx::process_checks::plain_claims
