// Just enough JSON to hand a test what torch's structs say. Numbers and known names only, so
// nothing is escaped.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace vramx::stub {

inline std::string list(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += (text.empty() ? "" : ", ") + item;
  return "[" + text + "]";
}

inline std::string object(std::initializer_list<std::pair<const char*, std::string>> fields) {
  std::vector<std::string> items;
  for (const auto& [name, value] : fields)
    items.push_back("\"" + std::string(name) + "\": " + value);
  const std::string text = list(items);
  return "{" + text.substr(1, text.size() - 2) + "}";
}

template <class Number>
std::string number(Number value) {
  return std::to_string(value);
}

inline std::string quoted(const std::string& text) { return "\"" + text + "\""; }

}  // namespace vramx::stub
