// The core as this layer calls it: its table of C functions, with torch's types in the signatures.
//
// No state but a copy of the table, whose functions stay valid for the life of the process, and no
// logic. Every call is one jump through the table.
#pragma once

#include <cstdint>

#include "process/core_table.h"
#include "torch/torch_api.h"

namespace vramx {

class Core {
 public:
  explicit Core(const CoreTable& table) : table_(table) {}

  CoreCode allocate(DeviceIndex device, std::size_t size, cudaStream_t stream,
                    void** pointer) const {
    Address address;
    const CoreCode code =
        table_.allocate(table_.self, device, Bytes{size}, stream_of(stream), &address);
    if (code == CoreCode::kOk) *pointer = reinterpret_cast<void*>(address.value);
    return code;
  }
  CoreCode free(const void* pointer) const {
    return table_.free(table_.self, address_of(pointer), nullptr);
  }
  CoreCode record_stream(const void* pointer, cudaStream_t stream) const {
    return table_.record_stream(table_.self, address_of(pointer), stream_of(stream));
  }
  CoreCode find(const void* pointer, CoreBlock* block) const {
    return table_.find(table_.self, address_of(pointer), block);
  }
  bool owns(const void* pointer) const {
    CoreBlock block;
    return find(pointer, &block) == CoreCode::kOk;
  }

  void trim(DeviceIndex device) const { table_.trim(table_.self, device); }
  void set_limit(int device, std::uint64_t bytes) const {
    table_.set_limit(table_.self, device, Bytes{bytes});
  }
  void add_relief(void (*relieve)(void*, std::int32_t), void* context) const {
    table_.add_relief(table_.self, relieve, context);
  }
  void set_observer(void (*observe)(void*, const CoreEvent&), void* context) const {
    table_.set_observer(table_.self, observe, context);
  }

  std::uint64_t held(int device) const { return table_.held(table_.self, device).count; }
  std::uint64_t allocated(int device) const { return table_.allocated(table_.self, device).count; }
  std::uint64_t largest_obtainable(int device) const {
    return table_.largest_obtainable(table_.self, device).count;
  }
  AllocatorStats stats(DeviceIndex device) const { return table_.stats(table_.self, device); }
  void reset_peak_stats(DeviceIndex device) const { table_.reset_peak_stats(table_.self, device); }
  void reset_accumulated_stats(DeviceIndex device) const {
    table_.reset_accumulated_stats(table_.self, device);
  }
  void for_each_piece(DeviceIndex device, void (*visit)(void*, const CorePiece&),
                      void* context) const {
    table_.for_each_piece(table_.self, device, visit, context);
  }
  const char* out_of_memory_text() const { return table_.out_of_memory_text(table_.self); }
  const char* failure_text() const { return table_.failure_text(table_.self); }
  bool is_in_child() const { return table_.is_in_child(table_.self); }
  CoreCode allow_peer(DeviceIndex device, DeviceIndex peer) const {
    return table_.allow_peer(table_.self, device, peer);
  }

 private:
  static Address address_of(const void* pointer) {
    return {reinterpret_cast<std::uintptr_t>(pointer)};
  }
  static Stream stream_of(cudaStream_t stream) {
    return static_cast<Stream>(reinterpret_cast<std::uintptr_t>(stream));
  }

  const CoreTable table_;
};

}  // namespace vramx
