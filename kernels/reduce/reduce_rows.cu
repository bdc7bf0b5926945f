// SPDX-License-Identifier: Apache-2.0
// reduce along rows: the reduced dimension is contiguous, or no dimension is.
//
// Each element is read once and little is written: 16384 rows of 4096 bfloat16 are 134 MB, 31 us at
// 4.4 TB/s. kLanes threads (part of a warp, a warp, or a block) share a row and read adjacent
// 16-byte vectors, with kUnroll loads for each of kRows rows in flight: four loads per thread in
// all, or two if a block reads one row. Sums are float32, one per place in a vector, then a tree
// over places, lanes and warps, in a fixed order. Many rows of at most 512 bytes have their own
// kernel (rows_turned.cuh). The ends of rows that do not begin or end on 16 bytes are read element
// by element. A few long rows are split among the blocks of a cluster, which combine their results
// in shared memory, or into parts that a second launch of this file's kernels combines from a
// workspace.
#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "kernels/reduce/accumulate.cuh"
#include "kernels/reduce/reduce_kernels.h"
#include "kernels/reduce/rows_turned.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/tma.cuh"

namespace tiercel {
namespace {

namespace cg = cooperative_groups;

// The address of an output's row. Only two remaining dimensions need the division.
__device__ __forceinline__ const char* row_of(const ReduceArgs& args, int64_t output) {
  if (args.outer == 1) return args.x + output * args.inner_stride;
  return args.x + output / args.inner * args.outer_stride + output % args.inner * args.inner_stride;
}

// The share of lane `lane` of kLanes in `count` elements. Elements before the first and after the
// last vector, or all if they are not adjacent, go to `edge`.
template <typename Format, typename Op, int kLanes>
struct Span {
  const char* vectors;  // the lane's first
  int count;            // of vectors of all lanes, from there on

