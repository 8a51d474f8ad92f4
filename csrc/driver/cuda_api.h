// The part of libcuda that vramx calls: its types, its numbers and its functions, declared here so
// that nothing needs a CUDA toolkit to build and nothing needs a driver to load.
//
// libcuda.so.1 is opened at the first load_cuda() and stays open: a driver with a live context
// cannot be unloaded. Layouts and numbers are those of CUDA 13.0's cuda.h; all are part of the
// driver's stable ABI since CUDA 11.3, but for two functions that a driver may lack. Only the
// driver/cuda_* files include this one.
// Thread-safe. A call through the table costs one indirect jump.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace vramx::cuda {

// CUresult and the other enumerations are ints in the ABI.
using ResultCode = int;
constexpr ResultCode kSuccess = 0;
constexpr ResultCode kErrorInvalidValue = 1;
constexpr ResultCode kErrorOutOfMemory = 2;
constexpr ResultCode kErrorNotInitialized = 3;
constexpr ResultCode kErrorDeinitialized = 4;
constexpr ResultCode kErrorStubLibrary = 34;
constexpr ResultCode kErrorDeviceUnavailable = 46;
constexpr ResultCode kErrorNoDevice = 100;
constexpr ResultCode kErrorInvalidDevice = 101;
constexpr ResultCode kErrorInvalidHandle = 400;
constexpr ResultCode kErrorNotReady = 600;
constexpr ResultCode kErrorNotSupported = 801;
constexpr ResultCode kErrorSystemNotReady = 802;
constexpr ResultCode kErrorSystemDriverMismatch = 803;
constexpr ResultCode kErrorStreamCaptureImplicit = 906;

using Device = int;
using DevicePointer = unsigned long long;
using AllocationHandle = unsigned long long;
using ContextHandle = struct ContextRecord*;
using StreamHandle = struct StreamRecord*;
using EventHandle = struct EventRecord*;
using GraphHandle = struct GraphRecord*;

enum class Attribute : int {
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kVirtualMemoryManagement = 102,
  kPosixFileDescriptor = 103,
  kRdmaWithVirtualMemory = 110,
  kFabricHandle = 128,
};

constexpr int kAllocationPinned = 1;
constexpr int kLocationDevice = 1;
constexpr int kHandleNone = 0;
constexpr int kHandlePosixFileDescriptor = 1;
constexpr int kGranularityMinimum = 0;
constexpr int kAccessReadWrite = 3;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kStreamNonBlocking = 1;
constexpr int kCaptureStatusNone = 0;
constexpr int kCaptureModeGlobal = 0;
constexpr int kCaptureModeRelaxed = 2;

struct Location {
  int type = kLocationDevice;
  int id = 0;  // the device ordinal
};

// CUmemAllocationProp.
struct AllocationProperties {
  int type = kAllocationPinned;
  int requested_handle_types = kHandleNone;
  Location location{};
  void* win32_metadata = nullptr;
  struct Flags {
    unsigned char compression = 0;
    unsigned char gpu_direct_rdma = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags{};
};

// CUmemAccessDesc.
struct AccessDescription {
  Location location{};
  int flags = kAccessReadWrite;
};

// Members are named after the functions, less the "cu".
struct Api {
  ResultCode (*init)(unsigned flags);
  ResultCode (*driver_get_version)(int* version);
  ResultCode (*get_error_name)(ResultCode error, const char** name);
  ResultCode (*device_get)(Device* device, int ordinal);
  ResultCode (*device_get_count)(int* count);
  ResultCode (*device_get_name)(char* name, int length, Device device);
  ResultCode (*device_total_mem)(std::size_t* bytes, Device device);
  ResultCode (*device_get_attribute)(int* value, int attribute, Device device);
  ResultCode (*device_can_access_peer)(int* is_possible, Device device, Device peer);

  ResultCode (*device_primary_ctx_retain)(ContextHandle* context, Device device);
  ResultCode (*device_primary_ctx_release)(Device device);
  ResultCode (*ctx_get_current)(ContextHandle* context);
  ResultCode (*ctx_push_current)(ContextHandle context);
  ResultCode (*ctx_pop_current)(ContextHandle* context);
  ResultCode (*ctx_synchronize)();
  ResultCode (*ctx_record_event)(ContextHandle context, EventHandle event);  // null before 12.5
  ResultCode (*thread_exchange_stream_capture_mode)(int* mode);

  ResultCode (*mem_get_info)(std::size_t* free, std::size_t* total);
  ResultCode (*mem_get_allocation_granularity)(std::size_t* granularity,
                                               const AllocationProperties* properties, int option);
  ResultCode (*mem_address_reserve)(DevicePointer* address, std::size_t size, std::size_t alignment,
                                    DevicePointer hint, unsigned long long flags);
  ResultCode (*mem_address_free)(DevicePointer address, std::size_t size);
  ResultCode (*mem_create)(AllocationHandle* handle, std::size_t size,
                           const AllocationProperties* properties, unsigned long long flags);
  ResultCode (*mem_release)(AllocationHandle handle);
  ResultCode (*mem_map)(DevicePointer address, std::size_t size, std::size_t offset,
                        AllocationHandle handle, unsigned long long flags);
  ResultCode (*mem_unmap)(DevicePointer address, std::size_t size);
  ResultCode (*mem_set_access)(DevicePointer address, std::size_t size,
                               const AccessDescription* descriptions, std::size_t count);
  ResultCode (*memset_d32_async)(DevicePointer address, unsigned value, std::size_t count,
                                 StreamHandle stream);
  ResultCode (*memcpy_dtoh_async)(void* to, DevicePointer from, std::size_t size,
                                  StreamHandle stream);

  ResultCode (*event_create)(EventHandle* event, unsigned flags);
  ResultCode (*event_destroy)(EventHandle event);
  ResultCode (*event_record)(EventHandle event, StreamHandle stream);
  ResultCode (*event_query)(EventHandle event);

  ResultCode (*stream_create)(StreamHandle* stream, unsigned flags);
  ResultCode (*stream_destroy)(StreamHandle stream);
  ResultCode (*stream_synchronize)(StreamHandle stream);
  ResultCode (*stream_wait_event)(StreamHandle stream, EventHandle event, unsigned flags);
  ResultCode (*stream_get_id)(StreamHandle stream, unsigned long long* id);  // null before 12.0
  ResultCode (*stream_is_capturing)(StreamHandle stream, int* status);
  ResultCode (*stream_begin_capture)(StreamHandle stream, int mode);
  ResultCode (*stream_end_capture)(StreamHandle stream, GraphHandle* graph);
  ResultCode (*graph_destroy)(GraphHandle graph);
};

// What loading came to: a table that can be called, or the reason why there is none. Trivially
// destructible, so nothing runs at exit.
struct LoadedApi {
  Api api{};               // where cuInit failed it is complete too; else what is missing is null
  bool is_loaded = false;  // complete, and cuInit succeeded
  std::array<char, 256> error{};
};

// Opens the library and calls cuInit once in the process; later calls return the same answer.
const LoadedApi& load_cuda();

// The core's word for a result; success is ok.
Status to_status(ResultCode result, const char* call);

}  // namespace vramx::cuda
