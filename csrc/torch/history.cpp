#include "torch/history.h"

#include <algorithm>

#include "torch/native_scope.h"

namespace vramx {
namespace {

struct Labels {
  std::vector<std::string> compile_contexts;
  std::string user_metadata;
};

// Made when a thread first sets a label and never destroyed: tensors are freed, and events
// recorded, in the very last moments of a process.
thread_local Labels* labels = nullptr;

Labels& own_labels() {
  if (labels == nullptr) labels = new Labels;
  return *labels;
}

std::set<TraceEntry::Action> actions_of(const std::vector<std::string>& names) {
  static constexpr std::pair<const char*, TraceEntry::Action> kNames[] = {
      {"alloc", TraceEntry::ALLOC},
      {"free_requested", TraceEntry::FREE_REQUESTED},
      {"free_completed", TraceEntry::FREE_COMPLETED},
      {"segment_alloc", TraceEntry::SEGMENT_ALLOC},
      {"segment_free", TraceEntry::SEGMENT_FREE},
      {"segment_map", TraceEntry::SEGMENT_MAP},
      {"segment_unmap", TraceEntry::SEGMENT_UNMAP},
      {"snapshot", TraceEntry::SNAPSHOT},
      {"oom", TraceEntry::OOM},
#if VRAMX_TORCH >= 214
      {"annotate", TraceEntry::ANNOTATE},
#endif
  };
  std::set<TraceEntry::Action> actions;
  for (const auto& [name, action] : kNames) {
    if (std::find(names.begin(), names.end(), name) != names.end()) actions.insert(action);
  }
  return actions;
}

// Fields that a release adds after those named here have defaults.
TraceEntry entry_of(const HistoryEvent& event, const Context& context) {
  const c10::approx_time_t now = c10::getApproximateTime();
#if VRAMX_TORCH < 208
  return {event.action, event.device, event.address, event.size, event.stream, now, context};
#else
  const bool is_compiled = labels != nullptr && !labels->compile_contexts.empty();
  const std::string compiled = is_compiled ? labels->compile_contexts.back() : "N/A";
  TraceEntry entry(event.action, event.device, event.address, event.size, event.stream,
                   MempoolId_t{0, 0}, now, context, compiled);
#if VRAMX_TORCH >= 210
  if (labels != nullptr) entry.user_metadata_ = labels->user_metadata;
#endif
  return entry;
#endif
}

}  // namespace

// Contexts of a history that ends are dropped: while none is kept, nobody would hear that their
// blocks are freed, and another block would be found with them.
void History::configure(const HistorySettings& settings) {
  std::unordered_map<const void*, Context> dropped;
  const std::lock_guard lock(mutex_);
  is_enabled_.store(settings.is_enabled);
  recorder_.store(settings.is_enabled ? settings.recorder : nullptr);
  when_.store(settings.is_enabled ? settings.when : RecordContext::NEVER);
  max_entries_ = std::max<std::size_t>(settings.max_entries, 1);
  skipped_ = actions_of(settings.skipped);
  if (!settings.is_enabled || settings.clears) rings_.clear();
  if (!settings.is_enabled) dropped.swap(contexts_);
  for (auto& [device, ring] : rings_) {
    while (ring.size() > max_entries_) ring.pop_front();
  }
  update_flag();
}

void History::attach(Tracker tracker) {
  const std::lock_guard lock(mutex_);
  std::vector<Tracker> trackers = *trackers_;
  trackers.push_back(std::move(tracker));
  trackers_ = std::make_shared<const std::vector<Tracker>>(std::move(trackers));
  update_flag();
}

void History::update_flag() { flags_.set(Flag::kRecording, is_enabled() || !trackers_->empty()); }

Context History::gather(RecordContext level) const {
  if (when_.load(std::memory_order_relaxed) < level) return nullptr;
  if (NativeScope::is_active()) return nullptr;  // its lock is held, and this takes the GIL
  const torch_cuda::CreateContextFn recorder = recorder_.load();
  return recorder == nullptr ? nullptr : recorder();
}

void History::record(const HistoryEvent& event, const Context& context) {
  if (!flags_.has(Flag::kRecording)) return;
  const bool keeps_context = when_.load(std::memory_order_relaxed) >= RecordContext::ALLOC;
  add(entry_of(event, keeps_context ? context : nullptr));
}

#if VRAMX_TORCH >= 214
void History::annotate(const HistoryEvent& event, const std::string& text) {
  if (!flags_.has(Flag::kRecording)) return;
  TraceEntry entry = entry_of(event, gather(RecordContext::ALLOC));
  entry.user_metadata_ = text;
  add(std::move(entry));
}
#endif

void History::add(TraceEntry entry) {
  std::unique_lock lock(mutex_);
  const auto trackers = trackers_;
  lock.unlock();
  for (const Tracker& tracker : *trackers) tracker(entry);
  lock.lock();
  if (!is_enabled() || skipped_.contains(entry.action_)) return;
  std::deque<TraceEntry>& ring = rings_[entry.device_];
  ring.push_back(std::move(entry));
  if (ring.size() > max_entries_) ring.pop_front();
}

void History::remember(const void* pointer, const Context& context) {
  if (context == nullptr) return;
  const std::lock_guard lock(mutex_);
  if (is_enabled()) contexts_[pointer] = context;
}

void History::forget(const void* pointer) {
  const std::lock_guard lock(mutex_);
  contexts_.erase(pointer);
}

Context History::context_of(const void* pointer) const {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(pointer);
  return found == contexts_.end() ? nullptr : found->second;
}

std::vector<TraceEntry> History::entries(DeviceIndex device) const {
  const std::lock_guard lock(mutex_);
  const auto found = rings_.find(device);
  if (found == rings_.end()) return {};
  return {found->second.begin(), found->second.end()};
}

void History::push_compile_context(const std::string& label) {
  if (is_enabled()) own_labels().compile_contexts.push_back(label);
}

void History::pop_compile_context() {
  if (is_enabled() && labels != nullptr && !labels->compile_contexts.empty()) {
    labels->compile_contexts.pop_back();
  }
}

void History::set_user_metadata(const std::string& text) { own_labels().user_metadata = text; }

std::string History::user_metadata() { return own_labels().user_metadata; }

}  // namespace vramx
