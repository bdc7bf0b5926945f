// SPDX-License-Identifier: Apache-2.0
// cvt: between integers, floating point and the packed narrow formats.
#include <limits>

#include "tools/emulator/float_lane.h"

namespace tiercel::emulator {
namespace {

// flags of the handlers.
enum Flag : uint32_t { kFtz = 1, kSat = 2, kSatFinite = 4, kRelu = 8 };
constexpr int kRoundShift = 4;

Round round_of(const Instruction& in) { return static_cast<Round>(in.flags >> kRoundShift & 7); }

double to_integer(double value, Round round) {
  const double size = round_magnitude(std::fabs(value), round, std::signbit(value));
  return std::copysign(size, value);
}

// A value of the type, from a number that may lie between its values.
template <typename D>
D clamp_to(double value) {
  if (value != value) return 0;
  // The first numbers outside; exact in double.
  const double above = std::ldexp(1.0, std::numeric_limits<D>::digits);
  const double below = std::is_signed_v<D> ? -above : 0;
  if (value >= above) return std::numeric_limits<D>::max();
  if (value <= below) return std::numeric_limits<D>::min();
  return static_cast<D>(value);
}

// An integer, exactly, towards which a float was rounded to nearest: the neighbour that the
// rounding asks for.
template <typename D, typename S>
D directed(S value, Round round) {
  D made = static_cast<D>(value);
  if (round == Round::rn) return made;
  const long double exact = static_cast<long double>(value), off = exact - made;
  const bool up = round == Round::rp || (round == Round::rz && exact < 0);
  if (off > 0 && up) made = std::nextafter(made, std::numeric_limits<D>::infinity());
  if (off < 0 && !up) made = std::nextafter(made, -std::numeric_limits<D>::infinity());
  return made;
}

template <typename D>
D from_double(double value, const Instruction& in) {
  const Round round = round_of(in);
  const bool satfinite = (in.flags & kSatFinite) != 0;
  if constexpr (std::is_same_v<D, Half>) {
    return Half{static_cast<uint16_t>(encode(value, kFormatF16, round, satfinite))};
  } else if constexpr (std::is_same_v<D, Brain>) {
    return Brain{static_cast<uint16_t>(encode(value, kFormatBf16, round, satfinite))};
  } else if constexpr (std::is_same_v<D, float>) {
    if (value != value) return float_of(0x7fffffffu);
    const float nearest = static_cast<float>(value);
    if (round == Round::rn || nearest == value || std::isinf(value)) return nearest;
    const bool up = round == Round::rp || (round == Round::rz && value < 0);
    const float infinity = std::numeric_limits<float>::infinity();
    if (nearest < value && up) return std::nextafter(nearest, infinity);
    if (nearest > value && !up) return std::nextafter(nearest, -infinity);
    return nearest;
  } else {
    return value;
  }
}

template <typename D, typename S>
D convert(S from, const Instruction& in) {
  constexpr bool to_int = std::is_integral_v<D>, from_int = std::is_integral_v<S>;
  if constexpr (to_int && from_int) {
    if (in.flags & kSat) {
      const __int128 wide = from;
      if (wide > std::numeric_limits<D>::max()) return std::numeric_limits<D>::max();
      if (wide < std::numeric_limits<D>::min()) return std::numeric_limits<D>::min();
    }
    return static_cast<D>(from);
  } else if constexpr (from_int) {
    if constexpr (std::is_same_v<D, float> || std::is_same_v<D, double>) {
      return directed<D, S>(from, round_of(in));
    } else {
      // Integers of 64 bits could round twice; what overflows anyway does not.
      return from_double<D>(static_cast<double>(from), in);
    }
  } else {
    double value = static_cast<double>(widen(from));
    if constexpr (std::is_same_v<S, float>) {
      if (in.flags & kFtz) value = flush(from);
    }
    if constexpr (to_int) {
      return clamp_to<D>(to_integer(value, round_of(in)));
    } else {
      if (in.imm != 0) value = to_integer(value, round_of(in));  // rni and the like
      if ((in.flags & kRelu) != 0 && value <= 0) value = 0;
      D made;
      if constexpr (std::is_same_v<D, S>) {
        made = from;
        if (in.imm != 0 || (in.flags & (kFtz | kRelu)) != 0) made = from_double<D>(value, in);
      } else {
        made = from_double<D>(value, in);
      }
      if constexpr (std::is_same_v<D, float>) {
        if (in.flags & kFtz) made = flush(made);
        if (in.flags & kSat) made = saturate(made);
      } else if constexpr (!std::is_same_v<D, double>) {
        if (in.flags & kSat) made = narrow<D>(saturate(widen(made)));
      }
      return made;
    }
  }
}

template <typename D, typename S, typename Register>
Step cvt(Warp& warp, const Instruction& in, Mask mask) {
  const Slot<S>* a = warp.in<Slot<S>>(in.op[1]);
  [[maybe_unused]] Slot<S> low[kLanes];
  if constexpr (sizeof(S) < 8) {
    if (in.op[2].present()) {  // the low part of a 64-bit register
      const uint64_t* wide = warp.in<uint64_t>(in.op[1]);
      for (int i = 0; i < kLanes; ++i) low[i] = static_cast<uint32_t>(wide[i]);
      a = low;
    }
  }
  for_lanes(mask, warp.out<Register>(in.op[0]), [&](int i) -> Register {
    const D made = convert<D, S>(from_slot<S>(a[i]), in);
    if constexpr (std::is_integral_v<D>) {
      return static_cast<Register>(made);  // extended by its sign into a wider register
    } else {
      return static_cast<Register>(to_slot<D>(made));
    }
  });
  return Step::kNext;
}

template <typename D, typename S>
Handler cvt_to(int register_bits) {
  return register_bits == 64 ? cvt<D, S, uint64_t> : cvt<D, S, uint32_t>;
}

template <typename D>
Handler cvt_from(Decode& d, const Type& from, int bits) {
  if (from == t::u8) return cvt_to<D, uint8_t>(bits);
  if (from == t::s8) return cvt_to<D, int8_t>(bits);
  if (from == t::u16) return cvt_to<D, uint16_t>(bits);
  if (from == t::s16) return cvt_to<D, int16_t>(bits);
  if (from == t::u32) return cvt_to<D, uint32_t>(bits);
  if (from == t::s32) return cvt_to<D, int32_t>(bits);
  if (from == t::u64) return cvt_to<D, uint64_t>(bits);
  if (from == t::s64) return cvt_to<D, int64_t>(bits);
  if (from == t::f16) return cvt_to<D, Half>(bits);
  if (from == t::bf16) return cvt_to<D, Brain>(bits);
  if (from == t::f32) return cvt_to<D, float>(bits);
  if (from == t::f64) return cvt_to<D, double>(bits);
  d.fail(std::string("type ") + from.name + " is not implemented here");
}

Handler cvt_of(Decode& d, const Type& to, const Type& from, int bits) {
  if (to == t::u8) return cvt_from<uint8_t>(d, from, bits);
  if (to == t::s8) return cvt_from<int8_t>(d, from, bits);
  if (to == t::u16) return cvt_from<uint16_t>(d, from, bits);
  if (to == t::s16) return cvt_from<int16_t>(d, from, bits);
  if (to == t::u32) return cvt_from<uint32_t>(d, from, bits);
  if (to == t::s32) return cvt_from<int32_t>(d, from, bits);
  if (to == t::u64) return cvt_from<uint64_t>(d, from, bits);
  if (to == t::s64) return cvt_from<int64_t>(d, from, bits);
  if (to == t::f16) return cvt_from<Half>(d, from, bits);
  if (to == t::bf16) return cvt_from<Brain>(d, from, bits);
  if (to == t::f32) return cvt_from<float>(d, from, bits);
  if (to == t::f64) return cvt_from<double>(d, from, bits);
  d.fail(std::string("type ") + to.name + " is not implemented here");
}

// Two f32 (or the halves of an f16x2) into one packed register; the first one is the high part.
const Format* packed_format(const Type& type) {
  if (type == t::f16x2) return &kFormatF16;
  if (type == t::bf16x2) return &kFormatBf16;
  if (type == t::e4m3x2) return &kFormatE4m3;
  if (type == t::e5m2x2) return &kFormatE5m2;
  if (type == t::e2m1x2) return &kFormatE2m1;
  return nullptr;
}

uint32_t pack_one(float value, const Format& format, const Instruction& in) {
  if (in.flags & kFtz) value = flush(value);
  if ((in.flags & kRelu) != 0 && value <= 0) value = 0;
  return encode(value, format, round_of(in), (in.flags & kSatFinite) != 0);
}

Step pack_two(Warp& warp, const Instruction& in, Mask mask) {
  const Format& format = *reinterpret_cast<const Format*>(in.imm);
  const uint32_t *high = warp.in<uint32_t>(in.op[1]), *low = warp.in<uint32_t>(in.op[2]);
  for_lanes(mask, warp.out<uint32_t>(in.op[0]), [&](int i) {
    return pack_one(from_slot<float>(low[i]), format, in) |
           pack_one(from_slot<float>(high[i]), format, in) << format.bits;
  });
  return Step::kNext;
}

// The common case, cvt.rn without more, without the general encoder.
template <typename T>
Step pack_nearest(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t *high = warp.in<uint32_t>(in.op[1]), *low = warp.in<uint32_t>(in.op[2]);
  for_lanes(mask, warp.out<uint32_t>(in.op[0]), [&](int i) {
    return static_cast<uint32_t>(narrow<T>(from_slot<float>(low[i])).bits) |
           static_cast<uint32_t>(narrow<T>(from_slot<float>(high[i])).bits) << 16;
  });
  return Step::kNext;
}

Step repack_two(Warp& warp, const Instruction& in, Mask mask) {  // f16x2 -> e4m3x2, e5m2x2
  const Format& format = *reinterpret_cast<const Format*>(in.imm);
  const uint32_t* a = warp.in<uint32_t>(in.op[1]);
  for_lanes(mask, warp.out<uint32_t>(in.op[0]), [&](int i) {
    return pack_one(from_f16(static_cast<uint16_t>(a[i])), format, in) |
           pack_one(from_f16(static_cast<uint16_t>(a[i] >> 16)), format, in) << format.bits;
  });
  return Step::kNext;
}

Step unpack_two(Warp& warp, const Instruction& in, Mask mask) {  // e4m3x2, ... -> f16x2
  const Format& format = *reinterpret_cast<const Format*>(in.imm);
  const uint32_t* a = warp.in<uint32_t>(in.op[1]);
  const uint32_t ones = (1u << format.bits) - 1;
  for_lanes(mask, warp.out<uint32_t>(in.op[0]), [&](int i) {
    const auto one = [&](uint32_t bits) {
      float value = decode(bits & ones, format);
      if ((in.flags & kRelu) != 0 && value <= 0) value = 0;
      return encode(value, kFormatF16);
    };
    return one(a[i]) | one(a[i] >> format.bits) << 16;
  });
  return Step::kNext;
}

Step to_tf32_lanes(Warp& warp, const Instruction& in, Mask mask) {
  const uint32_t* a = warp.in<uint32_t>(in.op[1]);
  for_lanes(mask, warp.out<uint32_t>(in.op[0]), [&](int i) {
    return to_tf32(from_slot<float>(a[i]), round_of(in), (in.flags & kSatFinite) != 0);
  });
  return Step::kNext;
}

void set_format(Instruction& out, const Format* format) {
  out.imm = static_cast<int64_t>(reinterpret_cast<intptr_t>(format));
}

// Registers of a packed type; those of 8 bits lie in .b16 or, in PTX of the DSL, .b8 registers.
Type bits_of_type(const Type& type) { return type.bits == 32 ? t::b32 : t::b16; }

void decode_packed(Decode& d, const Type& to, const Type& from, Instruction& out) {
  const Format* format = packed_format(to);
  if (from == t::f32 && format != nullptr && d.count() == 3) {
    out.op[0] = d.destination(0, bits_of_type(to));
    out.op[1] = d.source(1, from), out.op[2] = d.source(2, from);
    const bool simple = out.flags == 0;  // Round::rn is 0
    out.run = simple && to == t::f16x2    ? pack_nearest<Half>
              : simple && to == t::bf16x2 ? pack_nearest<Brain>
                                          : pack_two;
    set_format(out, format);
  } else if (from == t::f16x2 && (to == t::e4m3x2 || to == t::e5m2x2)) {
    out.op[0] = d.destination(0, t::b16), out.op[1] = d.source(1, t::b32);
    out.run = repack_two;
    set_format(out, format);
  } else if (to == t::f16x2 && (from == t::e4m3x2 || from == t::e5m2x2 || from == t::e2m1x2)) {
    out.op[0] = d.destination(0, t::b32), out.op[1] = d.source(1, t::b16);
    out.run = unpack_two;
    set_format(out, packed_format(from));
  } else {
    d.fail("that conversion");
  }
}

void decode_cvt(Decode& d, Instruction& out) {
  struct {
    const char* name;
    Round round;
    bool integer;
  } const kRounds[] = {
      {"rn", Round::rn, false}, {"rz", Round::rz, false},   {"rm", Round::rm, false},
      {"rp", Round::rp, false}, {"rna", Round::rna, false}, {"rni", Round::rn, true},
      {"rzi", Round::rz, true}, {"rmi", Round::rm, true},   {"rpi", Round::rp, true}};
  Round round = Round::rn;
  for (const auto& one : kRounds) {
    if (!d.take(one.name)) continue;
    round = one.round;
    out.imm = one.integer;
  }
  out.flags = static_cast<uint32_t>(round) << kRoundShift;
  if (d.take("ftz")) out.flags |= kFtz;
  if (d.take("satfinite")) out.flags |= kSatFinite;
  if (d.take("sat")) out.flags |= kSat;
  if (d.take("relu")) out.flags |= kRelu;
  const Type to = d.type(), from = d.type();
  if (packed_format(to) != nullptr || packed_format(from) != nullptr) {
    return decode_packed(d, to, from, out);
  }
  if (to == t::tf32) {
    operands(d, out, t::b32, from, 1);
    out.run = to_tf32_lanes;
    return;
  }
  // Registers may be wider than the types.
  const auto wide_enough = [&](int i, const Type& type) {
    const int bits = d.register_bits(d.operand(i));
    const int least = type.bits < 16 ? 16 : type.bits;
    if (bits == 0 || bits == least) return type.bits < 16 ? t::b16 : type;
    if (bits < least) d.fail("a register that is too narrow");
    return bits == 32 ? t::b32 : t::b64;
  };
  const Type to_register = wide_enough(0, to);
  const Type from_register = wide_enough(1, from);
  out.op[0] = d.destination(0, to_register), out.op[1] = d.source(1, from_register);
  if (from_register.bits == 64 && from.bits <= 32) out.op[2] = out.op[1];
  out.run = cvt_of(d, to, from, to_register.bits);
}

const Opcode opcodes[] = {{"cvt", decode_cvt}};

}  // namespace
}  // namespace tiercel::emulator
