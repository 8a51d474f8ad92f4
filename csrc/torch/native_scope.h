// Marks that this thread is inside torch's own allocator, which was called from here.
//
// That allocator calls back while it holds its lock: it runs the free-memory callbacks, and it gets
// a memory pool's segments from the pool's allocator, which may be ours. What runs inside such a
// call takes no lock that is held elsewhere around a call of that allocator, gathers no context
// (the recorder wants the GIL) and asks that allocator for nothing. Per thread; costs a
// thread-local write.
#pragma once

#include <cstddef>

namespace vramx {

class NativeScope {
 public:
  // `request` is what that allocator was asked for; 0 if for nothing.
  explicit NativeScope(std::size_t request) : outer_(innermost_), request_(request) {
    innermost_ = this;
  }
  ~NativeScope() { innermost_ = outer_; }
  NativeScope(const NativeScope&) = delete;
  NativeScope& operator=(const NativeScope&) = delete;

  static bool is_active() { return innermost_ != nullptr; }
  static std::size_t request() { return innermost_ == nullptr ? 0 : innermost_->request_; }

 private:
  inline static thread_local NativeScope* innermost_ = nullptr;

  NativeScope* const outer_;
  const std::size_t request_;
};

}  // namespace vramx
