// The history of the core's blocks, as torch.cuda.memory._record_memory_history asks for it: a ring
// of events for each device, the stack trace behind each live block, and the trackers that hear of
// events as they happen. What torch's own allocator does, it records itself.
//
// Thread-safe. Trackers and the stack recorder are called without the lock: the recorder takes the
// GIL. Nothing is kept, and the hot path never comes here, while no history is kept and no tracker
// listens. With a history an event costs what its stack trace costs.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "torch/core.h"
#include "torch/flags.h"

namespace vramx {

using Tracker = torch_cuda::AllocatorTraceTracker;
using RecordContext = torch_cuda::RecordContext;

struct HistorySettings {
  bool is_enabled = false;
  torch_cuda::CreateContextFn recorder = nullptr;
  std::size_t max_entries = 1;
  RecordContext when = RecordContext::NEVER;
  bool clears = true;
  std::vector<std::string> skipped;  // actions, as torch names them in a snapshot
};

struct HistoryEvent {
  TraceEntry::Action action;
  DeviceIndex device;
  std::size_t address;
  std::size_t size;
  cudaStream_t stream = nullptr;
};

class History {
 public:
  explicit History(Flags& flags) : flags_(flags) {}

  void configure(const HistorySettings& settings);
  bool is_enabled() const { return is_enabled_.load(std::memory_order_relaxed); }
  void attach(Tracker tracker);

  // The calling thread's stack trace, if blocks of this level get one. Takes the GIL.
  Context gather(RecordContext level) const;
  void record(const HistoryEvent& event, const Context& context);
#if VRAMX_TORCH >= 214
  // The same, with a text of its own instead of the thread's label, and a stack trace of this call.
  void annotate(const HistoryEvent& event, const std::string& text);
#endif

  // The stack trace behind a live block.
  void remember(const void* pointer, const Context& context);
  void forget(const void* pointer);
  Context context_of(const void* pointer) const;

  // Times are still the approximate clock's.
  std::vector<TraceEntry> entries(DeviceIndex device) const;

  // Labels of the calling thread, put on its events from then on.
  void push_compile_context(const std::string& label);
  void pop_compile_context();
  static void set_user_metadata(const std::string& text);
  static std::string user_metadata();

 private:
  void add(TraceEntry entry);
  void update_flag();  // under the lock

  Flags& flags_;  // kRecording is set while is_enabled_ or there is a tracker
  std::atomic<bool> is_enabled_{false};
  std::atomic<torch_cuda::CreateContextFn> recorder_{nullptr};
  std::atomic<RecordContext> when_{RecordContext::NEVER};

  mutable std::mutex mutex_;
  std::size_t max_entries_ = 1;
  std::set<TraceEntry::Action> skipped_;
  std::unordered_map<DeviceIndex, std::deque<TraceEntry>> rings_;
  std::unordered_map<const void*, Context> contexts_;
  std::shared_ptr<const std::vector<Tracker>> trackers_ =
      std::make_shared<const std::vector<Tracker>>();
};

}  // namespace vramx
