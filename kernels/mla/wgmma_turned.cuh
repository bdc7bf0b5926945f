// SPDX-License-Identifier: Apache-2.0
// Probabilities in shared memory times values, which are turned.
#ifndef KERNELS_MLA_WGMMA_TURNED_CUH_
#define KERNELS_MLA_WGMMA_TURNED_CUH_

#include <cstdint>

namespace tiercel {

// A thread's sums, as text and as operands: a product in PTX names each of them.
#define TIERCEL_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TIERCEL_NAMES_32 \
  TIERCEL_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TIERCEL_NAMES_64                                                             \
  TIERCEL_NAMES_32                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TIERCEL_NAMES_128                                                                        \
  TIERCEL_NAMES_64                                                                               \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define TIERCEL_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TIERCEL_SUMS_AT(i) \
  TIERCEL_SUMS_4(i), TIERCEL_SUMS_4(i + 4), TIERCEL_SUMS_4(i + 8), TIERCEL_SUMS_4(i + 12)
#define TIERCEL_SUMS_16 TIERCEL_SUMS_AT(0)
#define TIERCEL_SUMS_32 TIERCEL_SUMS_16, TIERCEL_SUMS_AT(16)
#define TIERCEL_SUMS_64 TIERCEL_SUMS_32, TIERCEL_SUMS_AT(32), TIERCEL_SUMS_AT(48)
#define TIERCEL_SUMS_128                                                          \
  TIERCEL_SUMS_64, TIERCEL_SUMS_AT(64), TIERCEL_SUMS_AT(80), TIERCEL_SUMS_AT(96), \
      TIERCEL_SUMS_AT(112)

// d = a b + (add ? d : 0): 64 x 256 of descriptors along 16 of the sum. The results' columns are
// those of the tile at b, which is turned.
template <bool kBFloat16>
__device__ __forceinline__ void wgmma_turned_256(float (&d)[128], uint64_t a, uint64_t b,
                                                 bool add) {
#define TIERCEL_WGMMA(type)                                                               \
  asm volatile(                                                                           \
      "{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" TIERCEL_NAMES_128 \
      "}, %128, %129, add, 1, 1, 0, 1; }"                                                 \
      : TIERCEL_SUMS_128                                                                  \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))
  if constexpr (kBFloat16) {
    TIERCEL_WGMMA("bf16");
  } else {
    TIERCEL_WGMMA("f16");
  }
#undef TIERCEL_WGMMA
}

#undef TIERCEL_NAMES_16
#undef TIERCEL_NAMES_32
#undef TIERCEL_NAMES_64
#undef TIERCEL_NAMES_128
#undef TIERCEL_SUMS_4
#undef TIERCEL_SUMS_AT
#undef TIERCEL_SUMS_16
#undef TIERCEL_SUMS_32
#undef TIERCEL_SUMS_64
#undef TIERCEL_SUMS_128

}  // namespace tiercel

#endif  // KERNELS_MLA_WGMMA_TURNED_CUH_
