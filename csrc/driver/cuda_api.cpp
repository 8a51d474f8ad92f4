// Finding libcuda at run time; see the header.
//
// The symbols are looked up under their versioned names, which is what cuda.h's macros expand to:
// cuGetProcAddress would answer with whatever version the running driver thinks fits, and a table
// written against fixed signatures must not depend on that. The names without _ptsz are meant: for
// them 0 is the legacy default stream, and only CU_STREAM_PER_THREAD is the calling thread's.
#include "driver/cuda_api.h"

#include <dlfcn.h>

#include <cstdio>

namespace vramx::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

// Looks symbols up until one is missing, and remembers which.
class Binder {
 public:
  explicit Binder(void* library) : library_(library) {}

  template <class Function>
  Binder& operator()(const char* name, Function*& slot) {
    optional(name, slot);
    if (slot == nullptr && missing_ == nullptr) missing_ = name;
    return *this;
  }
  // Null where the driver is older than the function: who calls it looks first.
  template <class Function>
  void optional(const char* name, Function*& slot) {
    slot = reinterpret_cast<Function*>(dlsym(library_, name));
  }
  const char* missing() const { return missing_; }

 private:
  void* const library_;
  const char* missing_ = nullptr;
};

void bind_devices(Binder& bind, Api& api) {
  bind("cuInit", api.init);
  bind("cuDriverGetVersion", api.driver_get_version);
  bind("cuGetErrorName", api.get_error_name);
  bind("cuDeviceGet", api.device_get);
  bind("cuDeviceGetCount", api.device_get_count);
  bind("cuDeviceGetName", api.device_get_name);
  bind("cuDeviceTotalMem_v2", api.device_total_mem);
  bind("cuDeviceGetAttribute", api.device_get_attribute);
  bind("cuDeviceCanAccessPeer", api.device_can_access_peer);
  bind("cuDevicePrimaryCtxRetain", api.device_primary_ctx_retain);
  bind("cuDevicePrimaryCtxRelease_v2", api.device_primary_ctx_release);
  bind("cuCtxGetCurrent", api.ctx_get_current);
  bind("cuCtxPushCurrent_v2", api.ctx_push_current);
  bind("cuCtxPopCurrent_v2", api.ctx_pop_current);
  bind("cuCtxSynchronize", api.ctx_synchronize);
  bind.optional("cuCtxRecordEvent", api.ctx_record_event);
  bind("cuThreadExchangeStreamCaptureMode", api.thread_exchange_stream_capture_mode);
}

void bind_memory(Binder& bind, Api& api) {
  bind("cuMemGetInfo_v2", api.mem_get_info);
  bind("cuMemGetAllocationGranularity", api.mem_get_allocation_granularity);
  bind("cuMemAddressReserve", api.mem_address_reserve);
  bind("cuMemAddressFree", api.mem_address_free);
  bind("cuMemCreate", api.mem_create);
  bind("cuMemRelease", api.mem_release);
  bind("cuMemMap", api.mem_map);
  bind("cuMemUnmap", api.mem_unmap);
  bind("cuMemSetAccess", api.mem_set_access);
  bind("cuMemsetD32Async", api.memset_d32_async);
  bind("cuMemcpyDtoHAsync_v2", api.memcpy_dtoh_async);
}

void bind_streams(Binder& bind, Api& api) {
  bind("cuEventCreate", api.event_create);
  bind("cuEventDestroy_v2", api.event_destroy);
  bind("cuEventRecord", api.event_record);
  bind("cuEventQuery", api.event_query);
  bind("cuStreamCreate", api.stream_create);
  bind("cuStreamDestroy_v2", api.stream_destroy);
  bind("cuStreamSynchronize", api.stream_synchronize);
  bind("cuStreamWaitEvent", api.stream_wait_event);
  bind.optional("cuStreamGetId", api.stream_get_id);
  bind("cuStreamIsCapturing", api.stream_is_capturing);
  bind("cuStreamBeginCapture_v2", api.stream_begin_capture);
  bind("cuStreamEndCapture", api.stream_end_capture);
  bind("cuGraphDestroy", api.graph_destroy);
}

template <class... Args>
void explain(LoadedApi& loaded, const char* format, Args... args) {
  std::snprintf(loaded.error.data(), loaded.error.size(), format, args...);
}

void start(LoadedApi& loaded) {
  const ResultCode result = loaded.api.init(0);
  loaded.is_loaded = result == kSuccess;
  if (loaded.is_loaded) return;
  const char* name = "unknown error";
  loaded.api.get_error_name(result, &name);
  explain(loaded, "cuInit failed with %d (%s)", result, name);
}

LoadedApi load() {
  LoadedApi loaded;
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    explain(loaded, "%s", dlerror());
    return loaded;
  }
  Binder bind(library);
  bind_devices(bind, loaded.api);
  bind_memory(bind, loaded.api);
  bind_streams(bind, loaded.api);
  if (bind.missing() == nullptr) {
    start(loaded);
  } else {
    explain(loaded, "%s has no %s: the driver is too old", kLibrary, bind.missing());
  }
  return loaded;
}

}  // namespace

const LoadedApi& load_cuda() {
  static const LoadedApi loaded = load();
  return loaded;
}

Status to_status(ResultCode result, const char* call) {
  switch (result) {
    case kSuccess:
      return ok_status();
    case kErrorOutOfMemory:
      return {StatusCode::kOutOfMemory, result, call};
    case kErrorInvalidValue:
    case kErrorInvalidDevice:
    case kErrorInvalidHandle:
      return {StatusCode::kInvalidValue, result, call};
    case kErrorNotSupported:
      return {StatusCode::kNotSupported, result, call};
    case kErrorNotInitialized:
    case kErrorDeinitialized:
    case kErrorStubLibrary:
    case kErrorDeviceUnavailable:
    case kErrorNoDevice:
    case kErrorSystemNotReady:
    case kErrorSystemDriverMismatch:
      return {StatusCode::kNotInitialized, result, call};
    default:
      return {StatusCode::kDriverError, result, call};
  }
}

}  // namespace vramx::cuda