  __device__ __forceinline__ void begin(const ReduceArgs& args, const char* start, int64_t elements,
                                        int lane, float& edge) {
    constexpr int kPerVector = 16 / Format::kBytes;
    const bool apart = args.length_stride != Format::kBytes;
    const int misaligned =
        static_cast<int>(-reinterpret_cast<uintptr_t>(start) % 16) / Format::kBytes;
    const int head = static_cast<int>(misaligned < elements ? misaligned : elements);
    count = apart ? 0 : static_cast<int>((elements - head) / kPerVector);
    vectors = start + head * Format::kBytes + lane * 16;
    if (apart || head != 0 || count * int64_t{kPerVector} != elements) {
      const int64_t after = apart ? 0 : head + count * int64_t{kPerVector};
      if (!apart) {
#pragma unroll 1
        for (int i = lane; i < head; i += kLanes) {
          edge = Op()(edge, Format::load(start + i * Format::kBytes));
        }
      }
#pragma unroll 1
      for (int64_t i = after + lane; i < elements; i += kLanes) {
        edge = Op()(edge, Format::load(start + i * args.length_stride));
      }
    }
    count -= lane;
  }
};

// Combines a thread's sums over the lanes, the block and the cluster to its rows' results.
template <typename Op, int kLanes, int kRows, typename Seen>
__device__ __forceinline__ void finish_rows(const ReduceArgs& args, const Seen (&seen)[kRows],
                                            int lane, int groups, int64_t first_output,
                                            int64_t part) {
  const int64_t outputs = args.outer * args.inner;
  float results[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    results[r] = lanes_reduce<(kLanes < 32 ? kLanes : 32)>(seen[r].total(), Op());
  }
  if constexpr (kLanes > 32) {
    constexpr int kWarps = kLanes / 32;
    static_assert(kRows == 1, "a block a row");
    __shared__ float scratch[kWarps];
    __shared__ float of_block;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = results[0];
    __syncthreads();
    results[0] = lanes_reduce<kWarps>(scratch[threadIdx.x % kWarps], Op());
    if (args.cluster > 1) {
      const cg::cluster_group cluster = cg::this_cluster();
      of_block = results[0];  // equal in all threads
      cluster.sync();
      if (cluster.block_rank() == 0) {
        for (int b = 1; b < args.cluster; ++b) {
          results[0] = Op()(results[0], *cluster.map_shared_rank(&of_block, b));
        }
      }
      cluster.sync();  // block 0 has read the results of the others
      if (cluster.block_rank() != 0) return;
    }
  }
  // Lane r stores row r; a warp's rows are adjacent, so this is one instruction.
  static_assert(kRows <= kLanes, "a lane a row");
  float result = results[0];
#pragma unroll
  for (int r = 1; r < kRows; ++r) result = lane == r ? results[r] : result;
  const int64_t output = first_output + lane * groups;
  if (lane < kRows && output < outputs) {
    store_result(args.out, args.out_dtype, args.cluster > 1 ? output : output * args.parts + part,
                 mean_of(result, args));
  }
}

template <typename Format, typename Op, int kLanes, int kUnroll, int kRows>
__global__ void __launch_bounds__(kLanes > 256 ? kLanes : 256)
    reduce_rows(const __grid_constant__ ReduceArgs args) {
  const int lane = threadIdx.x % kLanes;
  const int groups = kLanes > 32 ? 1 : blockDim.x / kLanes;
  // One instruction reads adjacent rows.
  const int64_t first_output =
      kLanes > 32 ? blockIdx.x / args.parts
                  : static_cast<int64_t>(blockIdx.x) * groups * kRows + threadIdx.x / kLanes;
  const int64_t outputs = args.outer * args.inner;
  const int64_t part = kLanes > 32 ? blockIdx.x % args.parts : 0;
  const int64_t first = part * args.part;
  const int64_t elements = min(args.length - first, args.part);
  grid_dependency_wait();
  grid_dependency_launch();

  Accumulator<Format, Op> seen[kRows];
  Span<Format, Op, kLanes> spans[kRows];
  int longest = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t output = first_output + r * groups;
    seen[r].clear();
    spans[r].count = 0;
    spans[r].vectors = args.x;
    if (output < outputs) {
      const char* start = row_of(args, output) + first * args.length_stride;
      spans[r].begin(args, start, elements, lane, seen[r].values[0]);
    }
    longest = max(longest, spans[r].count);
  }
  for (int v = 0; v < longest; v += kLanes * kUnroll) {
    uint32_t words[kRows][kUnroll][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[r][u][w] = none_of<Format, Op>();
        if (v + u * kLanes < spans[r].count) {
          load_once(words[r][u], spans[r].vectors + u * (kLanes * 16));
        }
      }
      spans[r].vectors += kLanes * kUnroll * 16;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) seen[r].add(words[r][u]);
    }
  }

  finish_rows<Op, kLanes, kRows>(args, seen, lane, groups, first_output, part);
}

// For rows of whole vectors at multiples of 16 bytes, `inner_stride` apart: no ends, no division,
// and few instructions before the first load.
template <typename Format, typename Op, int kLanes, int kUnroll, int kRows>
__global__ void __launch_bounds__(kLanes > 256 ? kLanes : 256)
    reduce_rows_aligned(const __grid_constant__ ReduceArgs args) {
  const int lane = threadIdx.x % kLanes;
  constexpr int kGroups = kLanes > 32 ? 1 : 32 / kLanes;  // per warp, with consecutive rows
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t first_output =
      kLanes > 32 ? blockIdx.x / args.parts : warp * (kGroups * kRows) + threadIdx.x % 32 / kLanes;
  const int64_t part = kLanes > 32 ? blockIdx.x % args.parts : 0;
  const int64_t first = part * args.part;
  const int vectors = static_cast<int>(min(args.length - first, args.part)) / (16 / Format::kBytes);
  const char* address =
      args.x + first_output * args.inner_stride + first * Format::kBytes + lane * 16;
  const int64_t next_row = kGroups * args.inner_stride;
  int64_t left = args.inner - first_output;  // rows from the first on
  if constexpr (kLanes >= 32) {
    // Prefetched by the lanes at the beginning of 32 bytes.
    if (is_prefetching(args.prefetch_blocks) && lane % 2 == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (lane + u * kLanes < vectors && r * kGroups < left) {
            prefetch_l2(address + r * next_row + u * (kLanes * 16));
          }
        }
      }
    }
  }
  grid_dependency_wait();
  grid_dependency_launch();

  Accumulator<Format, Op> seen[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) seen[r].clear();
  for (int v = lane; v < vectors; v += kLanes * kUnroll) {
    uint32_t words[kRows][kUnroll][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[r][u][w] = none_of<Format, Op>();
        if (v + u * kLanes < vectors && r * kGroups < left) {
          load_once(words[r][u], address + r * next_row + u * (kLanes * 16));
        }
      }
    }
    address += kLanes * kUnroll * 16;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) seen[r].add(words[r][u]);
    }
  }
  finish_rows<Op, kLanes, kRows>(args, seen, lane, kGroups, first_output, part);
}

