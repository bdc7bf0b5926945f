// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup whose left operand is in registers: 64 columns of a state, transposed.
#ifndef KERNELS_DELTA_PRODUCTS_CUH_
#define KERNELS_DELTA_PRODUCTS_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {

#define TIERCEL_ROWS_64(type)                                                                      \
  asm volatile(                                                                                    \
      "{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"                                               \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                  \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"             \
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0; }"                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))

#define TIERCEL_TURNED_64(type)                                                                    \
  asm volatile(                                                                                    \
      "{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"                                               \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                  \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"             \
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1; }"                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))

#define TIERCEL_TURNED_128(type)                                                                   \
  asm volatile(                                                                                    \
      "{ .reg .pred add; setp.ne.b32 add, %69, 0;\n"                                               \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                 \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"             \
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1; }"                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63])                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))

// d = a b + (add ? d : 0): 64 x 64; b is a tile of 64 rows, which are the results' columns.
template <typename Format>
__device__ __forceinline__ void multiply_rows(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                              bool add) {
  if constexpr (std::is_same_v<Format, BFloat16>) {
    TIERCEL_ROWS_64("bf16");
  } else {
    TIERCEL_ROWS_64("f16");
  }
}

// d += a b: 64 x 64 or 64 x 128; b is 16 rows of a tile, along which the sum goes.
template <typename Format>
__device__ __forceinline__ void multiply_turned(float (&d)[32], const uint32_t (&a)[4],
                                                uint64_t b) {
  constexpr bool add = true;
  if constexpr (std::is_same_v<Format, BFloat16>) {
    TIERCEL_TURNED_64("bf16");
  } else {
    TIERCEL_TURNED_64("f16");
  }
}

template <typename Format>
__device__ __forceinline__ void multiply_turned(float (&d)[64], const uint32_t (&a)[4],
                                                uint64_t b) {
  constexpr bool add = true;
  if constexpr (std::is_same_v<Format, BFloat16>) {
    TIERCEL_TURNED_128("bf16");
  } else {
    TIERCEL_TURNED_128("f16");
  }
}

#undef TIERCEL_ROWS_64
#undef TIERCEL_TURNED_64
#undef TIERCEL_TURNED_128

}  // namespace tiercel

#endif  // KERNELS_DELTA_PRODUCTS_CUH_
