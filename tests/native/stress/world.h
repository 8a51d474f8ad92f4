// One simulated device with one allocator on it, driven step by step, and everything that must hold
// after each step.
//
// After every step: the address is aligned and accessible, no unit of memory has two owners, work
// that used memory before comes before the work that gets it now, nothing is unmapped or released
// under work, the statistics equal a count of our own, a free makes no driver call, the host waits
// in trim and defragment alone, a failed request leaves what is held unchanged, and memory runs out
// only where it had to (oracle.cpp says when it need not). Every now and then: check() of the
// allocator and of the device. The first claim that fails is kept; later steps do nothing.
//
// Of a step that others came in the middle of, and of those, the same holds, but for what is said
// of what is held and of what might have been had: meanwhile.cpp. Not thread-safe. A step costs a
// few microseconds plus a memory access for each 512 bytes of a block.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/device_allocator.h"
#include "driver/sim_driver.h"
#include "stress/interrupted_driver.h"
#include "stress/layered_driver.h"
#include "stress/scenario.h"
#include "stress/shadow.h"
#include "stress/streams.h"

namespace vramx::stress {

// What a request takes: whole units, at least one.
constexpr Bytes rounded(Bytes requested) {
  return round_up(max(requested, kBlockUnit), kBlockUnit);
}

// How often each path was taken: what a run has to have seen.
struct Coverage {
  std::int64_t steps = 0;
  std::int64_t allocations = 0;
  std::int64_t ooms = 0;
  std::int64_t judged_ooms = 0;  // of which the oracle had a say
  std::int64_t retries = 0;
  std::int64_t growths = 0;
  std::int64_t failed_growths = 0;
  std::int64_t stitches = 0;
  std::int64_t alias_hits = 0;
  std::int64_t cross_stream = 0;
  std::int64_t chunks_released = 0;
  std::int64_t aliases_collected = 0;
  std::int64_t faults = 0;
  std::int64_t captures = 0;
  std::int64_t streams_replaced = 0;
  std::int64_t meanwhile = 0;  // steps in the middle of another's driver call
  std::int64_t paused = 0;     // of which it went on before they were done

  void add(const Coverage& other);
  std::string text() const;
  bool is_complete() const;  // every path was taken
};

class World final : private ObservedDriver::Listener, private InterruptedDriver::Listener {
 public:
  explicit World(const Setup& setup);
  ~World();

  void apply(const Step& step);
  // Frees everything, lets all work run, asks for all of it at once, trims, and destroys the
  // allocator: the device must be empty then.
  void finish();

  const std::string& failure() const { return failure_; }
  Coverage coverage() const;
  // Equal for runs that placed the same blocks at the same addresses in the same order.
  std::uint64_t placement_hash() const { return placement_hash_; }

  // --- what a generator steers by ---------------------------------------------------------------
  std::vector<std::uint32_t> live_blocks() const;  // oldest first
  std::size_t live_count() const { return blocks_.size(); }
  Bytes live_bytes() const { return live_bytes_; }
  const Setup& setup() const { return setup_; }

  // --- for tests of one scenario ----------------------------------------------------------------
  SimDriver& sim() { return *sim_; }
  // After finish(), also where the device had refused to take something back: what is left.
  std::string leftovers() const;
  DeviceAllocator& allocator() { return *allocator_; }
  std::int64_t ooms() const { return seen_.ooms; }

 private:
  using Moment = InterruptedDriver::Moment;
  struct Block {
    Address address;
    Bytes requested;
    Bytes size;
    std::vector<PhysicalPiece> pieces;
    std::vector<std::uint32_t> lives;  // of the streams that use it, the allocation's first
  };
  struct Expected {
    PoolCounters allocation, allocated_bytes, requested_bytes;
  };

  void on_unmap(Address at, Bytes size) override;
  void on_chunk_gone(ChunkHandle chunk) override;
  void on_call_without_lock(CallKind call, Moment moment) override;

  // world.cpp
  void open();
  void fail(const std::string& claim);
  void require(bool holds, const char* claim);
  void allocate(const Step& step);
  void adopt(Address address, const Step& step);
  void free_block(std::uint32_t number);
  void free_nothing(const Step& step);
  bool relieve();
  Use use_of(const Block& block) const;
  void record_stream(const Step& step);
  void give_memory_back(const Step& step);
  void inject(const Step& step);
  StreamName name(std::uint32_t stream) const { return streams_->current(stream).name; }
  void take(const Step& step);
  void dispatch(const Step& step);

  // meanwhile.cpp
  bool may_come(const Step& step, CallKind call, Moment moment) const;
  void take_meanwhile(Step step, CallKind call, Moment moment);
  void pause_if_due();
  void go_on();
  bool are_others_in_flight() const { return is_meanwhile_ || is_paused_; }
  bool is_undisturbed() const { return !is_meanwhile_ && !is_interrupted_; }

  // bytes.cpp
  void stamp(const Block& block, std::uint32_t number);
  void check_stamps(const Block& block, std::uint32_t number);

  // oracle.cpp
  void check_counters();
  void check_books();
  void judge_out_of_memory(Bytes requested);
  bool may_judge() const;
  bool all_work_is_done() const;
  bool aliases_are_ample() const;
  Bytes room() const;
  std::vector<StreamPoint> later_work(const Step& step) const;
  void judge_waits(const Step& step, Bytes room, const std::vector<StreamPoint>& later);
  void count(Bytes requested, Bytes size, std::int64_t sign);

  // finish.cpp
  void finish_live_blocks();
  void ask_for_everything();

  const Setup setup_;
  std::unique_ptr<SimDriver> sim_;
  std::unique_ptr<DefectiveDriver> defective_;
  std::unique_ptr<ObservedDriver> driver_;
  std::unique_ptr<InterruptedDriver> interrupted_;
  std::unique_ptr<Shadow> shadow_;
  std::unique_ptr<Streams> streams_;
  std::unique_ptr<DeviceAllocator> allocator_;

  std::map<std::uint32_t, Block> blocks_;  // by number, hence oldest first
  Bytes limit_{UINT64_MAX};
  Bytes highest_limit_{UINT64_MAX};  // since the step began
  Bytes live_bytes_{};
  Expected expected_;
  Coverage seen_;  // what the allocator's own statistics do not count
  std::uint64_t faults_before_step_ = 0;
  ObservedDriver::Counts counts_before_step_;
  std::vector<Step> put_off_;
  bool is_meanwhile_ = false;    // a step is taken in the middle of another one
  bool is_interrupted_ = false;  // that has happened to this step
  bool is_paused_ = false;       // the other one has begun and waits for this one
  std::uint32_t chances_to_pause_ = 0;
  std::uint32_t paused_on_ = 0;  // the per-thread stream of its thread
  ObservedDriver::Counts paused_counts_;
  std::uint64_t placement_hash_ = 0;
  std::string failure_;
};

// Runs a scenario from start to end and returns the first claim that failed, or nothing.
std::string first_failure(const Scenario& scenario);

}  // namespace vramx::stress
