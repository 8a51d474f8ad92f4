#include "torch/pool_filters.h"

#include <algorithm>

#include "torch/torch_streams.h"

namespace vramx {
namespace {

// An invalidated capture still is one: its end is to come. So is one that CUDA says nothing of.
bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
    return status != cudaStreamCaptureStatusNone;
  }
  (void)cudaGetLastError();
  return true;
}

}  // namespace

// The filter of a capture matches nothing before the capture begins; that of a pool without one
// matches the thread or the stream that it was made on.
PoolFilters::Capture PoolFilters::capture_of(DeviceIndex device, const StreamFilter& filter) {
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(device);
  const cudaStream_t stream = current.stream();
  if (stream == nullptr || filter(stream)) return {};
  return {stream, std::this_thread::get_id(), is_kept_by_torch(current), false};
}

// A stream that another library may have destroyed is asked only where it is current and so exists.
// One that captures nothing on another thread, and was never seen to, may be about to begin.
bool PoolFilters::is_over(Entry& entry, cudaStream_t beginning) {
  Capture& capture = entry.capture;
  if (capture.stream == nullptr) return false;
  const bool exists =
      capture.is_kept || c10::cuda::getCurrentCUDAStream(entry.device).stream() == capture.stream;
  if (!exists) return false;
  if (is_capturing(capture.stream)) {
    capture.was_seen = true;
    return false;
  }
  return capture.was_seen || capture.thread == std::this_thread::get_id() ||
         capture.stream == beginning;
}

void PoolFilters::add(DeviceIndex device, MempoolId_t pool, StreamFilter filter) {
  const Capture capture = capture_of(device, filter);
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(abandoned_, [&](const Abandoned& each) {
      return each.device == device && each.pool == pool;
    });
    entries_.push_back({device, pool, std::move(filter), capture});
    change_count(device, 1);
  }
  await_calls(device);
}

PoolFilters::Removal PoolFilters::remove(DeviceIndex device, MempoolId_t pool) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.is(device, pool); });
  if (found == entries_.end()) {
    const auto erased = std::erase_if(abandoned_, [&](const Abandoned& each) {
      return each.device == device && each.pool == pool;
    });
    return erased > 0 ? Removal::kWasAbandoned : Removal::kUnknown;
  }
  entries_.erase(found);
  change_count(device, -1);
  return Removal::kDone;
}

// torch ends a capture and tells so in two steps, on one thread. So between them another thread may
// find a capture over that has not failed, and only the thread that began it can be certain.
std::vector<PoolFilters::Abandoned> PoolFilters::take_abandoned(cudaStream_t beginning) {
  if (!has_any()) return {};
  std::vector<Abandoned> taken;
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [&](Entry& entry) {
    if (!is_over(entry, beginning)) return false;
    const bool is_certain = entry.capture.thread == std::this_thread::get_id();
    taken.push_back({entry.device, entry.pool, is_certain});
    return true;
  });
  for (const Abandoned& each : taken) change_count(each.device, -1);
  abandoned_.insert(abandoned_.end(), taken.begin(), taken.end());
  return taken;
}

bool PoolFilters::match(DeviceIndex device, cudaStream_t stream) const {
  if (!has_any(device)) return false;
  const std::lock_guard lock(mutex_);
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.device == device && entry.filter(stream);
  });
}

// Counted before it looks, as add() adds before it looks at the count: one of them sees the other.
template <class Spoils>
bool PoolFilters::begin_call_unless(DeviceIndex device, Spoils spoils) {
  std::atomic<int>& calls = calls_[static_cast<std::size_t>(device)];
  ++calls;
  if (!has_any(device)) return true;
  const std::lock_guard lock(mutex_);
  const bool is_spoilt = std::any_of(entries_.begin(), entries_.end(), [&](Entry& entry) {
    return entry.device == device && spoils(entry.capture) && !is_over(entry, nullptr);
  });
  if (is_spoilt) --calls;
  return !is_spoilt;
}

bool PoolFilters::begin_call(DeviceIndex device, cudaStream_t stream) {
  return begin_call_unless(device, [&](const Capture& capture) {
    return capture.stream != nullptr && capture.may_begin() &&
           c10::cuda::getCurrentCUDAStream(device).stream() != stream;
  });
}

bool PoolFilters::begin_device_call(DeviceIndex device) {
  return begin_call_unless(device, [](const Capture&) { return true; });
}

void PoolFilters::await_calls(DeviceIndex device) const {
  const auto deadline = std::chrono::steady_clock::now() + kLongestCall;
  while (calls_[static_cast<std::size_t>(device)] > 0 &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kLook);
  }
}

void PoolFilters::change_count(DeviceIndex device, int by) {
  counts_[static_cast<std::size_t>(device)] += by;
  flags_.set(Flag::kPools, !entries_.empty());
}

}  // namespace vramx
