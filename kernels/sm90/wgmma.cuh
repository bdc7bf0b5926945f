// SPDX-License-Identifier: Apache-2.0
// Matrix products of a warpgroup (wgmma) on 16-bit operands that lie in shared memory in the layout
// of TMA's 128-byte swizzle: blocks of 64 columns, rows of 128 bytes, 8 rows a pattern.
#ifndef KERNELS_SM90_WGMMA_CUH_
#define KERNELS_SM90_WGMMA_CUH_

#include <cstdint>

namespace tiercel {

// The operand at `address` whose rows lie along the sum (K-major). 16 columns further is 32 bytes.
__device__ __forceinline__ uint64_t rows_descriptor(uint32_t address) {
  constexpr uint64_t kPatterns = 1024 >> 4;  // bytes from 8 rows to the next
  return uint64_t{1} << 62 | kPatterns << 32 | uint64_t{1} << 16 | (address >> 4 & 0x3fff);
}

// The operand whose columns lie along the sum's other side (MN-major): the same tile, turned.
// `block` is the distance in bytes between blocks of 64 columns. 16 rows further is 2048 bytes.
__device__ __forceinline__ uint64_t turned_descriptor(uint32_t address, uint32_t block) {
  constexpr uint64_t kPatterns = 1024 >> 4;
  return uint64_t{1} << 62 | kPatterns << 32 | uint64_t{block >> 4} << 16 | (address >> 4 & 0x3fff);
}

// Before the first product, and after registers of one were written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of accumulators over this point: it goes behind wgmma_wait().
template <int kCount>
__device__ __forceinline__ void wgmma_settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A thread's sums, as text and as operands: a product in PTX names each of them.
#define TIERCEL_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TIERCEL_NAMES_32 \
  TIERCEL_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TIERCEL_NAMES_48 \
  TIERCEL_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TIERCEL_NAMES_64 \
  TIERCEL_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TIERCEL_NAMES_96                                                             \
  TIERCEL_NAMES_64                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TIERCEL_NAMES_128                                                                        \
  TIERCEL_NAMES_96                                                                               \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define TIERCEL_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TIERCEL_SUMS_AT(i) \
  TIERCEL_SUMS_4(i), TIERCEL_SUMS_4(i + 4), TIERCEL_SUMS_4(i + 8), TIERCEL_SUMS_4(i + 12)
#define TIERCEL_SUMS_16 TIERCEL_SUMS_AT(0)
#define TIERCEL_SUMS_32 TIERCEL_SUMS_16, TIERCEL_SUMS_AT(16)
#define TIERCEL_SUMS_48 TIERCEL_SUMS_32, TIERCEL_SUMS_AT(32)
#define TIERCEL_SUMS_64 TIERCEL_SUMS_48, TIERCEL_SUMS_AT(48)
#define TIERCEL_SUMS_96 TIERCEL_SUMS_64, TIERCEL_SUMS_AT(64), TIERCEL_SUMS_AT(80)
#define TIERCEL_SUMS_128 TIERCEL_SUMS_96, TIERCEL_SUMS_AT(96), TIERCEL_SUMS_AT(112)

// d = a b + (add ? d : 0): 64 x 64 of descriptors along 16 columns.
template <bool kBFloat16>
__device__ __forceinline__ void wgmma_64(float (&d)[32], uint64_t a, uint64_t b, bool add) {
#define TIERCEL_WGMMA(type)                                                             \
  asm volatile(                                                                         \
      "{ .reg .pred add; setp.ne.b32 add, %34, 0;\n"                                    \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" TIERCEL_NAMES_32 \
      "}, %32, %33, add, 1, 1, 0, 0; }"                                                 \
      : TIERCEL_SUMS_32                                                                 \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))
  if constexpr (kBFloat16) {
    TIERCEL_WGMMA("bf16");
  } else {
    TIERCEL_WGMMA("f16");
  }
#undef TIERCEL_WGMMA
}

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

