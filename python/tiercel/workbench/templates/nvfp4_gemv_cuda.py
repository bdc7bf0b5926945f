# SPDX-License-Identifier: Apache-2.0
"""new_kernel: nvfp4_gemv in CUDA C++, compiled by nvcc at the first call.

tiercel smoke --path new_kernel.py      check it and time it against the reference
"""

from __future__ import annotations

import torch

import tiercel
from tiercel.plugins.types import Fp4Matrix, Fp4Vector, PermutedScales, ProductColumn, RawScales

CODE = r"""
#include <cuda_fp16.h>
#include <cuda_fp8.h>

// The e2m1 value of 4 bits: a sign, two bits of exponent and one of mantissa.
__device__ float value_of(int code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const float size =
      exponent == 0 ? 0.5f * mantissa : (1.0f + 0.5f * mantissa) * float(1 << exponent) * 0.5f;
  return code & 8 ? -size : size;
}

// The scale of a row's group of 16 values; atoms of 128 rows and 4 groups lie along k.
__device__ float scale_of(const __nv_fp8_e4m3* scales, int row, int group, int atoms) {
  const long atom = long(row / 128) * atoms + group / 4;
  return float(scales[atom * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4]);
}

// One warp a row of one batch; a byte's low half comes first.
__global__ void nvfp4_gemv(const unsigned char* a, const unsigned char* b,
                           const __nv_fp8_e4m3* scale_a, const __nv_fp8_e4m3* scale_b, __half* c,
                           int rows, int bytes, int atoms, long a_row, long a_byte, long a_batch,
                           long b_byte, long b_batch, long scale_a_batch, long scale_b_batch,
                           long c_row, long c_batch) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // the whole warp
  a += row * a_row + blockIdx.y * a_batch;
  b += blockIdx.y * b_batch;
  scale_a += blockIdx.y * scale_a_batch;
  scale_b += blockIdx.y * scale_b_batch;
  float sum = 0.0f;
  for (int k = threadIdx.x; k < bytes; k += 32) {
    const int one = a[k * a_byte], other = b[k * b_byte];
    const float product = value_of(one & 15) * value_of(other & 15) +
                          value_of(one >> 4) * value_of(other >> 4);
    sum += product * scale_of(scale_a, row, k / 8, atoms) * scale_of(scale_b, 0, k / 8, atoms);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x == 0) c[row * c_row + blockIdx.y * c_batch] = __half(sum);
}
"""

WARPS = 8
KERNEL = tiercel.jit.cuda(CODE, "nvfp4_gemv")


@tiercel.backends.register(
    op="nvfp4_gemv",
    name="new_kernel",
    language="cuda",
    description="one warp a row, sums in float32",
)
def new_kernel(
    a: Fp4Matrix,  # [m, k / 2, l] of two values each, any strides
    b: Fp4Vector,  # [1, k / 2, l]
    scale_a: RawScales,  # [m, k / 16, l] on the CPU; the same as the permuted ones
    scale_b: RawScales,  # [1, k / 16, l] on the CPU
    scale_a_permuted: PermutedScales,  # [32, 4, m / 128, 4, k / 64, l], of that layout's strides
    scale_b_permuted: PermutedScales,  # [32, 4, 1, 4, k / 64, l]
    c: ProductColumn,  # [m, 1, l] float16, any strides, written
) -> ProductColumn:
    rows, in_bytes, batches = a.shape
    if c.numel() == 0:
        return c
    KERNEL(
        [(rows + WARPS - 1) // WARPS, batches],
        [32, WARPS],
        a.view(torch.uint8),
        b.view(torch.uint8),
        scale_a_permuted,
        scale_b_permuted,
        c,
        rows,
        in_bytes,
        scale_a_permuted.shape[4],
        *a.stride(),
        *b.stride()[1:],
        scale_a_permuted.stride(5),
        scale_b_permuted.stride(5),
        c.stride(0),
        c.stride(2),
    )
    return c
