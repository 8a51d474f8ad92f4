// Puts torch's CPU tensors on the core, so that real models train through the core without a
// GPU.
//
// It replaces torch's allocator for the CPU and links libc10 alone. Tensors made before it was
// installed go back to the allocator that made them, since a tensor carries its deleter; tensors
// made while it was installed go back to the core, which has to outlive them. It can poison memory
// and plant the defects that a comparison of two runs has to notice. All work of the CPU is
// immediate, so everything is on device 0 and the default stream. Thread-safe. Poison costs two
// writes of each block, the rest what the core costs.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>

#include "process/allocators.h"

namespace vramx::cpu_torch {
namespace {

constexpr std::uint8_t kPriority = 200;  // above every allocator that torch registers itself
// All bits set: not a number in every floating-point type, -1 as an index.
constexpr int kPoison = 0xFF;
// Small tensors are mostly scalars and counters; a defect there could go unnoticed for a while.
constexpr std::size_t kSmallestVictim = 16 << 10;

enum class Defect : std::int32_t { kNone, kEarlyFree, kSharedAddress };

// What went through the core, for the test that training really ran on it.
struct Counts {
  std::uint64_t blocks = 0;
  std::uint64_t bytes = 0;
  std::uint64_t frees = 0;
  std::uint64_t refused_frees = 0;
  std::uint64_t defects = 0;  // planted
};

class CoreAllocator final : public c10::Allocator {
 public:
  CoreAllocator(Allocators& core, bool has_poison) : core_(core), has_poison_(has_poison) {}

  c10::DataPtr allocate(std::size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }

  // From now on every `period`-th block of kSmallestVictim or more is handed out wrongly.
  void plant(Defect defect, std::uint64_t period);
  Counts counts() const;

 private:
  static void give_back(void* data);
  static void leave_alone(void*) {}

  void* take(std::size_t size);
  void free(void* data);
  c10::DataPtr wrap(void* data, c10::DeleterFnPtr deleter) const {
    return {data, data, deleter, c10::Device(c10::kCPU)};
  }
  c10::DataPtr allocate_wrongly(std::size_t size);

  Allocators& core_;
  const bool has_poison_;
  std::atomic<std::uint64_t> blocks_{0};
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint64_t> frees_{0};
  std::atomic<std::uint64_t> refused_frees_{0};
  std::atomic<std::uint64_t> defects_{0};

  std::atomic<bool> has_defect_{false};
  std::mutex mutex_;  // of what follows
  Defect defect_ = Defect::kNone;
  std::uint64_t period_ = 1;
  std::uint64_t candidates_ = 0;
  void* latest_ = nullptr;  // the last block handed out that was large enough, while it lives
  std::size_t latest_size_ = 0;
};

// Never destroyed: torch keeps the pointer, and a deleter knows no other way back to the core.
CoreAllocator* installed = nullptr;

Address address_of(void* data) { return {reinterpret_cast<std::uint64_t>(data)}; }

c10::DataPtr CoreAllocator::allocate(std::size_t size) {
  if (size == 0) return wrap(nullptr, &give_back);
  if (has_defect_) return allocate_wrongly(size);
  return wrap(take(size), &give_back);
}

c10::DataPtr CoreAllocator::allocate_wrongly(std::size_t size) {
  if (size < kSmallestVictim) return wrap(take(size), &give_back);
  const std::scoped_lock lock(mutex_);
  const bool is_due = ++candidates_ % period_ == 0;
  if (is_due && defect_ == Defect::kSharedAddress && latest_ != nullptr && size <= latest_size_) {
    ++defects_;
    return wrap(latest_, &leave_alone);
  }
  latest_ = take(size);
  latest_size_ = size;
  if (!is_due || defect_ != Defect::kEarlyFree) return wrap(latest_, &give_back);
  ++defects_;
  free(latest_);
  return wrap(std::exchange(latest_, nullptr), &leave_alone);
}

void* CoreAllocator::take(std::size_t size) {
  Address address{};
  const CoreCode code = core_.allocate(0, {size}, Stream::kDefault, &address);
  if (code != CoreCode::kOk) {
    TORCH_CHECK_WITH(OutOfMemoryError, code != CoreCode::kOutOfMemory, core_.out_of_memory_text());
    TORCH_CHECK(false, core_.failure_text());
  }
  void* const data = reinterpret_cast<void*>(address.value);
  if (has_poison_) std::memset(data, kPoison, size);
  ++blocks_;
  bytes_ += size;
  return data;
}

void CoreAllocator::free(void* data) {
  CoreBlock block;
  if (has_poison_ && core_.find(address_of(data), &block) == CoreCode::kOk) {
    std::memset(data, kPoison, block.size.count);
  }
  const CoreCode code = core_.free(address_of(data), nullptr);
  ++(code == CoreCode::kOk ? frees_ : refused_frees_);
}

void CoreAllocator::give_back(void* data) {
  if (data == nullptr) return;
  if (installed->has_defect_) {
    const std::scoped_lock lock(installed->mutex_);
    if (data == installed->latest_) installed->latest_ = nullptr;
  }
  installed->free(data);
}

void CoreAllocator::plant(Defect defect, std::uint64_t period) {
  const std::scoped_lock lock(mutex_);
  defect_ = defect;
  period_ = period;
  has_defect_ = defect != Defect::kNone;
}

Counts CoreAllocator::counts() const { return {blocks_, bytes_, frees_, refused_frees_, defects_}; }

}  // namespace
}  // namespace vramx::cpu_torch

extern "C" {

// Once in a process, before other threads allocate. 0: done; 1: there is one already; 2: the core
// is of another version.
int vramx_cpu_install(const vramx::AllocatorsHandle* core, int has_poison) {
  using vramx::cpu_torch::installed;
  if (installed != nullptr) return 1;
  if (!core->fits()) return 2;
  installed = new vramx::cpu_torch::CoreAllocator(*core->allocators, has_poison != 0);
  c10::SetAllocator(c10::kCPU, installed, vramx::cpu_torch::kPriority);
  return 0;
}

// New tensors are torch's own again; those that are there still go back to the core.
void vramx_cpu_leave() {
  c10::SetAllocator(c10::kCPU, c10::GetDefaultCPUAllocator(), vramx::cpu_torch::kPriority);
}

void vramx_cpu_plant(std::int32_t defect, std::uint64_t period) {
  vramx::cpu_torch::installed->plant(static_cast<vramx::cpu_torch::Defect>(defect), period);
}

void vramx_cpu_counts(vramx::cpu_torch::Counts* counts) {
  *counts = vramx::cpu_torch::installed->counts();
}

}  // extern "C"
