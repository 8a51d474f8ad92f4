// Streams and events of a real GPU, its own and those of its neighbours; see cuda_driver.h.
#include <cstdint>

#include "driver/cuda_driver.h"
#include "driver/cuda_scope.h"

namespace vramx {
namespace {

std::uint64_t number_of(const void* handle) { return reinterpret_cast<std::uint64_t>(handle); }

Status not_supported(const char* call) {
  return {StatusCode::kNotSupported, cuda::kErrorNotSupported, call};
}

}  // namespace

Result<Event> CudaDriver::create_event(int device) {
  const Result<cuda::ContextHandle> context = context_of(device);
  if (!context.ok()) return context.status();
  cuda::EventHandle event = nullptr;
  const Status status = cuda::call_under(api_, context.value(), "cuEventCreate", [&] {
    return api_.event_create(&event, cuda::kEventDisableTiming);
  });
  if (!status.ok()) return status;
  return Event{number_of(event)};
}

// What an event is asked does not depend on the context that is current.
Status CudaDriver::destroy_event(Event event) {
  return here("cuEventDestroy", [&] { return api_.event_destroy(cuda::handle_of(event)); });
}

Result<bool> CudaDriver::query_event(Event event) {
  bool is_complete = true;
  const Status status = here("cuEventQuery", [&] {
    const cuda::ResultCode result = api_.event_query(cuda::handle_of(event));
    is_complete = result == cuda::kSuccess;
    return result == cuda::kErrorNotReady ? cuda::kSuccess : result;
  });
  if (!status.ok()) return status;
  return is_complete;
}

// The context that is current says which device's stream is meant by kDefault and kPerThread.
template <class Call>
Status CudaDriver::outside_capture(StreamName stream, const char* name, Call call) {
  const Result<cuda::ContextHandle> context = context_of(stream.device);
  if (!context.ok()) return context.status();
  return cuda::call_under(api_, context.value(), name, [&] {
    int capture = cuda::kCaptureStatusNone;
    const cuda::ResultCode asked =
        api_.stream_is_capturing(cuda::handle_of(stream.handle), &capture);
    // The legacy default stream while a stream that synchronises with it captures: just as
    // unusable.
    if (asked == cuda::kErrorStreamCaptureImplicit) return cuda::kErrorNotSupported;
    if (asked != cuda::kSuccess) return asked;
    return capture == cuda::kCaptureStatusNone ? call() : cuda::kErrorNotSupported;
  });
}

Status CudaDriver::record_event(Event event, StreamName stream) {
  return outside_capture(stream, "cuEventRecord", [&] {
    return api_.event_record(cuda::handle_of(event), cuda::handle_of(stream.handle));
  });
}

Status CudaDriver::wait_event(StreamName stream, Event event) {
  return outside_capture(stream, "cuStreamWaitEvent", [&] {
    return api_.stream_wait_event(cuda::handle_of(stream.handle), cuda::handle_of(event), 0);
  });
}

// A captured stream is left alone here too: the function is not said to be permitted on one, and
// NVIDIA's own libraries do not call it there.
Result<std::uint64_t> CudaDriver::stream_id(StreamName stream) {
  if (api_.stream_get_id == nullptr) return not_supported("cuStreamGetId");
  unsigned long long id = 0;
  const Status status = outside_capture(stream, "cuStreamGetId", [&] {
    return api_.stream_get_id(cuda::handle_of(stream.handle), &id);
  });
  if (!status.ok()) return status;
  return std::uint64_t{id};
}

Status CudaDriver::record_device(Event event, int device) {
  if (api_.ctx_record_event == nullptr) return not_supported("cuCtxRecordEvent");
  const Result<cuda::ContextHandle> context = context_of(device);
  if (!context.ok()) return context.status();
  return cuda::call_under(api_, context.value(), "cuCtxRecordEvent", [&] {
    return api_.ctx_record_event(context.value(), cuda::handle_of(event));
  });
}

Status CudaDriver::synchronize(int device) {
  const Result<cuda::ContextHandle> context = context_of(device);
  if (!context.ok()) return context.status();
  return cuda::call_under(api_, context.value(), "cuCtxSynchronize",
                          [&] { return api_.ctx_synchronize(); });
}

// --- Bytewise -----------------------------------------------------------------------------------

Result<Stream> CudaDriver::create_stream() {
  cuda::StreamHandle stream = nullptr;
  const Status status =
      here("cuStreamCreate", [&] { return api_.stream_create(&stream, cuda::kStreamNonBlocking); });
  if (!status.ok()) return status;
  return Stream{number_of(stream)};
}

Status CudaDriver::destroy_stream(Stream stream) {
  return here("cuStreamDestroy", [&] { return api_.stream_destroy(cuda::handle_of(stream)); });
}

Status CudaDriver::begin_capture(Stream stream) {
  return here("cuStreamBeginCapture", [&] {
    return api_.stream_begin_capture(cuda::handle_of(stream), cuda::kCaptureModeGlobal);
  });
}

Status CudaDriver::end_capture(Stream stream) {
  return here("cuStreamEndCapture", [&] {
    cuda::GraphHandle graph = nullptr;
    const cuda::ResultCode result = api_.stream_end_capture(cuda::handle_of(stream), &graph);
    return result == cuda::kSuccess ? api_.graph_destroy(graph) : result;
  });
}

}  // namespace vramx
