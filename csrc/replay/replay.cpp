#include "replay/replay.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>

namespace vramx::replay {
namespace {

constexpr Bytes kChunk{2 << 20};
// Between two looks at the progress callback.
constexpr std::size_t kSlice = 16384;

// What streams have freed and the GPU has not finished with, by stream.
class InFlightWork {
 public:
  explicit InFlightWork(std::uint32_t lag_us) : lag_us_(lag_us) {}

  // Returns until when the GPU is done by now.
  std::optional<std::uint32_t> go_to(std::uint32_t now_us) {
    while (!frees_.empty() && frees_.front().time_us + std::uint64_t{lag_us_} <= now_us) {
      by_stream_[frees_.front().stream] -= frees_.front().size;
      sum_ -= frees_.front().size;
      frees_.pop_front();
    }
    if (now_us < lag_us_) return {};
    return now_us - lag_us_;
  }
  void add(const Event& free) {
    frees_.push_back({free.time_us, free.stream, free.size});
    by_stream_[free.stream] += free.size;
    sum_ += free.size;
  }
  Bytes of_others(std::uint8_t stream) const { return sum_ - by_stream_[stream]; }

 private:
  struct Free {
    std::uint32_t time_us = 0;
    std::uint8_t stream = 0;
    Bytes size;
  };
  const std::uint32_t lag_us_;
  std::deque<Free> frees_;
  std::array<Bytes, 256> by_stream_{};
  Bytes sum_{};
};

// What no allocator can go below: holds the live bytes and nothing else.
class LiveModel final : public AllocatorModel {
 public:
  explicit LiveModel(const ModelOptions& options)
      : capacity_(options.capacity), sizes_(options.id_count) {}

  AllocateResult allocate(std::uint32_t id, Bytes size, std::uint8_t) override {
    if (live_ + size > capacity_) return AllocateResult::kOutOfMemory;
    sizes_[id] = size;
    live_ += size;
    peak_ = max(peak_, live_);
    return AllocateResult::kOk;
  }
  void free(std::uint32_t id) override { live_ -= sizes_[id]; }
  Bytes reserved() const override { return live_; }
  Bytes peak_allocated() const override { return peak_; }
  DriverCalls driver_calls() const override { return {}; }
  std::uint64_t retries() const override { return 0; }

 private:
  const Bytes capacity_;
  std::vector<Bytes> sizes_;
  Bytes live_{};
  Bytes peak_{};
};

Result<std::unique_ptr<AllocatorModel>> make_model(const Trace& trace, const RunOptions& options) {
  if (options.policy == Policy::kVramx) {
    auto core =
        CoreModel::open({options.capacity, trace.id_count(), options.device, options.ordinal,
                         options.pattern_streams, options.gpu_lag_us.has_value()});
    if (!core.ok()) return core.status();
    return std::unique_ptr<AllocatorModel>(std::move(core.value()));
  }
  const ModelOptions model{.capacity = options.capacity, .id_count = trace.id_count()};
  if (options.policy == Policy::kNative) return make_native_model(model);
  if (options.policy == Policy::kExpandable) return make_expandable_model(model);
  return std::unique_ptr<AllocatorModel>(std::make_unique<LiveModel>(model));
}

class Run {
 public:
  Run(const Trace& trace, const RunOptions& options, AllocatorModel& model)
      : trace_(trace), options_(options), model_(model) {}

  RunResult take() {
    const auto& events = trace_.events();
    for (std::size_t begin = 0; begin < events.size() && !is_over(); begin += kSlice) {
      const std::size_t end = std::min(begin + kSlice, events.size());
      const auto started = std::chrono::steady_clock::now();
      const bool is_watched = options_.samples != 0 || options_.gpu_lag_us.has_value();
      is_watched ? play<true>(begin, end) : play<false>(begin, end);
      busy_ns_ += static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                          std::chrono::steady_clock::now() - started)
                                          .count());
      if (options_.progress && !options_.progress(end, events.size())) result_.is_stopped = true;
    }
    finish();
    return std::move(result_);
  }

 private:
  bool is_over() const { return result_.is_out_of_memory || result_.is_stopped; }

  template <bool kIsWatched>
  void play(std::size_t begin, std::size_t end) {
    const std::uint32_t half_us = trace_.span_us() / 2;
    for (std::size_t i = begin; i < end; ++i) {
      const Event& event = trace_.events()[i];
      if (!is_second_half_ && event.time_us > half_us) enter_second_half();
      if constexpr (kIsWatched) go_to(event);
      if (event.kind == Event::Kind::kFree) {
        model_.free(event.id);
        if constexpr (kIsWatched) note_free(event);
      } else {
        if (model_.allocate(event.id, event.size, event.stream) != AllocateResult::kOk) {
          result_.is_out_of_memory = true;
          result_.out_of_memory_event = event.index;
          return;
        }
        if constexpr (kIsWatched) note_allocation(event);
        result_.peak_reserved = max(result_.peak_reserved, model_.reserved());
      }
      ++done_;
      if constexpr (kIsWatched) sample(i, event);
    }
  }

