// Room in a vector that grows for as long as the program does.
//
// std::vector doubles, so that half of it may lie idle, and what the core keeps in reserve counts
// as its bookkeeping. Here an eighth more is made at a time: eight moves for each element at most,
// which is nothing to the driver calls that every chunk and every alias has cost.
#pragma once

#include <cstddef>
#include <vector>

namespace vramx {

// From now on the vector can be `size` long without moving.
template <class T>
void make_room(std::vector<T>& vector, std::size_t size) {
  constexpr std::size_t kFew = 8;
  if (size > vector.capacity()) vector.reserve(size + size / 8 + kFew);
}

}  // namespace vramx
