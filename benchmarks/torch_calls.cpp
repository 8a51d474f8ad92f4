// Replays a recorded program's allocations through torch's own allocator interface, timed.
//
// Compiled for the installed torch and called through ctypes by benchmarks/programs/_calls.py; the
// allocator is whichever torch has at that moment, so one binary measures all of them. Nothing is
// launched and no memory is touched. One thread. An event costs what the allocator takes and about
// a nanosecond for the loop.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::cuda::CUDACachingAllocator::CUDAAllocator;

struct Event {
  std::uint64_t size;  // 0: the allocation `id` is freed
  std::uint32_t id;
  std::uint32_t stream;  // an index
};

struct Trace {
  std::span<const Event> events;
  std::size_t id_count;
  std::vector<c10::cuda::CUDAStream> streams;
};

double nanoseconds_since(std::chrono::steady_clock::time_point start) {
  const std::chrono::duration<double, std::nano> passed = std::chrono::steady_clock::now() - start;
  return passed.count();
}

// What C++ code does that keeps a pointer: the stream is named, the caller frees. Each stream was
// current before, as those of a program are.
class RawCalls {
 public:
  explicit RawCalls(const Trace& trace)
      : allocator_(*c10::cuda::CUDACachingAllocator::get()), blocks_(trace.id_count) {
    const c10::cuda::CUDAStream before = c10::cuda::getCurrentCUDAStream();
    for (const c10::cuda::CUDAStream& stream : trace.streams) {
      c10::cuda::setCurrentCUDAStream(stream);
      allocator_.raw_delete(allocator_.raw_alloc_with_stream(1, stream.stream()));
      streams_.push_back(stream.stream());
    }
    c10::cuda::setCurrentCUDAStream(before);
  }
  ~RawCalls() {
    for (void* block : blocks_) {
      if (block != nullptr) allocator_.raw_delete(block);
    }
  }
  RawCalls(const RawCalls&) = delete;
  RawCalls& operator=(const RawCalls&) = delete;

  void allocate(const Event& event) {
    blocks_[event.id] = allocator_.raw_alloc_with_stream(event.size, streams_[event.stream]);
  }
  void free(const Event& event) {
    allocator_.raw_delete(std::exchange(blocks_[event.id], nullptr));
  }

 private:
  CUDAAllocator& allocator_;
  std::vector<cudaStream_t> streams_;
  std::vector<void*> blocks_;
};

// What a tensor does: the stream is the current one, the DataPtr frees. Changing the current stream
// counts, as it does in a program.
class TensorCalls {
 public:
  explicit TensorCalls(const Trace& trace)
      : allocator_(*c10::cuda::CUDACachingAllocator::get()),
        before_(c10::cuda::getCurrentCUDAStream()),
        streams_(trace.streams),
        blocks_(trace.id_count) {
    c10::cuda::setCurrentCUDAStream(streams_[current_]);
  }
  ~TensorCalls() { c10::cuda::setCurrentCUDAStream(before_); }
  TensorCalls(const TensorCalls&) = delete;
  TensorCalls& operator=(const TensorCalls&) = delete;

  void allocate(const Event& event) {
    if (event.stream != current_) {
      c10::cuda::setCurrentCUDAStream(streams_[event.stream]);
      current_ = event.stream;
    }
    blocks_[event.id] = allocator_.allocate(event.size);
  }
  void free(const Event& event) { blocks_[event.id].clear(); }

 private:
  CUDAAllocator& allocator_;
  c10::cuda::CUDAStream before_;
  const std::vector<c10::cuda::CUDAStream>& streams_;
  std::uint32_t current_ = 0;
  std::vector<c10::DataPtr> blocks_;
};

// Nanoseconds for one event, on average over the trace. What the program never freed is freed by
// the calls' destructor, after the clock has stopped.
template <typename Calls>
double time_pass(const Trace& trace) {
  Calls calls(trace);
  const auto start = std::chrono::steady_clock::now();
  for (const Event& event : trace.events) {
    event.size == 0 ? calls.free(event) : calls.allocate(event);
  }
  return nanoseconds_since(start) / static_cast<double>(trace.events.size());
}

thread_local std::string error;

}  // namespace

#define VRAMX_EXPORT extern "C" __attribute__((visibility("default")))

// Replays `events` `pass_count` times and writes each pass's time. `is_tensor` chooses TensorCalls.
// `streams` are torch's ids of its own streams of `device`. 0 if all went well.
VRAMX_EXPORT int vramx_calls_replay(const Event* events, std::size_t event_count,
                                    std::size_t id_count, const std::int64_t* streams,
                                    std::size_t stream_count, int device, int is_tensor,
                                    double* pass_ns, std::size_t pass_count) noexcept try {
  Trace trace{{events, event_count}, id_count, {}};
  const auto index = static_cast<c10::DeviceIndex>(device);
  for (const std::int64_t id : std::span(streams, stream_count)) {
    const c10::Stream stream(c10::Stream::UNSAFE, {c10::DeviceType::CUDA, index}, id);
    trace.streams.emplace_back(stream);
  }
  for (double& ns : std::span(pass_ns, pass_count)) {
    ns = is_tensor != 0 ? time_pass<TensorCalls>(trace) : time_pass<RawCalls>(trace);
  }
  return 0;
} catch (const std::exception& thrown) {
  error = thrown.what();
  return 1;
}

// Of this thread's last failure.
VRAMX_EXPORT const char* vramx_calls_error() noexcept { return error.c_str(); }
