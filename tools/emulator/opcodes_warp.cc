// SPDX-License-Identifier: Apache-2.0
// What the lanes of a warp do together: shuffles, votes, matches, reductions.
#include <algorithm>

#include "tools/emulator/lanes.h"

namespace tiercel::emulator {
namespace {

constexpr uint32_t kNobody = 0xffffffffu;  // what a lane that does not take part seems to hold

// Calls f with each set of lanes that name the same members, once all of them are here.
template <typename F>
Step for_members(Warp& warp, Operand members, Mask mask, F&& f) {
  const uint32_t* named = warp.in<uint32_t>(members);
  for (Mask left = mask; left != 0;) {
    const int first = __builtin_ctz(left);
    Mask same = 0;
    for (int i = first; i < kLanes; ++i) {
      if ((left >> i & 1) && named[i] == named[first]) same |= 1u << i;
    }
    if ((same & ~named[first]) != 0) {
      throw EmulatorError("a lane is not among the members that it names",
                          __builtin_ctz(same & ~named[first]));
    }
    if (!warp.together(named[first], same)) return Step::kBlocked;
    left &= ~same;
  }
  for (Mask left = mask; left != 0;) {
    const int first = __builtin_ctz(left);
    const Mask same = named[first] & left;
    f(same);
    left &= ~same;
  }
  return Step::kNext;
}

enum Shuffle : uint32_t { kUp, kDown, kBfly, kIdx };

// op: 0 value, 1 predicate, 2 a, 3 b, 4 c, 5 members
Step shfl(Warp& warp, const Instruction& in, Mask mask) {
  return for_members(warp, in.op[5], mask, [&](Mask lanes) {
    uint32_t a[kLanes], made[kLanes];
    std::copy_n(warp.in<uint32_t>(in.op[2]), kLanes, a);
    const uint32_t *b = warp.in<uint32_t>(in.op[3]), *c = warp.in<uint32_t>(in.op[4]);
    Mask valid = 0;
    for (int i = 0; i < kLanes; ++i) {
      const int by = static_cast<int>(b[i] & 31), clamp = static_cast<int>(c[i] & 31);
      const int segment = static_cast<int>(c[i] >> 8 & 31);
      const int last = (i & segment) | (clamp & ~segment), first = i & segment;
      int from = in.flags == kUp     ? i - by
                 : in.flags == kDown ? i + by
                 : in.flags == kBfly ? i ^ by
                                     : first | (by & ~segment);
      const bool inside = in.flags == kUp ? from >= last : from <= last;
      if (!inside) from = i;
      if (inside) valid |= 1u << i;
      made[i] = lanes >> from & 1 ? a[from] : kNobody;
    }
    for_lanes(lanes, warp.out<uint32_t>(in.op[0]), [&](int i) { return made[i]; });
    if (in.op[1].present()) set_predicate(warp, in.op[1], valid, lanes);
  });
}

void result_and_predicate(Decode& d, const Type& type, Instruction& out) {
  const PtxOperand& to = d.operand(0);
  if (to.kind == PtxOperand::kPair) {
    out.op[0] = d.destination(to.parts[0], type);
    if (to.parts[1].kind != PtxOperand::kSink) out.op[1] = d.source(to.parts[1], t::pred);
  } else {
    out.op[0] = d.destination(0, type);
  }
}

void decode_shfl(Decode& d, Instruction& out) {
  if (!d.take("sync")) d.fail(".sync is missing");
  out.flags = d.take("up") ? kUp : d.take("down") ? kDown : d.take("bfly") ? kBfly : kIdx;
  if (out.flags == kIdx && !d.take("idx")) d.fail("a mode is missing");
  d.type({t::b32});
  result_and_predicate(d, t::b32, out);
  for (int i = 1; i <= 4; ++i) out.op[i + 1] = d.source(i, t::b32);
  out.run = shfl;
}

enum Vote : uint32_t { kBallot, kAll, kAny, kUni };

// op: 0 result, 1 source, 2 members
Step vote(Warp& warp, const Instruction& in, Mask mask) {
  return for_members(warp, in.op[2], mask, [&](Mask lanes) {
    const Mask votes = (warp.predicate(in.op[1]) ^ static_cast<Mask>(in.imm)) & lanes;
    if (in.flags == kBallot) {
      for_lanes(lanes, warp.out<uint32_t>(in.op[0]), [&](int) { return votes; });
      return;
    }
    const bool truth = in.flags == kAll   ? votes == lanes
                       : in.flags == kAny ? votes != 0
                                          : votes == lanes || votes == 0;
    set_predicate(warp, in.op[0], truth ? kAllLanes : 0, lanes);
  });
}

void decode_vote(Decode& d, Instruction& out) {
  if (!d.take("sync")) d.fail(".sync is missing");
  const std::string how = d.take_one_of({"ballot", "all", "any", "uni"});
  out.flags = how == "ballot" ? kBallot : how == "all" ? kAll : how == "any" ? kAny : kUni;
  const Type type = d.type({t::pred, t::b32});
  out.op[0] = type == t::pred ? d.predicate(0) : d.destination(0, type);
  out.op[1] = d.predicate(1);
  out.imm = d.negated(1) ? kAllLanes : 0;
  out.op[2] = d.source(2, t::b32);
  out.run = vote;
}

// op: 0 result, 1 predicate (all), 2 value, 3 members
template <typename T, bool all>
Step match(Warp& warp, const Instruction& in, Mask mask) {
  return for_members(warp, in.op[3], mask, [&](Mask lanes) {
    T a[kLanes];
    std::copy_n(warp.in<T>(in.op[2]), kLanes, a);
    uint32_t made[kLanes] = {};
    for (int i = 0; i < kLanes; ++i) {
      for (int k = 0; k < kLanes; ++k) {
        if ((lanes >> k & 1) && a[k] == a[i]) made[i] |= 1u << k;
      }
    }
    const bool same = made[__builtin_ctz(lanes)] == lanes;
    for_lanes(lanes, warp.out<uint32_t>(in.op[0]),
              [&](int i) { return all ? (same ? lanes : 0) : made[i]; });
    if (in.op[1].present()) set_predicate(warp, in.op[1], same ? kAllLanes : 0, lanes);
  });
}

void decode_match(Decode& d, Instruction& out) {
  const bool all = d.take("all");
  if (!all && !d.take("any")) d.fail(".all or .any is missing");
  if (!d.take("sync")) d.fail(".sync is missing");
  const Type type = d.type({t::b32, t::b64});
  result_and_predicate(d, t::b32, out);
  out.op[2] = d.source(1, type), out.op[3] = d.source(2, t::b32);
  if (type.bits == 32) {
    out.run = all ? match<uint32_t, true> : match<uint32_t, false>;
  } else {
    out.run = all ? match<uint64_t, true> : match<uint64_t, false>;
  }
}

// op: 0 result, 1 value, 2 members
template <typename T>
Step redux(Warp& warp, const Instruction& in, Mask mask) {
  return for_members(warp, in.op[2], mask, [&](Mask lanes) {
    const uint32_t* a = warp.in<uint32_t>(in.op[1]);
    T made = static_cast<T>(a[__builtin_ctz(lanes)]);
    for (int i = __builtin_ctz(lanes) + 1; i < kLanes; ++i) {
      if (!(lanes >> i & 1)) continue;
      const T one = static_cast<T>(a[i]);
      switch (in.flags) {
        case 0:
          made = static_cast<T>(static_cast<uint32_t>(made) + static_cast<uint32_t>(one));
          break;
        case 1:
          made = std::min(made, one);
          break;
        case 2:
          made = std::max(made, one);
          break;
        case 3:
          made &= one;
          break;
        case 4:
          made |= one;
          break;
        default:
          made ^= one;
      }
    }
    for_lanes(lanes, warp.out<uint32_t>(in.op[0]),
              [&](int) { return static_cast<uint32_t>(made); });
  });
}

void decode_redux(Decode& d, Instruction& out) {
  if (!d.take("sync")) d.fail(".sync is missing");
  static const char* const kNames[] = {"add", "min", "max", "and", "or", "xor"};
  while (out.flags < 6 && !d.take(kNames[out.flags])) ++out.flags;
  if (out.flags == 6) d.fail("an operation is missing");
  const Type type = d.type({t::u32, t::s32, t::b32});
  operands(d, out, t::b32, t::b32, 2);
  out.run = type.is_signed() ? redux<int32_t> : redux<uint32_t>;
}

Step activemask(Warp& warp, const Instruction& in, Mask mask) {
  for_lanes(mask, warp.out<uint32_t>(in.op[0]), [&](int) { return mask; });
  return Step::kNext;
}

void decode_activemask(Decode& d, Instruction& out) {
  d.type({t::b32});
  out.op[0] = d.destination(0, t::b32);
  out.run = activemask;
}

Step bar_warp(Warp& warp, const Instruction& in, Mask mask) {
  return for_members(warp, in.op[0], mask, [](Mask) {});
}

void decode_bar_warp(Decode& d, Instruction& out) {
  if (!d.take("warp") || !d.take("sync")) d.fail("an unknown barrier");
  out.op[0] = d.source(0, t::b32);
  out.run = bar_warp;
}

const Opcode opcodes[] = {
    {"shfl", decode_shfl},
    {"vote", decode_vote},
    {"match", decode_match},
    {"redux", decode_redux},
    {"activemask", decode_activemask},
    {"bar", decode_bar_warp, "warp"},
};

}  // namespace
}  // namespace tiercel::emulator
