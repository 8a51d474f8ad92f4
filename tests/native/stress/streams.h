// The streams of a world, of every origin that a program's streams have, and the threads that they
// are of.
//
//   0      the default stream of CUDA          lasts, and the allocator is told so
//   1      one of torch's                      likewise
//   2, 3   another library's                   come and go; a handle may come again
//   4      the per-thread default stream       one handle, another stream in each of three threads
//   5, 6   likewise                            of two threads that may come in the middle of a call
//   7      one of another device               uses memory, allocates none
//
// Lives are numbered; each stream has a current one. What the allocator asks about streams is
// answered for the thread that asks, as torch answers it. Used by one thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/surroundings.h"
#include "driver/sim_driver.h"
#include "stress/scenario.h"
#include "stress/second_thread.h"

namespace vramx::stress {

constexpr std::uint32_t kFirstThreads = 4;
constexpr std::uint32_t kSecondThreads = 5;
constexpr std::uint32_t kThirdThreads = 6;
constexpr std::uint32_t kForeignDevice = 7;
static_assert(kForeignDevice + 1 == kStreams);

class Streams final : public Surroundings {
 public:
  // One life of a stream's name.
  struct Life {
    StreamName name;
    bool is_lasting = false;  // it is never replaced, and the allocator is told so
    bool is_over = false;
    bool is_capturing = false;
    StreamPoint newest{};   // all of its work until now
    StreamPoint covered{};  // up to which the last mark of any stream may reach
  };

  explicit Streams(SimDriver& sim);

  std::uint32_t number_of(std::uint32_t stream) const { return current_[stream]; }
  const Life& operator[](std::uint32_t number) const { return lives_[number]; }
  const Life& current(std::uint32_t stream) const { return lives_[current_[stream]]; }
  const std::vector<Life>& all() const { return lives_; }

  // Calls work() on the thread that the stream is of, and returns after it.
  template <class Work>
  void on_thread_of(std::uint32_t stream, Work work) {
    if (stream == kThirdThreads) return third_.run(work);
    if (stream != kSecondThreads) return work();
    second_.run(work);
  }
  // The per-thread stream of a thread that is not the calling one.
  std::uint32_t of_other_thread() const {
    return third_.is_here() ? kSecondThreads : kThirdThreads;
  }
  // By the work of such a thread: who called it goes on, until it calls go_on().
  void pause() { (second_.is_here() ? second_ : third_).pause(); }
  void go_on(std::uint32_t thread_of) { (thread_of == kSecondThreads ? second_ : third_).go_on(); }
  // The calling thread works on this one from now on.
  void use(std::uint32_t stream) { used_last_[thread()] = current_[stream]; }
  bool is_used_here(std::uint32_t stream) const { return used_last_[thread()] == current_[stream]; }

  // Each says whether the device did it.
  bool submit(std::uint32_t stream, std::uint64_t items);
  bool begin_capture(std::uint32_t stream);  // of the default stream or twice: nothing
  bool end_capture(std::uint32_t stream);
  // Destroyed, without a word to the allocator, and another one made in its place, which may get
  // the same handle. One that lasts, captures or is CUDA's own stays.
  bool replace(std::uint32_t stream, bool keeps_handle);
  // A mark was recorded: it may cover all that is queued now.
  void note_mark();

  bool any_captures() const;
  std::int64_t captures() const { return captures_; }
  std::int64_t replaced() const { return replaced_; }

  bool is_lasting(StreamName stream) const override;
  bool is_current(StreamName stream) const override;
  bool begin_call(StreamName) const override { return true; }  // the driver says in time
  void end_call(int) const override {}
  bool begin_device_call(int) const override { return !any_captures(); }

 private:
  Life& life(std::uint32_t stream) { return lives_[current_[stream]]; }
  std::size_t thread() const { return second_.is_here() ? 1 : third_.is_here() ? 2 : 0; }

  SimDriver& sim_;
  SecondThread second_;
  SecondThread third_;
  std::vector<Life> lives_;
  std::array<std::uint32_t, kStreams> current_{};
  std::array<std::uint32_t, 3> used_last_{};  // by thread, into lives_
  std::uint64_t next_handle_ = kStreams;
  std::int64_t captures_ = 0;
  std::int64_t replaced_ = 0;
};

}  // namespace vramx::stress
