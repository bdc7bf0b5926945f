// SPDX-License-Identifier: Apache-2.0
// decode_combine: the tiles that several blocks of decode_attention shared.
//
// A block has one row of a tile, if that is one of those, and ends at once otherwise. Its warps
// take the parts in turn, 9 reads under way at a time (of one sequence and 8 key heads: all of
// them), in a fixed order: parts lie in the L2, so the latency of a few such rounds is all there
// is.
#include <cstdint>

#include "kernels/attention/decode_arithmetic.cuh"
#include "kernels/attention/decode_kernels.h"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kAtOnce = 9;

struct Part {
  float largest = -INFINITY;
  float sum = 0.0f;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ __forceinline__ void add(float2 sums, float4 other) {
    if (sums.x == -INFINITY) return;
    const float grown = fmaxf(largest, sums.x);
    const float mine = power_of_2(largest - grown), theirs = power_of_2(sums.x - grown);
    largest = grown;
    sum = sum * mine + sums.y * theirs;
    out.x = out.x * mine + other.x * theirs;
    out.y = out.y * mine + other.y * theirs;
    out.z = out.z * mine + other.z * theirs;
    out.w = out.w * mine + other.w * theirs;
  }
};

// `pitch` is D of the kernel that wrote the parts. Dimensions are 4 a lane; of more than 128, the
// first half and the second are the grid's third dimension.
template <typename Format>
__global__ void __launch_bounds__(kDecodeThreads)
    decode_combine(const __grid_constant__ DecodeArgs args, int tile_rows, int pitch) {
  __shared__ float4 outs[kDecodeWarps][32];
  __shared__ float2 sums[kDecodeWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.y, d = blockIdx.z * 128 + 4 * lane;
  grid_dependency_wait();
  grid_dependency_launch();
  const int4 tile = args.tiles[blockIdx.x];
  const int parts = tile.w, key_head = tile.y / args.row_blocks;
  const int r = tile.y % args.row_blocks * tile_rows + row;
  if (parts == 0 || r >= args.rows) return;

  Part part;
  const bool real = d < args.d;
  for (int first = warp; first < parts; first += kDecodeWarps * kAtOnce) {
    float2 sum[kAtOnce];
    float4 out[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kDecodeWarps;
      sum[i] = make_float2(-INFINITY, 0.0f);
      out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (at >= parts) continue;
      // The first block has it as its last tile, the others as their first.
      const int64_t block = tile.z + int64_t{at} * args.columns;
      const int64_t line = (2 * block + (at == 0)) * tile_rows + row;
      sum[i] = args.partial_sums[line];
      if (real) out[i] = *reinterpret_cast<const float4*>(args.partial + line * pitch + d);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) part.add(sum[i], out[i]);
  }
  outs[warp][lane] = part.out;
  if (lane == 0) sums[warp] = make_float2(part.largest, part.sum);
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int other = 1; other < kDecodeWarps; ++other) part.add(sums[other], outs[other][lane]);

  const int query = r / args.group, head = key_head * args.group + r % args.group;
  const float factor =
      normalizer(part.sum, scale_of(args.v_scale, args.v_scale_per_head, key_head));
  if (real) {
    const float values[4] = {part.out.x * factor, part.out.y * factor, part.out.z * factor,
                             part.out.w * factor};
    uint32_t words[2];
    pack<Format, 2>(values, words);
    store_vector(args.out + tile.x * args.out_strides[0] + query * args.out_strides[1] +
                     head * args.out_strides[2] + d * 2,
                 words);
  }
  if (d == 0 && args.lse != nullptr) {
    args.lse[(static_cast<int64_t>(tile.x) * args.heads + head) * args.queries + query] =
        log_of_sum(part.largest, part.sum);
  }
}

#define TIERCEL_COMBINE(dtype) \
  {DType::k##dtype,            \
   Kernel("decode_combine<" #dtype ">", reinterpret_cast<const void*>(decode_combine<dtype>))}

const DecodeCombineKernel kKernels[] = {TIERCEL_COMBINE(BFloat16), TIERCEL_COMBINE(Float16)};

}  // namespace

const DecodeCombineKernel* decode_combine_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
