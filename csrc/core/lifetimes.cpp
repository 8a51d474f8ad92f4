#include "core/lifetimes.h"

namespace vramx {

std::string Lifetimes::check() const {
  for (std::size_t slot = 0; slot < known_.size(); ++slot) {
    if (known_[slot].tag != 0 && known_[slot].lifetime == 0) {
      return "lifetimes 1: slot " + std::to_string(slot) + " has a context and no lifetime";
    }
  }
  return {};
}

}  // namespace vramx
