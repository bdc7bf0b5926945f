// SPDX-License-Identifier: Apache-2.0
// The floating-point formats of PTX as bit patterns: to and from the host's float and double.
#ifndef TOOLS_EMULATOR_TENSOR_FORMATS_H_
#define TOOLS_EMULATOR_TENSOR_FORMATS_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace tiercel::emulator {

// rna: to nearest, ties away from zero (tf32 only).
enum class Round { rn, rz, rm, rp, rna };

enum class Special {
  ieee,      // the largest exponent means infinity or NaN
  nan_only,  // all ones mean NaN, no infinity (e4m3fn)
  finite,    // neither infinity nor NaN (e2m1)
};

struct Format {
  int bits;
  int mantissa;
  int bias;
  Special special;
  uint32_t nan;  // what cvt writes for a NaN

  constexpr uint32_t sign() const { return 1u << (bits - 1); }
  constexpr uint32_t magnitude() const { return sign() - 1; }
  constexpr uint32_t infinity() const { return (magnitude() >> mantissa) << mantissa; }
  constexpr uint32_t largest() const {
    return special == Special::ieee       ? infinity() - 1
           : special == Special::nan_only ? magnitude() - 1
                                          : magnitude();
  }
};

constexpr Format kFormatF16{16, 10, 15, Special::ieee, 0x7fff};
constexpr Format kFormatBf16{16, 7, 127, Special::ieee, 0x7fff};
constexpr Format kFormatE4m3{8, 3, 7, Special::nan_only, 0x7f};
constexpr Format kFormatE5m2{8, 2, 15, Special::ieee, 0x7f};
constexpr Format kFormatE2m1{4, 1, 1, Special::finite, 0x7};  // a NaN becomes the largest
constexpr Format kFormatTf32{19, 10, 127, Special::ieee, 0x3ffff};
constexpr Format kFormatF32{32, 23, 127, Special::ieee, 0x7fffffff};

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline uint64_t bits_of(double x) {
  uint64_t u;
  std::memcpy(&u, &x, 8);
  return u;
}

inline double double_of(uint64_t u) {
  double x;
  std::memcpy(&x, &u, 8);
  return x;
}

// Rounds a non-negative number to an integer; `negative` is the sign that it had.
inline double round_magnitude(double x, Round round, bool negative) {
  const double low = std::floor(x);
  const double rest = x - low;
  bool up = false;
  switch (round) {
    case Round::rn:
      up = rest > 0.5 || (rest == 0.5 && std::fmod(low, 2.0) != 0);
      break;
    case Round::rna:
      up = rest >= 0.5;
      break;
    case Round::rz:
      break;
    case Round::rm:
      up = negative && rest > 0;
      break;
    case Round::rp:
      up = !negative && rest > 0;
      break;
  }
  return up ? low + 1 : low;
}

// What cvt makes of a double. Without satfinite, what is too large becomes infinity (NaN in e4m3,
// the largest in e2m1) unless the rounding points the other way; with it, the largest.
inline uint32_t encode(double x, const Format& format, Round round = Round::rn,
                       bool satfinite = false) {
  if (std::isnan(x)) return format.nan;
  const bool negative = std::signbit(x);
  const uint32_t sign = negative ? format.sign() : 0;
  const double size = std::fabs(x);
  if (size == 0) return sign;
  const uint32_t beyond = format.special == Special::ieee       ? format.infinity()
                          : format.special == Special::nan_only ? format.nan
                                                                : format.largest();
  if (std::isinf(x)) return sign | (satfinite ? format.largest() : beyond);

  int exponent = std::ilogb(size);
  if (exponent < 1 - format.bias) exponent = 1 - format.bias;
  const double units =
      round_magnitude(std::ldexp(size, format.mantissa - exponent), round, negative);
  // A carry of the mantissa, or out of the subnormals, goes into the exponent by itself.
  const uint64_t bits = (static_cast<uint64_t>(exponent + format.bias - 1) << format.mantissa) +
                        static_cast<uint64_t>(units);
  if (bits <= format.largest()) return sign | static_cast<uint32_t>(bits);
  const bool inward =
      round == Round::rz || (round == Round::rm && !negative) || (round == Round::rp && negative);
  return sign | (satfinite || inward ? format.largest() : beyond);
}

inline float decode(uint32_t bits, const Format& format) {
  const float sign = bits & format.sign() ? -1.0f : 1.0f;
  const uint32_t size = bits & format.magnitude();
  if (format.special == Special::ieee && size >= format.infinity())
    return size == format.infinity() ? sign * std::numeric_limits<float>::infinity()
                                     : std::numeric_limits<float>::quiet_NaN();
  if (format.special == Special::nan_only && size == format.magnitude())
    return std::numeric_limits<float>::quiet_NaN();
  const uint32_t exponent = size >> format.mantissa;
  const uint32_t fraction = size & ((1u << format.mantissa) - 1);
  const uint32_t units = exponent ? fraction | (1u << format.mantissa) : fraction;
  const int power = static_cast<int>(exponent ? exponent : 1) - format.bias - format.mantissa;
  return sign * std::ldexp(static_cast<float>(units), power);
}

inline float from_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

inline uint16_t to_bf16(float x) {  // rn, the way of the inner loops
  const uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(kFormatBf16.nan);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline float from_f16(uint16_t bits) {
  const uint32_t size = bits & 0x7fffu;
  // The exponent moves by a multiplication, which normalises subnormals on the way.
  uint32_t u =
      size >= 0x7c00u ? (size << 13) | 0x7f800000u : bits_of(float_of(size << 13) * 0x1p112f);
  return float_of(u | (static_cast<uint32_t>(bits & 0x8000u) << 16));
}

inline uint16_t to_f16(float x) { return static_cast<uint16_t>(encode(x, kFormatF16)); }

// A tf32 is a float whose low 13 bits are not read.
inline uint32_t to_tf32(float x, Round round = Round::rna, bool satfinite = false) {
  if (std::isnan(x)) return kFormatF32.nan;
  return encode(x, kFormatTf32, round, satfinite) << 13;
}
inline float from_tf32(uint32_t bits) { return float_of(bits & 0xffffe000u); }

// ue8m0: a power of two without a sign. Of negative numbers the size counts.
inline float from_ue8m0(uint8_t bits) {
  return bits == 0xff ? std::numeric_limits<float>::quiet_NaN()
                      : std::ldexp(1.0f, static_cast<int>(bits) - 127);
}
inline uint8_t to_ue8m0(float x, Round round = Round::rz, bool satfinite = true) {
  if (std::isnan(x)) return 0xff;
  const double size = std::fabs(static_cast<double>(x));
  if (size == 0) return 0;
  if (std::isinf(size)) return satfinite ? 0xfe : 0xff;
  int exponent = std::ilogb(size);
  const double rest = std::ldexp(size, -exponent);  // in [1, 2)
  if (round == Round::rp ? rest > 1 : round != Round::rz && rest >= 1.5) ++exponent;
  if (exponent > 127) return satfinite ? 0xfe : 0xff;
  return static_cast<uint8_t>(exponent < -127 ? 0 : exponent + 127);
}

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_FORMATS_H_
