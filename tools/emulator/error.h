// SPDX-License-Identifier: Apache-2.0
#ifndef TOOLS_EMULATOR_ERROR_H_
#define TOOLS_EMULATOR_ERROR_H_

#include <stdexcept>
#include <string>

namespace tiercel::emulator {

// What a kernel did wrong, or what the emulator does not know. The launch fails with its text;
// where (kernel, block, thread, PTX line) is added by the interpreter's loop.
struct EmulatorError : std::runtime_error {
  explicit EmulatorError(const std::string& text, int lane = -1)
      : std::runtime_error(text), lane(lane) {}
  int lane;  // of the warp, where one lane is to blame
};

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_ERROR_H_
