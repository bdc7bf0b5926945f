// SPDX-License-Identifier: Apache-2.0
// The element types of matrix operands.
#ifndef TOOLS_EMULATOR_TENSOR_ELEMENTS_H_
#define TOOLS_EMULATOR_TENSOR_ELEMENTS_H_

#include <cstdint>

namespace tiercel::emulator {

enum class Element { f16, bf16, tf32, e4m3, e5m2, s8, u8, f32, s32 };

int element_bits(Element element);
const char* element_name(Element element);
bool is_integer(Element element);

// Elements that lie one behind the other, as numbers. Integers are exact in a float too.
void widen(Element element, const uint8_t* bytes, int count, float* out);

// d += a * b, all row-major: a is m x k, b is k x n. A row of d is `pitch` apart.
void multiply_add(float* d, int pitch, const float* a, const float* b, int m, int n, int k);
// The same in 32-bit integers, wrapping.
void multiply_add(int32_t* d, int pitch, const float* a, const float* b, int m, int n, int k);
// The same as Hopper's FP8 units are reported to add: all products of a step and the accumulator
// are cut off 13 bits below the largest one's leading bit, and so is their sum.
void multiply_add_short(float* d, int pitch, const float* a, const float* b, int m, int n, int k);

}  // namespace tiercel::emulator

#endif  // TOOLS_EMULATOR_TENSOR_ELEMENTS_H_