// A row of `words` 32-bit words in shared memory.
template <typename Format, typename Op>
__device__ __forceinline__ float words_total(const uint32_t* row, int words) {
  float result[2] = {Op::none(), Op::none()};
  int w = 0;
  if constexpr (Format::kBytes == 4) {
    for (; w + 1 < words; w += 2) {
      result[0] = Op()(result[0], __uint_as_float(row[w]));
      result[1] = Op()(result[1], __uint_as_float(row[w + 1]));
    }
    if (w < words) result[0] = Op()(result[0], __uint_as_float(row[w]));
  } else {
#pragma unroll 4
    for (; w < words; ++w) {
      float pair[2];
      Format::unpack(row[w], pair);
      result[0] = Op()(result[0], pair[0]);
      result[1] = Op()(result[1], pair[1]);
    }
  }
  return Op()(result[0], result[1]);
}

// Rows of a few elements without gaps: TMA copies a block's rows to shared memory in one piece,
// regardless of their alignment, and each thread reduces its own rows, by words if they begin at
// one. Of 16-bit rows with an odd length, a pair begins at a word.
template <typename Format, typename Op>
__global__ void __launch_bounds__(kReducePackedThreads)
    reduce_rows_packed(const __grid_constant__ ReduceArgs args) {
  __shared__ __align__(16) char staged[kReducePackedBytes + 16];
  __shared__ uint64_t arrived;
  const int length = static_cast<int>(args.length);
  const int row_bytes = length * Format::kBytes;
  const int rows_of_block = reduce_packed_rows(row_bytes);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * rows_of_block;
  const int rows = static_cast<int>(min(args.inner - first_row, int64_t{rows_of_block}));
  const char* start = args.x + first_row * row_bytes;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(start) % 16);
  const int bytes = shift + rows * row_bytes;  // from the aligned address before the first row
  const char* aligned = start - shift;
  const char* end = args.x + args.inner * row_bytes;
  // TMA copies whole 16 bytes of the tensor, threads the rest at its ends.
  const int begin = aligned < args.x ? 16 : 0;
  const int up = (bytes + 15) & ~15;
  const int stop = aligned + up > end ? up - 16 : up;
  if (threadIdx.x == 0) {
    mbarrier_init(&arrived, 1);
    mbarrier_init_fence();
  }
  grid_dependency_wait();
  grid_dependency_launch();

  if (threadIdx.x == 0) {
    const int whole = max(stop - begin, 0);
    mbarrier_expect(&arrived, whole);
    if (whole > 0) bulk_load(staged + begin, aligned + begin, whole, &arrived);
  }
  const auto by_element = [&](int first) {
    using T = std::conditional_t<Format::kBytes == 2, uint16_t, uint32_t>;
    const int place = static_cast<int>(threadIdx.x) * Format::kBytes, offset = first + place;
    if (place < 16 && offset >= shift && offset < bytes) {
      *reinterpret_cast<T*>(staged + offset) = *reinterpret_cast<const T*>(aligned + offset);
    }
  };
  if (begin > 0) by_element(0);
  if (stop < up) by_element(stop);
  __syncthreads();
  mbarrier_wait(&arrived, 0);
  const auto store = [&](int row, float value) {
    store_result(args.out, args.out_dtype, first_row + row, mean_of(value, args));
  };
  if constexpr (Format::kBytes == 2) {
    if (length % 2 != 0 && shift % 4 == 0) {
      const int half = length / 2;
      const bool wide = args.out_dtype != DType::kFloat32 &&
                        reinterpret_cast<uintptr_t>(args.out) % sizeof(uint32_t) == 0;
      for (int r = 2 * threadIdx.x; r < rows; r += 2 * kReducePackedThreads) {
        const uint32_t* row = reinterpret_cast<const uint32_t*>(staged + shift + r * row_bytes);
        float pair[2];
        Format::unpack(row[half], pair);
        pair[0] = Op()(words_total<Format, Op>(row, half), pair[0]);
        pair[1] = Op()(pair[1], words_total<Format, Op>(row + half + 1, half));
        if (wide && r + 1 < rows) {
          for (float& value : pair) value = mean_of(value, args);
          reinterpret_cast<uint32_t*>(args.out)[(first_row + r) / 2] = Format::pack(pair);
          continue;
        }
        store(r, pair[0]);
        if (r + 1 < rows) store(r + 1, pair[1]);
      }
      return;
    }
  }
  for (int r = threadIdx.x; r < rows; r += kReducePackedThreads) {
    const char* row = staged + shift + r * row_bytes;
    if (shift % 4 == 0 && row_bytes % 4 == 0) {
      store(r, words_total<Format, Op>(reinterpret_cast<const uint32_t*>(row), row_bytes / 4));
      continue;
    }
    float result = Op::none();
#pragma unroll 4
    for (int i = 0; i < length; ++i) result = Op()(result, Format::load(row + i * Format::kBytes));
    store(r, result);
  }
}

