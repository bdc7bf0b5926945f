// SPDX-License-Identifier: Apache-2.0
// Keys of top_k, and reads of other blocks' counts.
#ifndef KERNELS_MLA_TOP_K_CUH_
#define KERNELS_MLA_TOP_K_CUH_

#include <cstdint>

namespace tiercel {

// An integer of the same order: 0 for minus infinity, which is no candidate; NaN above all.
__device__ __forceinline__ uint32_t top_k_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 is 0
  if (x == -INFINITY) return 0;
  if (x != x) return 0xfffffffeu;
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

// Bits below a round's digit, of 11, 11 and 10 bits.
__device__ __forceinline__ int top_k_shift(int round) {
  return round == 0 ? 21 : round == 1 ? 10 : 0;
}

// Reads from block `rank`'s shared memory, at the offset that `local` has in this block's.
__device__ __forceinline__ uint4 cluster_load(uint32_t local, uint32_t rank) {
  uint4 v;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %4, %5;"
      " ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [remote]; }"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "r"(local), "r"(rank)
      : "memory");
  return v;
}

__device__ __forceinline__ uint2 cluster_load_pair(uint32_t local, uint32_t rank) {
  uint2 v;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %2, %3;"
      " ld.shared::cluster.v2.u32 {%0, %1}, [remote]; }"
      : "=r"(v.x), "=r"(v.y)
      : "r"(local), "r"(rank)
      : "memory");
  return v;
}

}  // namespace tiercel

#endif  // KERNELS_MLA_TOP_K_CUH_
