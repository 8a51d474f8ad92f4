// A thread that does one errand at a time while the first one waits for it.
//
// So a step can be taken by another thread and the order of steps stays what the seed says. An
// errand may pause, and the first thread goes on meanwhile. The thread starts with its first
// errand.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace vramx::stress {

class SecondThread {
 public:
  SecondThread() = default;
  ~SecondThread() {
    if (!thread_.joinable()) return;
    hand_over({});
    thread_.join();
  }
  SecondThread(const SecondThread&) = delete;
  SecondThread& operator=(const SecondThread&) = delete;

  bool is_here() const { return std::this_thread::get_id() == thread_.get_id(); }

  void run(std::function<void()> errand) {
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    hand_over(std::move(errand));
    wait_until_done();
  }
  // By the errand: returns once the first thread says that it goes on.
  void pause() {
    std::unique_lock lock(mutex_);
    has_errand_ = false;
    changed_.notify_all();
    changed_.wait(lock, [this] { return has_errand_; });
  }
  void go_on() {
    hand_over({});
    wait_until_done();
  }

 private:
  void hand_over(std::function<void()> errand) {
    const std::lock_guard lock(mutex_);
    errand_ = std::move(errand);
    has_errand_ = true;
    changed_.notify_all();
  }
  void wait_until_done() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !has_errand_; });
  }

  // An empty errand is the last.
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return has_errand_; });
      const std::function<void()> errand = std::move(errand_);
      lock.unlock();
      if (!errand) return;
      errand();
      lock.lock();
      has_errand_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> errand_;
  bool has_errand_ = false;
  std::thread thread_;
};

}  // namespace vramx::stress
