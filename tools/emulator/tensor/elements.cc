// SPDX-License-Identifier: Apache-2.0
#include "tools/emulator/tensor/elements.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "tools/emulator/tensor/formats.h"

namespace tiercel::emulator {
namespace {

constexpr int kShortBits = 13;  // below the leading one

using Table8 = std::array<float, 256>;

Table8 table(const Format& format) {
  Table8 values;
  for (uint32_t bits = 0; bits < 256; ++bits) values[bits] = decode(bits, format);
  return values;
}

template <typename Bits, typename Convert>
void widen_each(const uint8_t* bytes, int count, float* out, Convert convert) {
  for (int i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, bytes + i * sizeof bits, sizeof bits);
    out[i] = convert(bits);
  }
}

// One body for all; several copies for the vector units there are. Products of these formats are
// exact in a float, so a fused and a separate addition give the same.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define TIERCEL_CLONES __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define TIERCEL_CLONES
#endif

TIERCEL_CLONES void row_times(float* d, const float* a, const float* b, int n, int k) {
  for (int step = 0; step < k; ++step) {
    const float scale = a[step];
    const float* row = b + static_cast<int64_t>(step) * n;
    for (int column = 0; column < n; ++column) d[column] += scale * row[column];
  }
}

float add_short(float start, const float* a, const float* b, int n, int k) {
  float largest = std::fabs(start);
  float exact = start;  // for what is not finite
  for (int step = 0; step < k; ++step) {
    const float product = a[step] * b[static_cast<int64_t>(step) * n];
    largest = std::max(largest, std::fabs(product));
    exact += product;
  }
  if (!std::isfinite(exact) || largest == 0) return exact;
  const int exponent = std::ilogb(largest);
  const auto cut = [](double x, int at) { return std::trunc(std::ldexp(x, kShortBits - at)); };
  double sum = cut(start, exponent);
  for (int step = 0; step < k; ++step)
    sum += cut(static_cast<double>(a[step]) * b[static_cast<int64_t>(step) * n], exponent);
  sum = std::ldexp(sum, exponent - kShortBits);
  if (sum == 0) return 0;
  const int top = std::ilogb(sum);
  return static_cast<float>(std::ldexp(cut(sum, top), top - kShortBits));
}

}  // namespace

int element_bits(Element element) {
  switch (element) {
    case Element::e4m3:
    case Element::e5m2:
    case Element::s8:
    case Element::u8:
      return 8;
    case Element::f16:
    case Element::bf16:
      return 16;
    default:
      return 32;
  }
}

const char* element_name(Element element) {
  static const char* const names[] = {"f16", "bf16", "tf32", "e4m3", "e5m2",
                                      "s8",  "u8",   "f32",  "s32"};
  return names[static_cast<int>(element)];
}

bool is_integer(Element element) {
  return element == Element::s8 || element == Element::u8 || element == Element::s32;
}

void widen(Element element, const uint8_t* bytes, int count, float* out) {
  static const Table8 e4m3 = table(kFormatE4m3), e5m2 = table(kFormatE5m2);
  switch (element) {
    case Element::f16:
      return widen_each<uint16_t>(bytes, count, out, from_f16);
    case Element::bf16:
      return widen_each<uint16_t>(bytes, count, out, from_bf16);
    case Element::tf32:
      return widen_each<uint32_t>(bytes, count, out, from_tf32);
    case Element::e4m3:
      return widen_each<uint8_t>(bytes, count, out, [](uint8_t bits) { return e4m3[bits]; });
    case Element::e5m2:
      return widen_each<uint8_t>(bytes, count, out, [](uint8_t bits) { return e5m2[bits]; });
    case Element::s8:
      return widen_each<int8_t>(bytes, count, out, [](int8_t x) { return float(x); });
    case Element::u8:
      return widen_each<uint8_t>(bytes, count, out, [](uint8_t x) { return float(x); });
    case Element::f32:
      return widen_each<uint32_t>(bytes, count, out, float_of);
    case Element::s32:
      return widen_each<int32_t>(bytes, count, out, [](int32_t x) { return float(x); });
  }
}

void multiply_add(float* d, int pitch, const float* a, const float* b, int m, int n, int k) {
  for (int row = 0; row < m; ++row)
    row_times(d + static_cast<int64_t>(row) * pitch, a + static_cast<int64_t>(row) * k, b, n, k);
}

void multiply_add(int32_t* d, int pitch, const float* a, const float* b, int m, int n, int k) {
  for (int row = 0; row < m; ++row)
    for (int column = 0; column < n; ++column) {
      int64_t sum = d[row * pitch + column];
      for (int step = 0; step < k; ++step)
        sum += static_cast<int64_t>(a[row * k + step]) * static_cast<int64_t>(b[step * n + column]);
      d[row * pitch + column] = static_cast<int32_t>(static_cast<uint32_t>(sum));
    }
}

void multiply_add_short(float* d, int pitch, const float* a, const float* b, int m, int n, int k) {
  for (int row = 0; row < m; ++row)
    for (int column = 0; column < n; ++column) {
      float& value = d[row * pitch + column];
      value = add_short(value, a + row * k, b + column, n, k);
    }
}

}  // namespace tiercel::emulator
