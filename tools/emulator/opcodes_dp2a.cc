// SPDX-License-Identifier: Apache-2.0
// dp2a: two 16-bit halves of a word times two bytes of another, summed.
#include <cstdint>

#include "tools/emulator/state.h"

namespace tiercel::emulator {
namespace {

enum Flags : uint32_t { kSignedA = 1, kSignedB = 2, kHigh = 4 };

// Part i, of `bits`, of a word.
int64_t part(uint32_t word, int i, int bits, bool is_signed) {
  const uint32_t value = word >> (i * bits) & ((1u << bits) - 1);
  const bool negative = is_signed && value >> (bits - 1) != 0;
  return static_cast<int64_t>(value) - (negative ? int64_t{1} << bits : 0);
}

Step dot(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t *a = warp.in<uint32_t>(in.op[1]), *b = warp.in<uint32_t>(in.op[2]);
  const uint32_t* c = warp.in<uint32_t>(in.op[3]);
  uint32_t* out = warp.out<uint32_t>(in.op[0]);
  const int first = in.flags & kHigh ? 2 : 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    int64_t sum = c[lane];
    for (int i = 0; i < 2; ++i)
      sum += part(a[lane], i, 16, in.flags & kSignedA) *
             part(b[lane], first + i, 8, in.flags & kSignedB);
    out[lane] = static_cast<uint32_t>(sum);
  }
  return Step::kNext;
}

void decode_dot(Decode& d, Instruction& out) {
  if (d.take("hi"))
    out.flags |= kHigh;
  else if (!d.take("lo"))
    d.fail(".lo or .hi is expected");
  if (d.type({t::u32, t::s32}).is_signed()) out.flags |= kSignedA;
  if (d.type({t::u32, t::s32}).is_signed()) out.flags |= kSignedB;
  out.op[0] = d.destination(0, t::b32);
  for (int i = 1; i <= 3; ++i) out.op[i] = d.source(i, t::b32);
  out.run = dot;
}
const Opcode dp2a_opcode("dp2a", decode_dot);

}  // namespace
}  // namespace tiercel::emulator
