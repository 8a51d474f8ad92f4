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

namespace vramx::process_checks {
namespace plain_claims {
namespace {

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

void blocks_come_and_go(Fixture& fixture) {
  const Serving serving(fixture);
  void* const block = vramx_plain_malloc(kPiece, 1, nullptr);
  REQUIRE(block != nullptr);
  EXPECT(fixture.devices.started(1)->allocated() == Bytes{kPiece});
  int stream = 0;
  vramx_plain_record_stream(block, &stream);
  vramx_plain_free(block, 1, 0, &stream);  // stale figures do not matter
  EXPECT(fixture.devices.started(1)->allocated() == Bytes{});
  fixture.source.drivers[1]->advance_all();
  vramx_plain_empty_cache();
  EXPECT(fixture.devices.started(1)->held() == Bytes{});
}

void a_request_of_nothing_starts_nothing(Fixture& fixture) {
  const Serving serving(fixture);
  EXPECT(vramx_plain_malloc(0, 0, nullptr) == nullptr);
  vramx_plain_free(nullptr, 0, 0, nullptr);
  vramx_plain_record_stream(nullptr, nullptr);
  EXPECT(fixture.source.opened == 0);
}

void a_failure_is_thrown_in_words(Fixture& fixture) {
  EXPECT(words_of_malloc(kPiece, 0) == "vramx: no devices were opened");
  const Serving serving(fixture);
  EXPECT(words_of_malloc(kPiece * 16, 0).starts_with("CUDA out of memory. Tried to allocate 128"));
  EXPECT(words_of_malloc(kPiece, 99).starts_with("GPU 99 is not a device"));
}

void a_pool_is_refused(Fixture& fixture) {
  const Serving serving(fixture);
  const std::string words = words_of([] { vramx_plain_begin_pool(0, {1, 0}, nullptr); });
  EXPECT(words.starts_with("vramx: CUDA graphs and memory pools need the compiled shim"));
}

void a_fraction_is_of_the_device(Fixture& fixture) {
  const Serving serving(fixture);
  vramx_plain_memory_fraction(0.5, 0);
  EXPECT(vramx_plain_malloc(kPiece * 4, 0, nullptr) != nullptr);
  EXPECT(words_of_malloc(kPiece, 0).starts_with("CUDA out of memory."));
  vramx_plain_memory_fraction(1.0, 0);
  EXPECT(vramx_plain_malloc(kPiece, 0, nullptr) != nullptr);
}

constexpr Check<Fixture> kChecks[] = {
    {"blocks come and go", blocks_come_and_go},
    {"a request of nothing starts nothing", a_request_of_nothing_starts_nothing},
    {"a failure is thrown in words", a_failure_is_thrown_in_words},
    {"a pool is refused", a_pool_is_refused},
    {"a fraction is of the device", a_fraction_is_of_the_device},
};

}  // namespace
}  // namespace plain_claims

void check_plain() { run_checks("plain functions", plain_claims::kChecks); }

}  // namespace vramx::process_checks