// d = a b + (add ? d : 0): 64 x 256 of e4m3 descriptors along 32 columns.
__device__ __forceinline__ void wgmma_float8_256(float (&d)[128], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" TIERCEL_NAMES_128
      "}, %128, %129, add, 1, 1; }"
      : TIERCEL_SUMS_128
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d = a b + (add ? d : 0), along 16 of the sum: 64 rows of a in registers. The results' columns are
// rows of the tile at b or, turned, its columns.
template <bool kBFloat16, bool kTurned, int kCount>
__device__ __forceinline__ void wgmma_from_registers(float (&d)[kCount], const uint32_t (&a)[4],
                                                     uint64_t b, bool add) {
  static_assert(kCount == 16 || kCount == 32 || kCount == 48 || kCount == 64 || kCount == 96 ||
                kCount == 128);
#define TIERCEL_WGMMA(type, columns, count, a0, a1, a2, a3, at_b, at_add, turned)                \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #at_add                                    \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type             \
               " {" TIERCEL_NAMES_##count "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at_b \
                                          ", add, 1, 1, %" #turned "; }"                         \
               : TIERCEL_SUMS_##count                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), \
                 "n"(static_cast<int>(kTurned)))
#define TIERCEL_WGMMA_OF(type)                                        \
  if constexpr (kCount == 16) {                                       \
    TIERCEL_WGMMA(type, 32, 16, 16, 17, 18, 19, 20, 21, 22);          \
  } else if constexpr (kCount == 32) {                                \
    TIERCEL_WGMMA(type, 64, 32, 32, 33, 34, 35, 36, 37, 38);          \
  } else if constexpr (kCount == 48) {                                \
    TIERCEL_WGMMA(type, 96, 48, 48, 49, 50, 51, 52, 53, 54);          \
  } else if constexpr (kCount == 64) {                                \
    TIERCEL_WGMMA(type, 128, 64, 64, 65, 66, 67, 68, 69, 70);         \
  } else if constexpr (kCount == 96) {                                \
    TIERCEL_WGMMA(type, 192, 96, 96, 97, 98, 99, 100, 101, 102);      \
  } else {                                                            \
    TIERCEL_WGMMA(type, 256, 128, 128, 129, 130, 131, 132, 133, 134); \
  }
  if constexpr (kBFloat16) {
    TIERCEL_WGMMA_OF("bf16")
  } else {
    TIERCEL_WGMMA_OF("f16")
  }
#undef TIERCEL_WGMMA_OF
#undef TIERCEL_WGMMA
}

// d = a b + (add ? d : 0), along 32 of the sum, both of e4m3: 64 rows of a in registers.
template <int kCount>
__device__ __forceinline__ void wgmma_float8_from_registers(float (&d)[kCount],
                                                            const uint32_t (&a)[4], uint64_t b,
                                                            bool add) {
  static_assert(kCount == 16 || kCount == 64 || kCount == 128);
#define TIERCEL_WGMMA(columns, count, a0, a1, a2, a3, at_b, at_add)                                \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #at_add                                      \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #columns                                        \
               "k32.f32.e4m3.e4m3 {" TIERCEL_NAMES_##count "}, {%" #a0 ", %" #a1 ", %" #a2         \
                                                           ", %" #a3 "}, %" #at_b ", add, 1, 1; }" \
               : TIERCEL_SUMS_##count                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))
  if constexpr (kCount == 16) {
    TIERCEL_WGMMA(32, 16, 16, 17, 18, 19, 20, 21);
  } else if constexpr (kCount == 64) {
    TIERCEL_WGMMA(128, 64, 64, 65, 66, 67, 68, 69);
  } else {
    TIERCEL_WGMMA(256, 128, 128, 129, 130, 131, 132, 133);
  }
#undef TIERCEL_WGMMA
}

#undef TIERCEL_NAMES_16
#undef TIERCEL_NAMES_32
#undef TIERCEL_NAMES_48
#undef TIERCEL_NAMES_64
#undef TIERCEL_NAMES_96
#undef TIERCEL_NAMES_128
#undef TIERCEL_SUMS_4
#undef TIERCEL_SUMS_AT
#undef TIERCEL_SUMS_16
#undef TIERCEL_SUMS_32
#undef TIERCEL_SUMS_48
#undef TIERCEL_SUMS_64
#undef TIERCEL_SUMS_96
#undef TIERCEL_SUMS_128

}  // namespace tiercel

#endif  // KERNELS_SM90_WGMMA_CUH_
