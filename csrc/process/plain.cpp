#include "process/plain.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <utility>

#include "process/thread_note.h"

#define VRAMX_EXPORT extern "C" __attribute__((visibility("default")))

namespace vramx {
namespace {

std::atomic<Devices*> served{nullptr};

Address address_of(const void* pointer) { return {reinterpret_cast<std::uint64_t>(pointer)}; }
Stream stream_of(const void* stream) { return Stream{reinterpret_cast<std::uint64_t>(stream)}; }

const char* words_for(CoreCode code) {
  switch (code) {
    case CoreCode::kOutOfMemory:
      return out_of_memory_note().text();
    case CoreCode::kForked:
      return "vramx: CUDA memory cannot be allocated in a forked child process";
    default:
      return failure_note().text();
  }
}

}  // namespace

void serve_plain_calls(Devices* devices) { served.store(devices, std::memory_order_release); }

}  // namespace vramx

VRAMX_EXPORT void* vramx_plain_malloc(std::size_t size, int device, void* stream) {
  using namespace vramx;
  if (size == 0) return nullptr;
  Devices* const devices = served.load(std::memory_order_acquire);
  if (devices == nullptr) throw std::runtime_error("vramx: no devices were opened");
  Address address;
  const CoreCode code = devices->allocate(device, Bytes{size}, stream_of(stream), &address);
  if (code != CoreCode::kOk) throw std::runtime_error(words_for(code));
  return reinterpret_cast<void*>(address.value);
}

// The size and the stream are torch's records, which may be stale: the allocator has its own.
VRAMX_EXPORT void vramx_plain_free(void* pointer, std::size_t, int, void*) {
  using namespace vramx;
  Devices* const devices = served.load(std::memory_order_acquire);
  if (devices != nullptr && pointer != nullptr) devices->free(address_of(pointer), nullptr);
}

// torch says neither of which device the stream is nor whose it is. Streams of other devices are
// recorded on memory by programs that copy between devices, which seldom run without the shim; so
// the stream is taken to be of the block's device, and to be one that may be destroyed.
VRAMX_EXPORT void vramx_plain_record_stream(void* pointer, void* stream) {
  using namespace vramx;
  Devices* const devices = served.load(std::memory_order_acquire);
  if (devices == nullptr || pointer == nullptr) return;
  CoreBlock block;
  if (devices->find(address_of(pointer), &block) != CoreCode::kOk) return;
  devices->record_stream(address_of(pointer), {stream_of(stream), block.device}, false);
}

VRAMX_EXPORT void vramx_plain_empty_cache() {
  using namespace vramx;
  Devices* const devices = served.load(std::memory_order_acquire);
  if (devices != nullptr) devices->trim(Devices::kAll);
}

// Of the device's memory, as torch means it. A fraction of all of it sets no limit.
VRAMX_EXPORT void vramx_plain_memory_fraction(double fraction, int device) {
  using namespace vramx;
  Devices* const devices = served.load(std::memory_order_acquire);
  if (devices == nullptr) return;
  const auto capacity = static_cast<double>(devices->capacity(device).count);
  const double share = std::clamp(fraction, 0.0, 1.0) * capacity;
  const bool is_bounded = fraction < 1.0;
  devices->set_share(device, Bytes{is_bounded ? static_cast<std::uint64_t>(share) : UINT64_MAX});
}

// Memory of a graph must stay the graph's after it is freed, which these functions cannot promise.
VRAMX_EXPORT void vramx_plain_begin_pool(int, std::pair<unsigned long long, unsigned long long>,
                                         std::function<bool(void*)>) {
  throw std::runtime_error(
      "vramx: CUDA graphs and memory pools need the compiled shim, and this process runs without "
      "one; install a C++ compiler (g++) and start again");
}
