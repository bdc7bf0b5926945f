// SPDX-License-Identifier: Apache-2.0
// What a kernel did that the machine or the PTX manual forbids.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>

namespace tiercel::emulator {

class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Values>
[[noreturn]] void fault(const char* format, Values... values) {
  char text[512];
  std::snprintf(text, sizeof text, format, values...);
  throw Fault(text);
}

[[noreturn]] inline void fault(const char* text) { throw Fault(text); }

}  // namespace tiercel::emulator
