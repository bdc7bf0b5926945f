// SPDX-License-Identifier: Apache-2.0
// Positions and slots: lists of int32 or of int64.
#ifndef KERNELS_ROTARY_INTEGERS_CUH_
#define KERNELS_ROTARY_INTEGERS_CUH_

#include <cstdint>

namespace tiercel {

// Element `index` of a list of int32 or int64. Always two loads: a conditional load would make the
// next instruction wait for it.
struct Integer {
  uint32_t low, high;

  __device__ __forceinline__ void load(const void* list, int64_t index, bool is_int64) {
    const char* address = static_cast<const char*>(list) + (index << (is_int64 ? 3 : 2));
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(low) : "l"(address));
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(high) : "l"(address + (is_int64 ? 4 : 0)));
  }
  __device__ __forceinline__ int64_t value(bool is_int64) const {
    const int32_t above = is_int64 ? static_cast<int32_t>(high) : static_cast<int32_t>(low) >> 31;
    return static_cast<int64_t>(static_cast<uint64_t>(above) << 32 | low);
  }
  // The nearest number from 0 to `last`.
  __device__ __forceinline__ uint32_t clamped(bool is_int64, uint32_t last) const {
    const int32_t above = is_int64 ? static_cast<int32_t>(high) : static_cast<int32_t>(low) >> 31;
    const uint32_t inside = above > 0 ? last : min(low, last);
    return above < 0 ? 0 : inside;
  }
};

}  // namespace tiercel

#endif  // KERNELS_ROTARY_INTEGERS_CUH_
