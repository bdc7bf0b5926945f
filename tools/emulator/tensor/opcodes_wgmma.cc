// SPDX-License-Identifier: Apache-2.0
// wgmma.mma_async and what orders it. Each warp of a warpgroup does its own rows when it gets
// there.
#include <string>
#include <vector>

#include "tools/emulator/tensor/fragments.h"
#include "tools/emulator/tensor/opcodes_vector.h"
#include "tools/emulator/tensor/tensor_state.h"

namespace tiercel::emulator {
namespace {

// op[0] and op[1]: descriptors of a and b; op[2]: scale-d. more: d's registers, then a's.
Step run_wgmma(Warp& warp, const Instruction& in, Mask mask) {
  if (!warp.together(kAllLanes, mask)) return Step::kBlocked;
  check_warpgroup_order(warp, in, "wgmma.mma_async");
  Wgmma shape = *static_cast<const Wgmma*>(kept(in));
  shape.short_adder = warp.cta->cluster->launch->options.short_fp8_adder;
  const Mask scale = warp.predicate(in.op[2]);
  if (scale != 0 && scale != kAllLanes)
    throw EmulatorError("wgmma.mma_async: scale-d differs between the warp's lanes");
  WgmmaOperands operands{};
  operands.accumulate = scale != 0;
  operands.b = uniform64(warp, in.op[1], mask, "wgmma.mma_async: b's descriptor");
  if (!shape.a_in_registers)
    operands.a = uniform64(warp, in.op[0], mask, "wgmma.mma_async: a's descriptor");
  const auto sums = static_cast<uint32_t>(accumulator_registers(shape.d, shape.n));
  std::vector<uint32_t*> d(sums);
  std::vector<const uint32_t*> a;
  for (uint32_t i = 0; i < sums; ++i) d[i] = warp.out<uint32_t>(in.more[i]);
  for (uint32_t i = sums; i < in.more_count; ++i) a.push_back(warp.in<uint32_t>(in.more[i]));
  tensor_state(warp).queue.issue(shape, operands, std::move(d), std::move(a), in.line);
  return Step::kNext;
}

Step run_commit(Warp& warp, const Instruction& in, Mask mask) {
  if (!warp.together(kAllLanes, mask)) return Step::kBlocked;
  check_warpgroup_order(warp, in, "wgmma.commit_group");
  tensor_state(warp).queue.commit();
  return Step::kNext;
}

Step run_wait(Warp& warp, const Instruction& in, Mask mask) {
  if (!warp.together(kAllLanes, mask)) return Step::kBlocked;
  check_warpgroup_order(warp, in, "wgmma.wait_group");
  tensor_state(warp).queue.wait(static_cast<uint32_t>(in.imm));
  return Step::kNext;
}

Step run_fence(Warp& warp, const Instruction& in, Mask mask) {
  if (!warp.together(kAllLanes, mask)) return Step::kBlocked;
  check_warpgroup_order(warp, in, "wgmma.fence");
  return Step::kNext;
}

bool negative(Decode& d, int i) {
  const int64_t scale = d.immediate(i);
  if (scale != 1 && scale != -1) d.fail("imm-scale is expected to be 1 or -1");
  return scale < 0;
}

bool flag(Decode& d, int i) {
  const int64_t value = d.immediate(i);
  if (value != 0 && value != 1) d.fail("imm-trans is expected to be 0 or 1");
  return value != 0;
}

void decode_mma_async(Decode& d, Instruction& out) {
  Wgmma shape{};
  for (const std::string& word : d.rest()) {
    if (word.rfind("m64n", 0) != 0) continue;
    const size_t k = word.find('k');
    shape.n = std::stoi(word.substr(4, k - 4));
    shape.k = std::stoi(word.substr(k + 1));
    d.take(word.c_str());
    break;
  }
  shape.d = take_element(d);
  shape.a = take_element(d);
  shape.b = take_element(d);
  shape.a_in_registers = d.operand(1).kind == PtxOperand::kVector;
  std::vector<Operand> registers = vector_operand(d, 0);
  if (static_cast<int>(registers.size()) != accumulator_registers(shape.d, shape.n))
    d.fail("another number of accumulators");
  if (shape.a_in_registers) {
    const std::vector<Operand> a = vector_operand(d, 1);
    if (a.size() != 4) d.fail("operand a is expected to have four registers");
    registers.insert(registers.end(), a.begin(), a.end());
  } else {
    out.op[0] = d.source(1, t::b64);
  }
  out.op[1] = d.source(2, t::b64);
  out.op[2] = d.predicate(3);
  if (d.negated(3)) d.fail("a negated scale-d is not implemented");
  if (!is_integer(shape.a)) {
    shape.negate_a = negative(d, 4);
    shape.negate_b = negative(d, 5);
  }
  int next = is_integer(shape.a) ? 4 : 6;
  if (element_bits(shape.a) == 16 && d.count() > next) {
    if (!shape.a_in_registers) shape.a_transposed = flag(d, next++);
    shape.b_transposed = flag(d, next++);
  }
  if (d.count() != next) d.fail("another number of operands");
  try {
    check(shape);
  } catch (const EmulatorError& error) {
    d.fail(error.what());
  }
  d.set_more(out, registers);
  keep(d, out, std::make_shared<Wgmma>(shape));
  out.run = run_wgmma;
}

void decode_wgmma(Decode& d, Instruction& out) {
  const std::string what = d.take_one_of({"mma_async", "commit_group", "wait_group", "fence"});
  for (const char* word : {"sync", "aligned"})
    if (!d.take(word)) d.fail(std::string("the modifier .") + word + " is expected");
  if (what == "mma_async") {
    decode_mma_async(d, out);
  } else if (what == "commit_group") {
    out.run = run_commit;
  } else if (what == "wait_group") {
    out.imm = d.immediate(0);
    out.run = run_wait;
  } else if (what == "fence") {
    out.run = run_fence;
  } else {
    d.fail("an operation is missing");
  }
}
const Opcode wgmma_opcode("wgmma", decode_wgmma);

}  // namespace
}  // namespace tiercel::emulator
