// SPDX-License-Identifier: Apache-2.0
// reduce along rows: the reduced dimension is contiguous, or no dimension is.
//
// The plan. Each element is read once and next to nothing is written: 16384 rows of 4096 bfloat16
// are 134 MB, 31 us at 4.4 TB/s. kLanes threads share a row (part of a warp, a warp, or a block),
// reading 16-byte vectors side by side, kUnroll of each of kRows rows in flight: rows and vectors
// together are four loads a thread, or two where a whole block has a row. Sums are float32, one for
// each place in a vector, then a tree over places, lanes and warps: a fixed order, whatever the
// timing. A row that does not begin or end on 16 bytes has its ends read by element. Few long rows
// are split: among the blocks of a cluster, which combine theirs in shared memory, or in parts whose
// results go to a workspace and through a kernel of this file once more.
#include <cooperative_groups.h>

#include <cstdint>

#include "kernels/reduce/accumulate.cuh"
#include "kernels/reduce/reduce_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

namespace cg = cooperative_groups;

// Where an output's row begins. The division is for what is left of x in two dimensions only.
__device__ __forceinline__ const char* row_of(const ReduceArgs& args, int64_t output) {
  if (args.outer == 1) return args.x + output * args.inner_stride;
  return args.x + output / args.inner * args.outer_stride + output % args.inner * args.inner_stride;
}

// `count` elements by lane `lane` of kLanes; elements before the first vector and after the last
// one, or all of them where they are apart, go to `edge`.
template <typename Format, typename Op, int kLanes>
struct Span {
  const char* vectors;  // the lane's first
  int count;            // of vectors, from there on: those of all lanes

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

template <typename Format, typename Op, int kLanes, int kUnroll, int kRows>
__global__ void __launch_bounds__(kLanes > 256 ? kLanes : 256)
    reduce_rows(const __grid_constant__ ReduceArgs args) {
  const int lane = threadIdx.x % kLanes;
  const int groups = kLanes > 32 ? 1 : blockDim.x / kLanes;
  // Rows next to each other are read by one instruction.
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

  float results[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    results[r] = lanes_reduce<(kLanes < 32 ? kLanes : 32)>(seen[r].total(), Op());
  }
  if constexpr (kLanes > 32) {
    constexpr int kWarps = kLanes / 32;
    static_assert(kRows == 1, "a block a row");
    __shared__ float scratch[kWarps];
    __shared__ float of_cluster[kReduceMaxCluster];
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = results[0];
    __syncthreads();
    results[0] = lanes_reduce<kWarps>(scratch[threadIdx.x % kWarps], Op());
    if (args.cluster > 1) {
      const cg::cluster_group cluster = cg::this_cluster();
      if (threadIdx.x == 0) {
        *cluster.map_shared_rank(&of_cluster[cluster.block_rank()], 0) = results[0];
      }
      cluster.sync();
      if (cluster.block_rank() != 0 || threadIdx.x != 0) return;
      results[0] = of_cluster[0];
      for (int b = 1; b < args.cluster; ++b) results[0] = Op()(results[0], of_cluster[b]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t output = first_output + r * groups;
    if (lane == r % kLanes && output < outputs) {
      store_result(args.out, args.out_dtype, args.cluster > 1 ? output : output * args.parts + part,
                   results[r] / args.divisor);
    }
  }
}

#define TIERCEL_ROWS(dtype, op, lanes, unroll, rows)                                       \
  {DType::k##dtype,                                                                        \
   op##Of::kMax,                                                                           \
   lanes,                                                                                  \
   rows,                                                                                   \
   16,                                                                                     \
   lanes > 256 ? lanes : 256,                                                              \
   Kernel("reduce_rows<" #dtype ", " #op ", lanes=" #lanes ", unroll=" #unroll             \
          ", rows=" #rows ">",                                                             \
          reinterpret_cast<const void*>(reduce_rows<dtype##Format, op##Of, lanes, unroll, rows>))}
#define TIERCEL_ALL_ROWS(dtype, op)                                               \
  TIERCEL_ROWS(dtype, op, 1, 1, 4), TIERCEL_ROWS(dtype, op, 4, 1, 4),             \
      TIERCEL_ROWS(dtype, op, 8, 1, 4), TIERCEL_ROWS(dtype, op, 16, 1, 4),        \
      TIERCEL_ROWS(dtype, op, 32, 2, 2), TIERCEL_ROWS(dtype, op, 32, 4, 1),       \
      TIERCEL_ROWS(dtype, op, 256, 2, 1), TIERCEL_ROWS(dtype, op, 512, 2, 1)

// By dtype and operation, then by lanes.
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
