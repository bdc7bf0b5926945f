// SPDX-License-Identifier: Apache-2.0
// paged_widen: a float8 cache's keys and values in 16 bits, in pages of 128 keys, and the table of
// those pages. Conversion is exact.
//
// A block has the keys or the values of a page and a head, a thread 8 columns of 8 rows. It reads
// the page table for all of its rows, then the rows, then stores 16 bytes of each: so latencies
// overlap. Bound: reads of one byte and writes of two for each element.
#include <cstdint>

#include "kernels/attention/paged/widen.h"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

constexpr int kRows = kPagedWidenRows;
constexpr int kLoads = kPagedWidenPlaces / kRows;

// A key's entry of the page table.
__device__ __forceinline__ int page_of(const PagedWidenArgs& args, const char* table, int key) {
  const int64_t offset = static_cast<int64_t>(key >> args.page_bits) * args.table_step;
  return *reinterpret_cast<const int32_t*>(table + offset);
}

// The cache's row of a key. An entry that is no page counts as the last page.
__device__ __forceinline__ int64_t row_of(const PagedWidenArgs& args, int page, int key) {
  if (page < 0 || page > args.last_page) page = args.last_page;
  const int place = key & ((1 << args.page_bits) - 1);
  return static_cast<int64_t>(page) * args.page_rows + place;
}

template <typename Format>
__global__ void __launch_bounds__(kRows* kPagedWidenLanes)
    paged_widen(const __grid_constant__ PagedWidenArgs args) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int page = blockIdx.y;
  const int entry = page / args.columns, first = (page - entry * args.columns) * kPagedWidenPlaces;
  const bool of_values = blockIdx.x >= args.kv_heads;
  const int head = blockIdx.x - (of_values ? args.kv_heads : 0);
  if (blockIdx.x == 0 && threadIdx.x + threadIdx.y == 0) args.pages[page] = page;
  const int64_t offset = static_cast<int64_t>(entry) * args.length_step;
  const int keys = min(*reinterpret_cast<const int32_t*>(args.lengths + offset), args.capacity);
  if (keys <= first) return;

  const PagedWidenArgs::Cache& cache = args.caches[of_values];
  const int column = threadIdx.x, place = threadIdx.y;
  const char* table = args.table + entry * args.table_row;
  const char* from = cache.from + head * cache.head + column * kPagedWidenElements;
  int key[kLoads], pages[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    // Rows behind the last key read it again.
    key[i] = min(first + place + i * kRows, keys - 1);
    pages[i] = page_of(args, table, key[i]);
  }
  uint32_t narrow[kLoads][2];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    load_vector(narrow[i], from + row_of(args, pages[i], key[i]) * cache.row);
  }
  const int64_t tile = static_cast<int64_t>(page) * args.kv_heads + head;
  char* to = cache.to + (tile * (kPagedWidenPlaces * args.vectors) + column) * 16;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = place + i * kRows;
    if (at >= min(keys - first, kPagedWidenPlaces)) break;
    uint32_t wide[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 values = e4m3x2_to_float2(narrow[i][w / 2] >> (w % 2 * 16));
      const float pair[2] = {values.x, values.y};
      wide[w] = Format::pack(pair);
    }
    store_vector(to + static_cast<int64_t>(at) * args.vectors * 16, wide);
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
