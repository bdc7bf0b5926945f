// SPDX-License-Identifier: Apache-2.0
// Matrix products of one warp (mma.sync), and transposes for their operands.
//
// Lane 4 g + t holds, of a 16x16 matrix A of 16-bit elements, words 0 to 3: rows g, g + 8, g, g + 8
// and columns 2t, 2t + 1 (words 0, 1), 2t + 8, 2t + 9 (words 2, 3); of a 16x8 matrix B, words 0 and
// 1: rows 2t, 2t + 1 and 2t + 8, 2t + 9 of column g; of a 16x8 result, elements 0 to 3: row g,
// columns 2t and 2t + 1, then row g + 8.
#ifndef KERNELS_SM90_WARP_MATRIX_CUH_
#define KERNELS_SM90_WARP_MATRIX_CUH_

#include <cstdint>

#include "kernels/sm90/float_format.cuh"

namespace tiercel {

// c += a b, accumulated in float32.
template <typename Format>
__device__ __forceinline__ void warp_multiply_add(float (&c)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1);

template <>
__device__ __forceinline__ void warp_multiply_add<BFloat16>(float (&c)[4], uint32_t a0, uint32_t a1,
                                                            uint32_t a2, uint32_t a3, uint32_t b0,
                                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void warp_multiply_add<Float16>(float (&c)[4], uint32_t a0, uint32_t a1,
                                                           uint32_t a2, uint32_t a3, uint32_t b0,
                                                           uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transposes an 8x8 matrix of 16-bit elements; lane 4 g + t holds columns 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32_t warp_transpose(uint32_t word) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

// Loads four 8x8 matrices of 16-bit elements from shared memory; lane 8 m + r passes the address of
// row r of matrix m. Lane 4 g + t gets columns 2t and 2t + 1 of row g or, transposed, rows 2t and
// 2t + 1 of column g.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t place) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(place)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(place)
                 : "memory");
  }
}

}  // namespace tiercel

#endif  // KERNELS_SM90_WARP_MATRIX_CUH_
