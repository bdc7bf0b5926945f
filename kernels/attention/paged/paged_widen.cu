// SPDX-License-Identifier: Apache-2.0
// paged_widen: a float8 cache's keys and values in 16 bits, in pages of 128 keys. Conversion is
// exact. paged_mixed.cu says which pages are copied.
//
// A block has the keys or the values of a page and a head, a thread twice 8 columns of 4 rows: a
// row's address serves both. It reads the page table for all of its rows, then the rows, then
// stores 16 bytes for each load: so latencies overlap, and with that of the length. Bound: reads of
// one byte and writes of two for each element.
#include <cstdint>

#include "kernels/attention/paged/widen.h"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

constexpr int kRows = kPagedWidenPlaces / kPagedWidenRows;  // of a thread

// A load that the compiler does not move, so that several in a row are in flight at once.
__device__ __forceinline__ int load_int(const char* address) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

// The cache's row of a key, below 2^31. An entry that is no page counts as the last page.
__device__ __forceinline__ int64_t row_of(const PagedWidenArgs& args, int page, int key) {
  const auto last = static_cast<uint32_t>(args.last_page);
  page = static_cast<int>(min(static_cast<uint32_t>(page), last));
  return page * args.page_rows + (key & ((1 << args.page_bits) - 1));
}

template <typename Format>
__device__ __forceinline__ void widen(const uint32_t (&narrow)[2], uint32_t (&wide)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 values = e4m3x2_to_float2(narrow[i / 2] >> (i % 2 * 16));
    const float pair[2] = {values.x, values.y};
    wide[i] = Format::pack(pair);
  }
}

template <typename Format>
__global__ void __launch_bounds__(kPagedWidenLanes* kPagedWidenRows)
    paged_widen(const __grid_constant__ PagedWidenArgs args) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int4 place = args.sources[blockIdx.y];
  if (place.x < 0) return;
  const int entry = place.x, first = place.y * kPagedWidenPlaces, page = place.z;
  const bool of_values = blockIdx.x >= args.kv_heads;
  const int head = blockIdx.x - (of_values ? args.kv_heads : 0);
  const PagedWidenArgs::Cache& cache = args.caches[of_values];
  const char* table = args.table + entry * args.table_row;
  // The sum is `entry`. Of a uniform address the compiler waits for what is there before it loads
  // the rest of the table.
  const int64_t same = entry + static_cast<int>(threadIdx.y / kPagedWidenRows);
  const int length = load_int(args.lengths + same * args.length_step);
  int pages[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int key = min(first + threadIdx.y + i * kPagedWidenRows, args.capacity - 1);
    pages[i] = load_int(table + static_cast<int64_t>(key >> args.page_bits) * args.table_step);
  }
  const int keys = min(length, args.capacity) - first;

  const char* from = cache.from + head * cache.head + threadIdx.x * kPagedWidenElements;
  const int half = blockDim.x * kPagedWidenElements;
  const bool second = threadIdx.x * kPagedWidenElements + half < args.columns;
  uint32_t narrow[kRows][2][2];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int at = threadIdx.y + i * kPagedWidenRows;
    if (at >= keys) continue;
    const char* row = from + row_of(args, pages[i], first + at) * cache.row;
    load_vector(narrow[i][0], row);
    if (second) load_vector(narrow[i][1], row + half);
  }
  const int64_t tile = static_cast<int64_t>(page) * args.kv_heads + head;
  const int row_bytes = 2 * args.columns;
  char* to = cache.to + tile * (kPagedWidenPlaces * row_bytes) + threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int at = threadIdx.y + i * kPagedWidenRows;
    if (at >= keys) continue;
    uint32_t wide[4];
    widen<Format>(narrow[i][0], wide);
    store_vector(to + at * row_bytes, wide);
    if (!second) continue;
    widen<Format>(narrow[i][1], wide);
    store_vector(to + at * row_bytes + 2 * half, wide);
  }
}

const PagedWidenKernel kKernels[] = {
    {DType::kBFloat16,
     Kernel("paged_widen<BFloat16>", reinterpret_cast<const void*>(paged_widen<BFloat16>))},
    {DType::kFloat16,
     Kernel("paged_widen<Float16>", reinterpret_cast<const void*>(paged_widen<Float16>))},
};

}  // namespace

const PagedWidenKernel* paged_widen_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
