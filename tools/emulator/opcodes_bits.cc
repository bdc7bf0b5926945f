// SPDX-License-Identifier: Apache-2.0
// Bits: logic, shifts, fields, permutations, selection, moves.
#include <algorithm>
#include <chrono>

#include "tools/emulator/lanes.h"

namespace tiercel::emulator {
namespace {

struct And {
  template <typename T>
  static T run(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <typename T>
  static T run(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  static T run(T a, T b) {
    return a ^ b;
  }
};
struct Not {
  template <typename T>
  static T run(T a) {
    return static_cast<T>(~a);
  }
};
struct Cnot {
  template <typename T>
  static T run(T a) {
    return a == 0;
  }
};
// Shifts by more than the width are shifts by the width.
struct Shl {
  template <typename T>
  static T run(T a, uint32_t by) {
    return by >= sizeof(T) * 8 ? T{0} : static_cast<T>(a << by);
  }
};
struct Shr {
  template <typename T>
  static T run(T a, uint32_t by) {
    return static_cast<T>(a >> std::min<uint32_t>(by, sizeof(T) * 8 - 1)) &
           (std::is_signed_v<T> || by < sizeof(T) * 8 ? static_cast<T>(-1) : T{0});
  }
};
struct Popc {
  template <typename T>
  static uint32_t run(T a) {
    return static_cast<uint32_t>(__builtin_popcountll(a));
  }
};
struct Clz {
  template <typename T>
  static uint32_t run(T a) {
    return a == 0 ? sizeof(T) * 8
                  : static_cast<uint32_t>(__builtin_clzll(a)) - (64 - sizeof(T) * 8);
  }
};
struct Brev {
  template <typename T>
  static T run(T a) {
    T made = 0;
    for (size_t i = 0; i < sizeof(T) * 8; ++i) made = static_cast<T>(made << 1 | (a >> i & 1));
    return made;
  }
};
template <bool shift_amount>
struct Bfind {
  template <typename T>
  static uint32_t run(T a) {
    using U = std::make_unsigned_t<T>;
    const U bits = static_cast<U>(a < 0 ? ~a : a);
    if (bits == 0) return 0xffffffffu;
    const uint32_t after = Clz::run<U>(bits);
    return shift_amount ? after : static_cast<uint32_t>(sizeof(T) * 8 - 1) - after;
  }
};
struct Bfe {
  template <typename T>
  static T run(T a, uint32_t position, uint32_t length) {
    constexpr uint32_t width = sizeof(T) * 8;
    position &= 0xff, length &= 0xff;
    using U = std::make_unsigned_t<T>;
    const bool sign = std::is_signed_v<T> && length != 0 &&
                      (static_cast<U>(a) >> std::min(position + length - 1, width - 1) & 1);
    U made = position >= width ? 0 : static_cast<U>(a) >> position;
    // Bits above the field, or beyond the register, are copies of the sign.
    const uint32_t kept = std::min(length, position >= width ? 0 : width - position);
    if (kept < width) {
      const U field = (U{1} << kept) - 1;
      made = sign ? made | ~field : made & field;
    }
    return static_cast<T>(made);
  }
};
struct Bfi {
  template <typename T>
  static T run(T a, T b, uint32_t position, uint32_t length) {
    constexpr uint32_t width = sizeof(T) * 8;
    position &= 0xff, length &= 0xff;
    if (position >= width || length == 0) return b;
    const uint32_t kept = std::min(length, width - position);
    const T field = (kept == width ? ~T{0} : (T{1} << kept) - 1) << position;
    return (b & ~field) | ((a << position) & field);
  }
};
template <bool wrap>
struct Bmsk {
  static uint32_t run(uint32_t position, uint32_t length) {
    if (wrap) position &= 31, length &= 31;
    const uint32_t ones = length >= 32 ? ~0u : (1u << length) - 1;
    return position >= 32 ? 0 : ones << position;
  }
};
template <bool left, bool wrap>
struct Shf {
  static uint32_t run(uint32_t low, uint32_t high, uint32_t by) {
    by = wrap ? by & 31 : std::min(by, 32u);
    const uint64_t both = uint64_t{high} << 32 | low;
    return static_cast<uint32_t>(left ? (both << by) >> 32 : both >> by);
  }
};

template <typename Op>
void logic(Decode& d, Instruction& out) {
  const Type type = d.type({t::pred, t::b16, t::b32, t::b64});
  if (type == t::pred) {
    out.op[0] = d.predicate(0), out.op[1] = d.predicate(1), out.op[2] = d.predicate(2);
    out.flags = (d.negated(1) ? 1u : 0u) | (d.negated(2) ? 2u : 0u);
    out.run = [](Warp& warp, const Instruction& in, Mask mask) {
      const Mask a = warp.predicate(in.op[1]) ^ (in.flags & 1 ? kAllLanes : 0);
      const Mask b = warp.predicate(in.op[2]) ^ (in.flags & 2 ? kAllLanes : 0);
      set_predicate(warp, in.op[0], Op::template run<Mask>(a, b), mask);
      return Step::kNext;
    };
    return;
  }
  operands(d, out, type, type, 2);
  out.run = type.bits == 64 ? lanes<Op, uint64_t, uint64_t, uint64_t>
                            : lanes<Op, uint32_t, uint32_t, uint32_t>;
}

void decode_not(Decode& d, Instruction& out) {
  const Type type = d.type({t::pred, t::b16, t::b32, t::b64});
  if (type == t::pred) {
    out.op[0] = d.predicate(0), out.op[1] = d.predicate(1);
    out.run = [](Warp& warp, const Instruction& in, Mask mask) {
      set_predicate(warp, in.op[0], ~warp.predicate(in.op[1]), mask);
      return Step::kNext;
    };
    return;
  }
  operands(d, out, type, type, 1);
  out.run = type.bits == 64 ? lanes<Not, uint64_t, uint64_t> : lanes<Not, uint32_t, uint32_t>;
}

void decode_cnot(Decode& d, Instruction& out) {
  const Type type = d.type({t::b16, t::b32, t::b64});
  operands(d, out, type, type, 1);
  out.run = type.bits == 64   ? lanes<Cnot, uint64_t, uint64_t>
            : type.bits == 32 ? lanes<Cnot, uint32_t, uint32_t>
                              : lanes<Cnot, uint16_t, uint16_t>;
}

template <typename Op>
void shift(Decode& d, Instruction& out) {
  const Type type = d.type();
  out.op[0] = d.destination(0, type), out.op[1] = d.source(1, type),
  out.op[2] = d.source(2, t::b32);
  using W = uint32_t;
  switch (type.bits) {
    case 16:
      out.run =
          type.is_signed() ? lanes<Op, int16_t, int16_t, W> : lanes<Op, uint16_t, uint16_t, W>;
      return;
    case 32:
      out.run = type.is_signed() ? lanes<Op, int32_t, int32_t, W> : lanes<Op, W, W, W>;
      return;
    case 64:
      out.run =
          type.is_signed() ? lanes<Op, int64_t, int64_t, W> : lanes<Op, uint64_t, uint64_t, W>;
      return;
    default:
      d.fail("a shift of another size");
  }
}

template <typename Op>
void count_bits(Decode& d, Instruction& out) {  // popc, clz
  const Type type = d.type({t::b32, t::b64});
  operands(d, out, t::b32, type, 1);
  out.run = type.bits == 32 ? lanes<Op, uint32_t, uint32_t> : lanes<Op, uint32_t, uint64_t>;
}

void decode_brev(Decode& d, Instruction& out) {
  const Type type = d.type({t::b32, t::b64});
  operands(d, out, type, type, 1);
  out.run = type.bits == 32 ? lanes<Brev, uint32_t, uint32_t> : lanes<Brev, uint64_t, uint64_t>;
}

template <bool shift_amount>
void bfind(const Type& type, Instruction& out) {
  using Op = Bfind<shift_amount>;
  out.run = type == t::u32   ? lanes<Op, uint32_t, uint32_t>
            : type == t::s32 ? lanes<Op, uint32_t, int32_t>
            : type == t::u64 ? lanes<Op, uint32_t, uint64_t>
                             : lanes<Op, uint32_t, int64_t>;
}

void decode_bfind(Decode& d, Instruction& out) {
  const bool shift_amount = d.take("shiftamt");
  const Type type = d.type({t::u32, t::s32, t::u64, t::s64});
  operands(d, out, t::b32, type, 1);
  shift_amount ? bfind<true>(type, out) : bfind<false>(type, out);
}

void decode_bfe(Decode& d, Instruction& out) {
  const Type type = d.type({t::u32, t::s32, t::u64, t::s64});
  operands(d, out, type, type, 1);
  out.op[2] = d.source(2, t::b32), out.op[3] = d.source(3, t::b32);
  using W = uint32_t;
  out.run = type == t::u32   ? lanes<Bfe, W, W, W, W>
            : type == t::s32 ? lanes<Bfe, int32_t, int32_t, W, W>
            : type == t::u64 ? lanes<Bfe, uint64_t, uint64_t, W, W>
                             : lanes<Bfe, int64_t, int64_t, W, W>;
}

void decode_bfi(Decode& d, Instruction& out) {
  const Type type = d.type({t::b32, t::b64});
  operands(d, out, type, type, 2);
  out.op[3] = d.source(3, t::b32), out.op[4] = d.source(4, t::b32);
  using W = uint32_t;
  out.run =
      type.bits == 32 ? lanes<Bfi, W, W, W, W, W> : lanes<Bfi, uint64_t, uint64_t, uint64_t, W, W>;
}

void decode_bmsk(Decode& d, Instruction& out) {
  const bool wrap = d.take("wrap");
  if (!wrap && !d.take("clamp")) d.fail(".wrap or .clamp is missing");
  d.type({t::b32});
  operands(d, out, t::b32, t::b32, 2);
  using W = uint32_t;
  out.run = wrap ? lanes<Bmsk<true>, W, W, W> : lanes<Bmsk<false>, W, W, W>;
}

void decode_shf(Decode& d, Instruction& out) {
  const bool left = d.take("l");
  if (!left && !d.take("r")) d.fail(".l or .r is missing");
  const bool wrap = d.take("wrap");
  if (!wrap && !d.take("clamp")) d.fail(".wrap or .clamp is missing");
  d.type({t::b32});
  operands(d, out, t::b32, t::b32, 3);
  using W = uint32_t;
  if (left) {
    out.run = wrap ? lanes<Shf<true, true>, W, W, W, W> : lanes<Shf<true, false>, W, W, W, W>;
  } else {
    out.run = wrap ? lanes<Shf<false, true>, W, W, W, W> : lanes<Shf<false, false>, W, W, W, W>;
  }
}

void decode_lop3(Decode& d, Instruction& out) {
  d.type({t::b32});
  operands(d, out, t::b32, t::b32, 3);
  out.imm = d.immediate(4);
  out.run = [](Warp& warp, const Instruction& in, Mask mask) {
    const uint32_t *a = warp.in<uint32_t>(in.op[1]), *b = warp.in<uint32_t>(in.op[2]),
                   *c = warp.in<uint32_t>(in.op[3]);
    for_lanes(mask, warp.out<uint32_t>(in.op[0]), [&](int i) {
      uint32_t made = 0;
      for (int k = 0; k < 8; ++k) {  // one minterm for each bit of the table
        if (!(in.imm >> k & 1)) continue;
        made |= (k & 4 ? a[i] : ~a[i]) & (k & 2 ? b[i] : ~b[i]) & (k & 1 ? c[i] : ~c[i]);
      }
      return made;
    });
    return Step::kNext;
  };
}

// The selector that a mode makes of the low bits.
uint32_t selector(uint32_t mode, uint32_t c) {
  static const uint16_t kTable[6][4] = {
      {0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
      {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
      {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
  return mode == 0 ? c : kTable[mode - 1][c & 3];
}

Step prmt(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t *a = warp.in<uint32_t>(in.op[1]), *b = warp.in<uint32_t>(in.op[2]),
                 *c = warp.in<uint32_t>(in.op[3]);
  for_lanes(mask, warp.out<uint32_t>(in.op[0]), [&](int i) {
    const uint64_t both = uint64_t{b[i]} << 32 | a[i];
    const uint32_t select = selector(in.flags, c[i]);
    uint32_t made = 0;
    for (int k = 0; k < 4; ++k) {
      const uint32_t nibble = select >> (4 * k) & 15;
      uint32_t byte = both >> (8 * (nibble & 7)) & 0xff;
      if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign, eight times
      made |= byte << (8 * k);
    }
    return made;
  });
  return Step::kNext;
}

void decode_prmt(Decode& d, Instruction& out) {
  d.type({t::b32});
  const std::string mode = d.take_one_of({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
  static const char* const kModes[] = {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  out.flags = static_cast<uint32_t>(std::find(kModes, kModes + 7, mode) - kModes);
  operands(d, out, t::b32, t::b32, 3);
  out.run = prmt;
}

template <typename T>
Step select(Warp& warp, const Instruction& in, Mask mask) {
  const T *a = warp.in<T>(in.op[1]), *b = warp.in<T>(in.op[2]);
  const Mask which = warp.predicate(in.op[3]) ^ static_cast<Mask>(in.imm);
  for_lanes(mask, warp.out<T>(in.op[0]), [&](int i) { return which >> i & 1 ? a[i] : b[i]; });
  return Step::kNext;
}

void decode_selp(Decode& d, Instruction& out) {
  const Type type = d.type();
  operands(d, out, type, type, 2);
  out.op[3] = d.predicate(3);
  out.imm = d.negated(3) ? kAllLanes : 0;
  out.run = type.bits == 64 ? select<uint64_t> : select<uint32_t>;
}

template <typename T>
Step slct(Warp& warp, const Instruction& in, Mask mask) {
  const T *a = warp.in<T>(in.op[1]), *b = warp.in<T>(in.op[2]);
  const uint32_t* c = warp.in<uint32_t>(in.op[3]);
  for_lanes(mask, warp.out<T>(in.op[0]), [&](int i) {
    // s32, or f32 with flags: -0 and NaN count as their comparison says
    const bool first = in.flags ? from_slot<float>(c[i]) >= 0 : !(c[i] >> 31);
    return first ? a[i] : b[i];
  });
  return Step::kNext;
}

void decode_slct(Decode& d, Instruction& out) {
  d.take("ftz");
  const Type type = d.type(), by = d.type({t::s32, t::f32});
  operands(d, out, type, type, 2);
  out.op[3] = d.source(3, by);
  out.flags = by == t::f32;
  out.run = type.bits == 64 ? slct<uint64_t> : slct<uint32_t>;
}

template <typename T>
Step move(Warp& warp, const Instruction& in, Mask mask) {
  const T* a = warp.in<T>(in.op[1]);
  for_lanes(mask, warp.out<T>(in.op[0]), [&](int i) { return a[i]; });
  return Step::kNext;
}

// Pieces of 8 to 32 bits, in `more`, to or from one register of op[0].
Step pack(Warp& warp, const Instruction& in, Mask mask) {
  const int piece = static_cast<int>(in.flags);
  const bool wide = piece * static_cast<int>(in.more_count) == 64;
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    uint64_t made = 0;
    for (uint32_t k = 0; k < in.more_count; ++k) {
      const uint64_t part = warp.in<uint32_t>(in.more[k])[i] & ((uint64_t{1} << piece) - 1);
      made |= part << (piece * static_cast<int>(k));
    }
    if (wide) {
      warp.out<uint64_t>(in.op[0])[i] = made;
    } else {
      warp.out<uint32_t>(in.op[0])[i] = static_cast<uint32_t>(made);
    }
  }
  return Step::kNext;
}

Step unpack(Warp& warp, const Instruction& in, Mask mask) {
  const int piece = static_cast<int>(in.flags);
  const bool wide = piece * static_cast<int>(in.more_count) == 64;
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    const uint64_t whole = wide ? warp.in<uint64_t>(in.op[0])[i] : warp.in<uint32_t>(in.op[0])[i];
    for (uint32_t k = 0; k < in.more_count; ++k) {
      warp.out<uint32_t>(in.more[k])[i] = static_cast<uint32_t>(
          whole >> (piece * static_cast<int>(k)) & ((uint64_t{1} << piece) - 1));
    }
  }
  return Step::kNext;
}

// 128 bits: two of 64.
Step pack128(Warp& warp, const Instruction& in, Mask mask) {
  for (int half = 0; half < 2; ++half) {
    const uint64_t* a = warp.in<uint64_t>(in.more[half]);
    for_lanes(mask, warp.out<uint64_t>(in.op[0]) + half * kLanes, [&](int i) { return a[i]; });
  }
  return Step::kNext;
}

Step unpack128(Warp& warp, const Instruction& in, Mask mask) {
  for (int half = 0; half < 2; ++half) {
    const uint64_t* a = warp.in<uint64_t>(in.op[0]) + half * kLanes;
    for_lanes(mask, warp.out<uint64_t>(in.more[half]), [&](int i) { return a[i]; });
  }
  return Step::kNext;
}

// Clocks count the launch's instructions, so that a run is the same again.
template <typename T>
Step clock(Warp& warp, const Instruction& in, Mask mask) {
  const uint64_t now = warp.cta->cluster->launch->instructions;
  for_lanes(mask, warp.out<T>(in.op[0]), [&](int) { return static_cast<T>(now); });
  return Step::kNext;
}

void decode_mov(Decode& d, Instruction& out) {
  const Type type = d.type();
  if (type == t::pred) {
    out.op[0] = d.predicate(0), out.op[1] = d.predicate(1);
    out.imm = d.negated(1) ? kAllLanes : 0;
    out.run = [](Warp& warp, const Instruction& in, Mask mask) {
      set_predicate(warp, in.op[0], warp.predicate(in.op[1]) ^ static_cast<Mask>(in.imm), mask);
      return Step::kNext;
    };
    return;
  }
  const bool packs = d.operand(1).kind == PtxOperand::kVector;
  if (packs || d.operand(0).kind == PtxOperand::kVector) {
    const std::vector<PtxOperand>& parts = d.operand(packs ? 1 : 0).parts;
    const int piece = type.bits / static_cast<int>(parts.size());
    const Type* part = find_type("b" + std::to_string(piece));
    if (part == nullptr) d.fail("a vector of another length");
    std::vector<Operand> all;
    for (const PtxOperand& one : parts) {
      all.push_back(packs ? d.source(one, *part) : d.destination(one, *part));
    }
    d.set_more(out, all);
    out.flags = static_cast<uint32_t>(piece);
    out.op[0] = packs ? d.destination(0, type) : d.source(1, type);
    if (type.bits == 128 && parts.size() != 2) d.fail("a vector of another length");
    out.run = type.bits == 128 ? (packs ? pack128 : unpack128) : (packs ? pack : unpack);
    return;
  }
  out.op[0] = d.destination(0, type);
  const PtxOperand& from = d.operand(1);
  if (from.kind == PtxOperand::kSpecial &&
      (from.name.rfind("%clock", 0) == 0 || from.name.rfind("%globaltimer", 0) == 0)) {
    out.run = type.bits == 64 ? clock<uint64_t> : clock<uint32_t>;
    return;
  }
  out.op[1] = d.source(1, type);
  if (type.bits == 128) d.fail("a move of 128 bits");
  out.run = type.bits == 64 ? move<uint64_t> : move<uint32_t>;
}

const Opcode opcodes[] = {
    {"and", logic<And>},   {"or", logic<Or>},          {"xor", logic<Xor>},
    {"not", decode_not},   {"cnot", decode_cnot},      {"shl", shift<Shl>},
    {"shr", shift<Shr>},   {"popc", count_bits<Popc>}, {"clz", count_bits<Clz>},
    {"brev", decode_brev}, {"bfind", decode_bfind},    {"bfe", decode_bfe},
    {"bfi", decode_bfi},   {"bmsk", decode_bmsk},      {"shf", decode_shf},
    {"lop3", decode_lop3}, {"prmt", decode_prmt},      {"selp", decode_selp},
    {"slct", decode_slct}, {"mov", decode_mov},
};

}  // namespace
}  // namespace tiercel::emulator
