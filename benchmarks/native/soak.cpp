// A long run of an allocator through its interface: several programs at once, one a thread, each on
// a stream of its own, and a keeper that trims, defragments, lowers the limit and asks for the
// impossible.
//
// Started, looked at and finished from Python, which makes no call to the allocator meanwhile but
// those that look. Every free is compared with what was allocated; where a block's bytes can be
// reached from here, both of its ends carry a mark that nobody else may overwrite. A call costs
// what the interface costs and some 20 ns.
#include <malloc.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "core/config.h"
#include "process/allocators.h"
#include "soak_programs.h"

namespace vramx::soak {

// What Python asks for. `streams` has an entry for each thread.
struct Plan {
  std::uint64_t calls = 0;
  std::uint64_t live_bytes = 0;  // of all programs together, at most
  const std::uint64_t* streams = nullptr;
  std::uint32_t threads = 0;
  std::int32_t device = 0;
  std::uint32_t has_bytes = 0;         // addresses are this process's own
  std::uint32_t leaked_per_round = 0;  // bytes of host memory: a defect for tests
};

// What it sees meanwhile and at the end.
struct Progress {
  std::uint64_t calls = 0;  // allocate, free and record_stream
  std::uint64_t ooms = 0;
  std::uint64_t reliefs = 0;  // calls of the keeper
  std::uint64_t broken = 0;   // answers that were wrong, and marks that had changed
  std::uint64_t is_done = 0;
  // Peaks of the time before the keeper began.
  std::uint64_t undisturbed_live_bytes = 0;
  std::uint64_t undisturbed_reserved_bytes = 0;
};

namespace {

// What all threads of a run share. Blocks that were handed over are freed by whoever comes first.
struct Shared {
  Allocators& core;
  const Plan plan;
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> ooms{0};
  std::atomic<std::uint64_t> reliefs{0};
  std::atomic<std::uint64_t> broken{0};
  std::atomic<std::uint32_t> working{0};
  std::atomic<std::uint64_t> undisturbed_live{0};
  std::atomic<std::uint64_t> undisturbed_reserved{0};
  std::mutex mutex{};
  std::vector<Block> handed_over{};

  void require(bool holds) {
    if (!holds) ++broken;
  }
};

// One thread's way to the core.
class Client final : public Memory {
 public:
  Client(Shared& shared, std::uint32_t number)
      : shared_(shared), core_(shared.core), number_(number), random_(~std::uint64_t{number}) {}

  bool allocate(Bytes size, std::vector<Block>& into) override {
    ++calls_;
    Block block{{}, size, random_.next()};
    const CoreCode code =
        core_.allocate(shared_.plan.device, size, stream(number_), &block.address);
    if (code != CoreCode::kOk) {
      shared_.require(code == CoreCode::kOutOfMemory);
      ++shared_.ooms;
      return false;
    }
    shared_.require(block.address.value % 512 == 0);
    if (has_marks(block)) first_word(block) = last_word(block) = block.mark;
    into.push_back(block);
    return true;
  }

  void free(const Block& block) override {
    ++calls_;
    if (has_marks(block)) {
      shared_.require(first_word(block) == block.mark && last_word(block) == block.mark);
    }
    CoreBlock freed;
    shared_.require(core_.free(block.address, &freed) == CoreCode::kOk);
    shared_.require(freed.address == block.address && freed.requested == block.size);
  }

  void share(const Block& block) override {
    ++calls_;
    const Stream other = stream(static_cast<std::uint32_t>(random_.next() % shared_.plan.threads));
    const StreamName name{other, shared_.plan.device};
    shared_.require(core_.record_stream(block.address, name, false) == CoreCode::kOk);
  }

  void hand_over(const Block& block) override {
    const std::scoped_lock lock(shared_.mutex);
    shared_.handed_over.push_back(block);
  }

  // Frees what others handed over, and tells how many calls were made since it was last asked.
  std::uint64_t settle() {
    {
      const std::scoped_lock lock(shared_.mutex);
      taken_.swap(shared_.handed_over);
    }
    for (const Block& block : taken_) free(block);
    taken_.clear();
    return std::exchange(calls_, 0);
  }

 private:
  Stream stream(std::uint32_t number) const { return Stream{shared_.plan.streams[number]}; }
  bool has_marks(const Block& block) const {
    return shared_.plan.has_bytes != 0 && block.size >= Bytes{sizeof block.mark};
  }
  static std::uint64_t& word(Address address) {
    return *reinterpret_cast<std::uint64_t*>(address.value);
  }
  static std::uint64_t& first_word(const Block& block) { return word(block.address); }
  static std::uint64_t& last_word(const Block& block) {
    return word(block.address + round_down(block.size, {8}) - Bytes{8});
  }

