// SPDX-License-Identifier: Apache-2.0
// wgmma_from_registers() of 96 columns.
#ifndef KERNELS_GEMV_WGMMA_96_CUH_
#define KERNELS_GEMV_WGMMA_96_CUH_

#include <cstdint>

#include "kernels/sm90/wgmma.cuh"

namespace tiercel {

// d += a b, along 16 of the sum: 64 rows of a in registers.
template <bool kBFloat16>
__device__ __forceinline__ void wgmma_96_from_registers(float (&d)[48], const uint32_t (&a)[4],
                                                        uint64_t b) {
#define TIERCEL_SUMS_8(i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TIERCEL_WGMMA(type)                                                                       \
  asm volatile(                                                                                   \
      "wgmma.mma_async.sync.aligned.m64n96k16.f32." type "." type                                 \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "   \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36," \
      " %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%48, %49, %50, %51}, %52, 1, 1," \
      " 1, 0;"                                                                                    \
      : TIERCEL_SUMS_8(0), TIERCEL_SUMS_8(8), TIERCEL_SUMS_8(16), TIERCEL_SUMS_8(24),             \
        TIERCEL_SUMS_8(32), TIERCEL_SUMS_8(40)                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (kBFloat16) {
    TIERCEL_WGMMA("bf16");
  } else {
    TIERCEL_WGMMA("f16");
  }
#undef TIERCEL_WGMMA
#undef TIERCEL_SUMS_8
}

}  // namespace tiercel

#endif  // KERNELS_GEMV_WGMMA_96_CUH_
