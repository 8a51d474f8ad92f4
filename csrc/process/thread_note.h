// What the last failure of a thread was, in words: for callers that get only a code back.
//
// One buffer for each thread and purpose, of fixed size so that nothing is destroyed when a thread
// ends. A text that does not fit is cut. Costs nothing until something fails.
#pragma once

#include <array>
#include <string>

namespace vramx {

class ThreadNote {
 public:
  void write(const std::string& text);
  const char* text() const { return text_.data(); }

 private:
  std::array<char, 1024> text_{};
};

// Both of the calling thread.
ThreadNote& out_of_memory_note();
ThreadNote& failure_note();

}  // namespace vramx