// Many rows of so few elements that a thread computes a whole vector of results: it reads as many
// vectors as a row has elements.
template <typename Format, typename Op, int kLength>
__global__ void __launch_bounds__(256) reduce_rows_tiny(const __grid_constant__ ReduceArgs args) {
  constexpr int kRows = 16 / Format::kBytes;
  constexpr int kPerWord = 4 / Format::kBytes;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kRows;
  const int rows = static_cast<int>(min(args.inner - first, int64_t{kRows}));
  const char* from = args.x + first * kLength * Format::kBytes;
  grid_dependency_wait();
  grid_dependency_launch();

  float results[kRows];
  if (rows == kRows) {
    uint32_t words[kLength][4];
#pragma unroll
    for (int v = 0; v < kLength; ++v) load_vector(words[v], from + v * 16);
    float values[kLength * kRows];
#pragma unroll
    for (int w = 0; w < kLength * 4; ++w) {
      Format::unpack(words[w / 4][w % 4], &values[w * kPerWord]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      results[r] = values[r * kLength];
#pragma unroll
      for (int i = 1; i < kLength; ++i) results[r] = Op()(results[r], values[r * kLength + i]);
      results[r] = mean_of(results[r], args);
    }
    if constexpr (Format::kBytes == 2) {
      if (args.out_dtype != DType::kFloat32) {
        uint32_t packed[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) packed[w] = Format::pack(&results[2 * w]);
        store_vector(static_cast<char*>(args.out) + first * 2, packed);
        return;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) store_result(args.out, args.out_dtype, first + r, results[r]);
    return;
  }
  for (int r = 0; r < rows; ++r) {
    float result = Op::none();
    for (int i = 0; i < kLength; ++i) {
      result = Op()(result, Format::load(from + (r * kLength + i) * Format::kBytes));
    }
    store_result(args.out, args.out_dtype, first + r, mean_of(result, args));
  }
}

#define TIERCEL_TINY(dtype, op, length)                                \
  {DType::k##dtype,                                                    \
   op##Of::kMax,                                                       \
   ReduceKernel::Kind::rows_tiny,                                      \
   length,                                                             \
   1,                                                                  \
   16,                                                                 \
   256,                                                                \
   Kernel("reduce_rows_tiny<" #dtype ", " #op ", length=" #length ">", \
          reinterpret_cast<const void*>(reduce_rows_tiny<dtype##Format, op##Of, length>))}
#define TIERCEL_ROWS(kind, dtype, op, lanes, unroll, rows)                                       \
  {DType::k##dtype,                                                                              \
   op##Of::kMax,                                                                                 \
   ReduceKernel::Kind::kind,                                                                     \
   lanes,                                                                                        \
   rows,                                                                                         \
   16,                                                                                           \
   lanes > 256 ? lanes : 256,                                                                    \
   Kernel(                                                                                       \
       "reduce_" #kind "<" #dtype ", " #op ", lanes=" #lanes ", unroll=" #unroll ", rows=" #rows \
       ">",                                                                                      \
       reinterpret_cast<const void*>(reduce_##kind<dtype##Format, op##Of, lanes, unroll, rows>))}
#define TIERCEL_PACKED(dtype, op)                    \
  {DType::k##dtype,                                  \
   op##Of::kMax,                                     \
   ReduceKernel::Kind::rows_packed,                  \
   1,                                                \
   1,                                                \
   16,                                               \
   kReducePackedThreads,                             \
   Kernel("reduce_rows_packed<" #dtype ", " #op ">", \
          reinterpret_cast<const void*>(reduce_rows_packed<dtype##Format, op##Of>))}
#define TIERCEL_ALL_ROWS(dtype, op)                                                             \
  TIERCEL_PACKED(dtype, op), TIERCEL_TINY(dtype, op, 2), TIERCEL_TINY(dtype, op, 3),            \
      TIERCEL_TINY(dtype, op, 4), TIERCEL_TINY(dtype, op, 5), TIERCEL_TINY(dtype, op, 6),       \
      TIERCEL_ROWS(rows_turned, dtype, op, 4, 1, 8),                                            \
      TIERCEL_ROWS(rows_turned, dtype, op, 8, 1, 8),                                            \
      TIERCEL_ROWS(rows_turned, dtype, op, 16, 1, 8),                                           \
      TIERCEL_ROWS(rows_turned, dtype, op, 32, 1, 8),                                           \
      TIERCEL_ROWS(rows_aligned, dtype, op, 8, 1, 1),                                           \
      TIERCEL_ROWS(rows_aligned, dtype, op, 32, 2, 2),                                          \
      TIERCEL_ROWS(rows_aligned, dtype, op, 32, 4, 1),                                          \
      TIERCEL_ROWS(rows_aligned, dtype, op, 128, 2, 1),                                         \
      TIERCEL_ROWS(rows_aligned, dtype, op, 256, 2, 1),                                         \
      TIERCEL_ROWS(rows_aligned, dtype, op, 512, 2, 1), TIERCEL_ROWS(rows, dtype, op, 1, 1, 1), \
      TIERCEL_ROWS(rows, dtype, op, 8, 2, 1), TIERCEL_ROWS(rows, dtype, op, 32, 4, 1),          \
      TIERCEL_ROWS(rows, dtype, op, 256, 2, 1)

// By dtype and operation, then lanes.
const ReduceKernel kKernels[] = {
    TIERCEL_ALL_ROWS(Float32, Sum),  TIERCEL_ALL_ROWS(Float32, Max),
    TIERCEL_ALL_ROWS(BFloat16, Sum), TIERCEL_ALL_ROWS(BFloat16, Max),
    TIERCEL_ALL_ROWS(Float16, Sum),  TIERCEL_ALL_ROWS(Float16, Max),
};

}  // namespace

const ReduceKernel* reduce_rows_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
