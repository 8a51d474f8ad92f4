// What a replay asks of an allocator: allocate, free, and say what is held from the driver.
//
// Implemented by the models of torch's two own allocators (native_model, expandable_model), which
// decide as torch 2.11 does but own no memory: a device is a capacity and a cost table. The replay
// loop has validated the trace, so ids and frees are trusted here. One model belongs to one thread.
// An event costs a few ordered-set operations, O(log free blocks).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/driver.h"
#include "core/units.h"
#include "driver/cost_table.h"

namespace vramx::replay {

enum class AllocateResult : std::uint8_t { kOk, kOutOfMemory };

class AllocatorModel {
 public:
  AllocatorModel() = default;
  AllocatorModel(const AllocatorModel&) = delete;
  AllocatorModel& operator=(const AllocatorModel&) = delete;
  virtual ~AllocatorModel() = default;

  // Ids are dense, from 0, below ModelOptions::id_count, and each is allocated once.
  virtual AllocateResult allocate(std::uint32_t id, Bytes size, std::uint8_t stream) = 0;
  // Only of ids that were allocated and not yet freed.
  virtual void free(std::uint32_t id) = 0;
  // The time of the trace at which what follows is called.
  virtual void set_time(std::uint32_t) {}
  // The GPU has finished with what was freed up to this time of the trace, and with nothing since.
  virtual void finish_until(std::uint32_t) {}

  // Held from the driver now.
  virtual Bytes reserved() const = 0;
  // The most that blocks in use had together, each with what it is larger than its request by.
  virtual Bytes peak_allocated() const = 0;
  // Modelled. The native model counts cudaMalloc as create and cudaFree as release.
  virtual DriverCalls driver_calls() const = 0;
  // Times that cached memory was given back to the driver and the request tried again.
  virtual std::uint64_t retries() const = 0;

  // Recomputes the invariants: the first broken one, or empty. O(blocks).
  virtual std::string check() const { return {}; }
};

struct ModelOptions {
  // What torch.cuda.set_per_process_memory_fraction would allow; the default is no limit. Torch
  // compares it with the segment that a request calls for, so an expandable model, which maps whole
  // handles, can hold up to one handle more than this.
  Bytes capacity{UINT64_MAX};
  std::uint64_t id_count = 0;
  const CostTable* costs = &CostTable::h200();  // outlives the model
};

// torch's caching allocator as it comes.
std::unique_ptr<AllocatorModel> make_native_model(const ModelOptions& options);
// The same with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
std::unique_ptr<AllocatorModel> make_expandable_model(const ModelOptions& options);

}  // namespace vramx::replay
