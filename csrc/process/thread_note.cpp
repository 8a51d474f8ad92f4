#include "process/thread_note.h"

#include <algorithm>

namespace vramx {

void ThreadNote::write(const std::string& text) {
  const std::size_t length = std::min(text.size(), text_.size() - 1);
  std::copy_n(text.data(), length, text_.data());
  text_[length] = 0;
}

ThreadNote& out_of_memory_note() {
  thread_local ThreadNote note;
  return note;
}

ThreadNote& failure_note() {
  thread_local ThreadNote note;
  return note;
}

}  // namespace vramx
