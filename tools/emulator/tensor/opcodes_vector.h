// SPDX-License-Identifier: Apache-2.0
// What decoders of matrix instructions share.
#ifndef TOOLS_EMULATOR_TENSOR_OPCODES_VECTOR_H_
#define TOOLS_EMULATOR_TENSOR_OPCODES_VECTOR_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tools/emulator/state.h"
#include "tools/emulator/tensor/elements.h"

namespace tiercel::emulator {

// The registers of {a, b, ...}, or the only one.
inline std::vector<Operand> vector_operand(Decode& d, int i) {
  const PtxOperand& operand = d.operand(i);
  if (operand.kind != PtxOperand::kVector) return {d.source(operand, t::b32)};
  std::vector<Operand> all;
  for (const PtxOperand& part : operand.parts) all.push_back(d.source(part, t::b32));
  return all;
}

// The leftmost modifier that is an element type.
inline Element take_element(Decode& d) {
  for (const std::string& word : d.rest())
    for (int i = 0; i <= static_cast<int>(Element::s32); ++i)
      if (word == element_name(static_cast<Element>(i))) {
        d.take(word.c_str());
        return static_cast<Element>(i);
      }
  d.fail("an element type is missing, or one that is not implemented");
}

// A decoded shape that lives as long as the kernel; Instruction::imm points to it.
inline void keep(Decode& d, Instruction& out, std::shared_ptr<const void> shape) {
  out.imm = reinterpret_cast<int64_t>(shape.get());
  d.kernel().kept.push_back(std::move(shape));
}
inline const void* kept(const Instruction& in) { return reinterpret_cast<const void*>(in.imm); }

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_OPCODES_VECTOR_H_
