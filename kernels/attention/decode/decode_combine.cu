// SPDX-License-Identifier: Apache-2.0
// decode_combine: the tiles that several blocks of decode_attention shared.
//
// A block has one row of a tile; it ends at once if no blocks share the tile. Its warps take the
// parts in turn, with 9 reads in flight (all parts of one sequence with 8 key heads), in a fixed
// order. Parts are in the L2, so the time is the latency of a few such rounds.
#include <cstdint>

#include "kernels/attention/decode/parts.cuh"
#include "kernels/sm90/early_launch.h"

namespace tiercel {
namespace {

constexpr int kAtOnce = 9;
constexpr int kWarps = kCombineThreads / 32;

// `pitch` is D of the kernel that wrote the parts. A lane has 4 dimensions; with more than 128, the
// grid's third dimension selects the first half or the second.
template <typename Format>
__global__ void __launch_bounds__(kCombineThreads)
    decode_combine(const __grid_constant__ DecodeArgs args, int tile_rows, int pitch) {
  __shared__ float4 outs[kWarps][32];
  __shared__ float2 sums[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.y, d = blockIdx.z * 128 + 4 * lane;
  grid_dependency_wait_and_launch(args.early_launch);
  const int4 tile = args.tiles[blockIdx.x];
  const int parts = tile.w, key_head = tile.y / args.row_blocks;
  const int r = tile.y % args.row_blocks * tile_rows + row;
  if (parts == 0 || r >= args.rows) return;

  Part part;
  const bool real = d < args.d;
  for (int first = warp; first < parts; first += kWarps * kAtOnce) {
    float2 sum[kAtOnce];
    float4 out[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kWarps;
      sum[i] = make_float2(-INFINITY, 0.0f);
      out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (at >= parts) continue;
      const int64_t line = part_slot(tile.z, args.columns, at) * tile_rows + row;
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
  for (int other = 1; other < kWarps; ++other) part.add(sums[other], outs[other][lane]);

  store_part<Format>(args, {tile.x, key_head, 0}, r, d, part);
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