  Shared& shared_;
  Allocators& core_;
  const std::uint32_t number_;
  Random random_;
  std::uint64_t calls_ = 0;
  std::vector<Block> taken_;
};

void work(Shared& shared, std::uint32_t number) {
  const Plan& plan = shared.plan;
  Client client(shared, number);
  const auto program = make_program(number, client, {plan.live_bytes / plan.threads});
  while (shared.calls < plan.calls) {
    const bool is_done = program->round();
    shared.calls += client.settle();
    // A script that has run out of memory takes its time, too.
    if (!is_done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // Never given back, on purpose.
    if (plan.leaked_per_round != 0) {
      *static_cast<volatile char*>(std::malloc(plan.leaked_per_round)) = 1;
    }
  }
  program->free_all();
  shared.calls += client.settle();
  --shared.working;
}

// Leaves the programs alone for the first quarter of the calls. Then, at each 1/400 of them, one of
// four things in turn: free memory is given back, memory becomes short, aliases are given up while
// it is, and it is plenty again.
class Keeper {
 public:
  explicit Keeper(Shared& shared) : shared_(shared), core_(shared.core) {}

  void run() {
    constexpr std::uint64_t kTimes = 400;
    for (std::uint64_t time = kTimes / 4; shared_.working != 0;) {
      if (shared_.calls < time * shared_.plan.calls / kTimes) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      if (shared_.reliefs == 0) note_peaks();
      act(time++);
      ++shared_.reliefs;
    }
    core_.set_limit(shared_.plan.device, {UINT64_MAX});
  }

 private:
  void note_peaks() {
    const AllocatorStats stats = core_.stats(shared_.plan.device);
    shared_.undisturbed_live = static_cast<std::uint64_t>(stats.allocated_bytes[0].peak);
    shared_.undisturbed_reserved = static_cast<std::uint64_t>(stats.reserved_bytes.peak);
  }

  void act(std::uint64_t time) {
    const std::int32_t device = shared_.plan.device;
    switch (time % 4) {
      case 0:
        core_.trim(device);
        break;
      case 1:
        core_.set_limit(device, {shared_.plan.live_bytes / 16 * 9});
        core_.trim(device);
        break;
      case 2:
        shared_.require(core_.defragment(device).released.count % 512 == 0);
        break;
      default:
        core_.set_limit(device, {UINT64_MAX});
        ask_for_the_impossible();
    }
  }

  void ask_for_the_impossible() {
    Address address{};
    const CoreCode code =
        core_.allocate(shared_.plan.device, {std::uint64_t{1} << 52}, Stream::kDefault, &address);
    shared_.require(code == CoreCode::kOutOfMemory);
    shared_.require(*core_.out_of_memory_text() != '\0');
    ++shared_.ooms;
  }

  Shared& shared_;
  Allocators& core_;
};

struct Soak {
  Soak(Allocators& core, const Plan& plan)
      : streams(plan.streams, plan.streams + plan.threads),
        shared{core, with_streams(plan)},
        keeper(shared) {
    shared.working = plan.threads;
    for (std::uint32_t i = 0; i < plan.threads; ++i) {
      threads.emplace_back([this, i] { work(shared, i); });
    }
    threads.emplace_back([this] { keeper.run(); });
  }

  void join() {
    for (std::thread& thread : threads) thread.join();
    threads.clear();
    // Handed over after every other thread had looked for the last time.
    shared.calls += Client(shared, 0).settle();
  }

  Progress progress() const {
    return {shared.calls,
            shared.ooms,
            shared.reliefs,
            shared.broken,
            shared.working == 0,
            shared.undisturbed_live,
            shared.undisturbed_reserved};
  }

  Plan with_streams(Plan plan) const {
    plan.streams = streams.data();
    return plan;
  }

  const std::vector<std::uint64_t> streams;
  Shared shared;
  Keeper keeper;
  std::vector<std::thread> threads;
};

}  // namespace
}  // namespace vramx::soak

extern "C" {

// The core has to outlive the run. Never null; to be finished once.
void* vramx_soak_start(const vramx::AllocatorsHandle* core, const vramx::soak::Plan* plan) {
  return new vramx::soak::Soak(*core->allocators, *plan);
}

void vramx_soak_look(void* soak, vramx::soak::Progress* progress) {
  *progress = static_cast<vramx::soak::Soak*>(soak)->progress();
}

// Waits for the threads, which free everything first.
void vramx_soak_finish(void* soak, vramx::soak::Progress* progress) {
  auto* const finished = static_cast<vramx::soak::Soak*>(soak);
  finished->join();
  *progress = finished->progress();
  delete finished;
}

// Lets malloc give back what nobody uses, so that the size of the process is what is in use.
void vramx_soak_trim_heap() { malloc_trim(0); }

// The most mappings that aliases may take, as the allocator is configured.
std::uint64_t vramx_soak_most_alias_mappings() { return vramx::AllocatorConfig{}.alias_mappings; }

}  // extern "C"
