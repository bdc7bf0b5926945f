// SPDX-License-Identifier: Apache-2.0
// Transposes small matrices of 1-, 2- and 4-byte elements in registers by byte permutations.
#ifndef KERNELS_TRANSPOSE_TRANSPOSE_IN_REGISTERS_CUH_
#define KERNELS_TRANSPOSE_TRANSPOSE_IN_REGISTERS_CUH_

#include <cstdint>

namespace tiercel {

// kEdge rows of kEdge elements of kBytes, as 32-bit words. Transposing takes one permutation per
// word for 2-byte elements, two for 1-byte elements and none for 4-byte elements.
template <int kBytes, int kEdge>
struct Square {
  static constexpr int kWords = kEdge * kBytes / 4;
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4, "elements of 1, 2 or 4 bytes");
  static_assert(kEdge * kBytes % 4 == 0, "rows of whole words");

  uint32_t rows[kEdge][kWords];

  __device__ __forceinline__ Square transposed() const {
    Square result;
    if constexpr (kBytes == 4) {
#pragma unroll
      for (int i = 0; i < kEdge; ++i) {
#pragma unroll
        for (int j = 0; j < kEdge; ++j) result.rows[j][i] = rows[i][j];
      }
    } else if constexpr (kBytes == 2) {
#pragma unroll
      for (int i = 0; i < kEdge; i += 2) {
#pragma unroll
        for (int j = 0; j < kEdge; j += 2) {
          const uint32_t a = rows[i][j / 2], b = rows[i + 1][j / 2];
          result.rows[j][i / 2] = __byte_perm(a, b, 0x5410);
          result.rows[j + 1][i / 2] = __byte_perm(a, b, 0x7632);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEdge; i += 4) {
#pragma unroll
        for (int j = 0; j < kEdge; j += 4) {
          const uint32_t a = rows[i][j / 4], b = rows[i + 1][j / 4];
          const uint32_t c = rows[i + 2][j / 4], d = rows[i + 3][j / 4];
          // Interleaves bytes 0 and 1, then 2 and 3, of two rows; then the halves of these.
          const uint32_t ab01 = __byte_perm(a, b, 0x5140), cd01 = __byte_perm(c, d, 0x5140);
          const uint32_t ab23 = __byte_perm(a, b, 0x7362), cd23 = __byte_perm(c, d, 0x7362);
          result.rows[j][i / 4] = __byte_perm(ab01, cd01, 0x5410);
          result.rows[j + 1][i / 4] = __byte_perm(ab01, cd01, 0x7632);
          result.rows[j + 2][i / 4] = __byte_perm(ab23, cd23, 0x5410);
          result.rows[j + 3][i / 4] = __byte_perm(ab23, cd23, 0x7632);
        }
      }
    }
    return result;
  }
};

}  // namespace tiercel

#endif  // KERNELS_TRANSPOSE_TRANSPOSE_IN_REGISTERS_CUH_