  void go_to(const Event& event) {
    if (!options_.gpu_lag_us) return;
    model_.set_time(event.time_us);
    if (const auto done_us = in_flight_.go_to(event.time_us)) model_.finish_until(*done_us);
  }
  void note_free(const Event& event) {
    live_ -= event.size;
    if (options_.gpu_lag_us) in_flight_.add(event);
  }
  void note_allocation(const Event& event) {
    live_ += event.size;
    result_.peak_in_use = max(result_.peak_in_use, live_ + in_flight_.of_others(event.stream));
  }

  void enter_second_half() {
    is_second_half_ = true;
    first_half_ = model_.driver_calls();
  }

  void sample(std::size_t i, const Event& event) {
    if (options_.samples == 0) return;
    Timeline& line = result_.timeline;
    const std::size_t bucket = i * options_.samples / trace_.events().size();
    if (bucket >= line.time_us.size()) {
      line.time_us.resize(bucket + 1, event.time_us);
      line.live.resize(bucket + 1, live_);
      line.reserved.resize(bucket + 1, model_.reserved());
    }
    line.live[bucket] = max(line.live[bucket], live_);
    line.reserved[bucket] = max(line.reserved[bucket], model_.reserved());
  }

  void finish() {
    result_.ns_per_event = done_ == 0 ? 0.0 : busy_ns_ / static_cast<double>(done_);
    result_.calls = model_.driver_calls();
    result_.peak_allocated = model_.peak_allocated();
    if (!is_second_half_) first_half_ = result_.calls;
    result_.driver_us_second_half = result_.calls.total_us - first_half_.total_us;
    result_.calls_second_half = result_.calls.total() - first_half_.total();
    result_.retries = model_.retries();
    if (const auto* core = dynamic_cast<const CoreModel*>(&model_)) {
      result_.mismatches = core->mismatches();
      result_.waits = static_cast<std::uint64_t>(core->stats().num_cross_stream);
      result_.host_bytes = static_cast<std::uint64_t>(core->stats().host_bytes);
    }
  }

  const Trace& trace_;
  const RunOptions& options_;
  AllocatorModel& model_;
  RunResult result_;
  Bytes live_{};
  InFlightWork in_flight_{options_.gpu_lag_us.value_or(0)};
  std::uint64_t done_ = 0;
  double busy_ns_ = 0.0;
  bool is_second_half_ = false;
  DriverCalls first_half_;
};

}  // namespace

RunResult run(const Trace& trace, const RunOptions& options) {
  Result<std::unique_ptr<AllocatorModel>> model = make_model(trace, options);
  if (!model.ok()) {
    RunResult failed;
    failed.status = model.status();
    return failed;
  }
  return Run(trace, options, *model.value()).take();
}

Capacity min_capacity(const Trace& trace, const RunOptions& options) {
  RunOptions attempt = options;
  attempt.samples = 0;
  attempt.capacity = Bytes{UINT64_MAX};
  const RunResult free_run = run(trace, attempt);
  if (!free_run.status.ok() || free_run.is_stopped) {
    return {free_run.status, free_run.is_stopped, Bytes{}};
  }
  if (options.policy == Policy::kLive) return {ok_status(), false, trace.peak_live()};
  Bytes low = round_down(trace.peak_live(), kChunk);      // too little, or just enough
  Bytes high = round_up(free_run.peak_reserved, kChunk);  // runs
  // An allocator decides otherwise near a limit, so what it took without one may not do.
  for (attempt.capacity = high; run(trace, attempt).is_out_of_memory; attempt.capacity = high) {
    low = high;
    high = round_up(high + Bytes{high.count / 64}, kChunk);
  }
  while (high - low > kChunk) {
    attempt.capacity = round_down(Bytes{low.count + (high - low).count / 2}, kChunk);
    const RunResult result = run(trace, attempt);
    if (result.is_stopped) return {ok_status(), true, Bytes{}};
    (result.is_out_of_memory ? low : high) = attempt.capacity;
  }
  return {ok_status(), false, high};
}

Result<std::vector<Placed>> layout_after(const Trace& trace, std::size_t event) {
  const auto model = CoreModel::open({.id_count = trace.id_count()});
  if (!model.ok()) return model.status();
  for (std::size_t i = 0; i <= event && i < trace.events().size(); ++i) {
    const Event& each = trace.events()[i];
    if (each.kind == Event::Kind::kFree) {
      model.value()->free(each.id);
    } else if (model.value()->allocate(each.id, each.size, each.stream) != AllocateResult::kOk) {
      return Status{StatusCode::kOutOfMemory, 0, "layout"};
    }
  }
  return model.value()->layout();
}

}  // namespace vramx::replay
