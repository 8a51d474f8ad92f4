// A core that does nothing but note what a shim tells and asks it; its blocks are host memory.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "process/allocators.h"

namespace vramx::stub {

class RecordingCore final : public Allocators {
 public:
  std::vector<std::string> journal;
  mutable int finds = 0;
  const Surroundings* surroundings = nullptr;
  AllocatorsHandle handle{.allocators = this};

  CoreCode allocate(int, Bytes size, Stream, Address* address) override {
    *address = {reinterpret_cast<std::uintptr_t>(std::malloc(size.count))};
    return CoreCode::kOk;
  }
  CoreCode free(Address address, CoreBlock*) override {
    std::free(reinterpret_cast<void*>(address.value));
    return CoreCode::kOk;
  }
  CoreCode record_stream(Address, StreamName stream, bool is_lasting) override {
    journal.push_back("stream " + std::to_string(static_cast<std::uint64_t>(stream.handle)) +
                      " of device " + std::to_string(stream.device) +
                      (is_lasting ? ", lasting" : ""));
    return CoreCode::kOk;
  }
  CoreCode find(Address address, CoreBlock* block) const override {
    ++finds;
    *block = {address, {512}, {512}, Stream::kDefault, 0};
    return CoreCode::kOk;
  }
  void trim(int) override {}
  CoreReport defragment(int) override { return {}; }
  void set_limit(int, Bytes) override {}
  void add_relief(Relieve, void*) override {}
  Bytes held(int) const override { return {}; }
  Bytes allocated(int) const override { return {}; }
  Bytes largest_obtainable(int) override { return {}; }
  AllocatorStats stats(int) const override { return {}; }
  AllocatorStats take_interval_stats(int) override { return {}; }
  void reset_peak_stats(int) override {}
  void reset_accumulated_stats(int) override {}
  void for_each_piece(int, Visit, void*) const override {}
  void set_observer(Observe, void*) override {}
  void set_surroundings(const Surroundings* told) override { surroundings = told; }
  const char* out_of_memory_text() const override { return ""; }
  const char* failure_text() const override { return ""; }
  bool is_in_child() const override { return false; }
  void note_use() override {}
  CoreCode allow_peer(int, int) override { return CoreCode::kOk; }
};

}  // namespace vramx::stub
