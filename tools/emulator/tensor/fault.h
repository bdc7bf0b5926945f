// SPDX-License-Identifier: Apache-2.0
// What a kernel did that the machine or the PTX manual forbids, with a formatted text.
#ifndef TOOLS_EMULATOR_TENSOR_FAULT_H_
#define TOOLS_EMULATOR_TENSOR_FAULT_H_

#include <cstdio>

#include "tools/emulator/error.h"

namespace tiercel::emulator {

template <typename... Values>
[[noreturn]] void fault(const char* format, Values... values) {
  char text[512];
  std::snprintf(text, sizeof text, format, values...);
  throw EmulatorError(text);
}

[[noreturn]] inline void fault(const char* text) { throw EmulatorError(text); }

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_FAULT_H_
