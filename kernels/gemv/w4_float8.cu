// SPDX-License-Identifier: Apache-2.0
// w4_linear for activations of e4m3: out[t, n] = act(x_scale[t] * sum over k of x[t, k] *
// weight[n, k] + bias[n]), the weight in 4 bits.
//
// The plan is that of w4_tiles.cu: rows of the weight are the product's rows, decoded in registers
// as the A operand of wgmma, tokens are its columns, and the blocks of a cluster split K. Products
// are in e4m3, which holds every 4-bit number exactly, at twice the rate of 16 bits.
//  - A thread needs 2 bytes of each 8 of its row. It loads the word that has them, so that the 16
//    bytes for 32 values of K are two loads of 4 bytes, and looks up e4m3 with byte permutations:
//    10 instructions for 8 weights of e2m1, 12 for 8 whole numbers, whose table of 16 bytes comes
//    from shared memory by their zero point.
//  - MXFP4's scales are powers of two. A block finds the largest of each row in its share of K, and
//    lowers the exponents of looked up bytes by the distance to it, which is exact up to 2^14. All
//    products of a row then add up in one accumulator.
//  - Scales of whole numbers multiply a group's sums, which are then added in float32. With groups
//    of 128, four products share that; smaller groups are scaled after each 32 of K.
//  - A step's operands have separate registers, so that decoding does not wait for the products of
//    the previous chunk.
#include <cstdint>
#include <iterator>

#include "kernels/gemv/w4_float8_kernels.h"
#include "kernels/gemv/w4_float8_multiply.cuh"
#include "kernels/gemv/w4_tile.cuh"
#include "kernels/sm90/float_format.cuh"

namespace tiercel {
namespace {

template <bool kFloats, int kTokens, int kStages, int kTogether, int kGroup>
__global__ void __launch_bounds__(w4_threads(kTogether, 1), kTogether)
    w4_float8(const __grid_constant__ W4Float8Args args) {
  using Shape = W4Tile<kTokens, 1, kStages, kTogether, 1>;
  constexpr bool kHold = kTogether == 1;
  extern __shared__ __align__(1024) char shared[];
  __shared__ W4Barriers<Shape> barriers;
  __shared__ float x_scales[kTokens];
  __shared__ __align__(16) uint8_t tables[kFloats ? 64 : 256];
  const W4TilesArgs& tile_args = args.tile;
  const W4Scales& all = tile_args.scales;
  const W4Share share(tile_args, kTokens);
  const int first = share.first, last = share.last;
  if constexpr (kFloats) {
    if (threadIdx.x < 64) write_small_magnitudes(tables, threadIdx.x);
  } else if (threadIdx.x < 256) {
    write_number(tables, threadIdx.x / 16, threadIdx.x % 16);
  }
  barriers.init(share);
  grid_dependency_launch();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (warp >= kW4Consumers / 32) {
    run_loader<Shape>(tile_args, share, shared, barriers, [](int) {});
    return;
  }
  take_registers<Shape>();

  grid_dependency_wait();
  if (threadIdx.x < kTokens) {
    const int token = share.first_token + threadIdx.x;
    const bool inside = token < tile_args.tokens;
    x_scales[threadIdx.x] = inside ? args.x_scale[token * int64_t{args.x_scale_step}] : 0.0f;
  }
  // Rows of this thread, within the block, are my_row and 8 further.
  const int my_row = warp * 16 + lane / 4;
  Float8Rows rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row = min(share.first_row + my_row + half * 8, tile_args.features - 1);
    rows.scale[half] = kept<kHold>(row * static_cast<uint32_t>(all.scale_row));
    rows.zero[half] = kept<kHold>(row * static_cast<uint32_t>(all.zero_row));
  }
  if constexpr (kFloats) {
    constexpr int kGroups = kW4Step / 32;
    largest_exponents(rows.largest, all.scale, rows.scale, first * kGroups,
                      min(last * kGroups, tile_args.k / 32));
  }
  float sums[kTokens / 2];
  multiply_float8<kFloats, kGroup, kStages, Shape::kStageBytes, kHold>(
      sums, all, args.float16_scales, tile_args.k, rows, first, last, my_row, shared, tables,
      barriers.filled, barriers.freed, [] { consumers_sync<Shape>(); }, [] {});
  if constexpr (kFloats) scale_by_largest(sums, rows.largest);
  const float factor =
      tile_args.epilogue.global_scale != nullptr ? *tile_args.epilogue.global_scale : 1.0f;
  const float* const my_scales = x_scales + lane % 4 * 2;
  const auto finish = [&](float sum, int token, float bias) {
    return fmaf(sum * my_scales[token], factor, bias);
  };
  finish_tile<Shape, BFloat16>(tile_args, shared, barriers, sums, my_row, finish);
}

#define TIERCEL_FLOAT8(floats, tokens, stages, together, group, name)                        \
  {tokens,                                                                                   \
   floats,                                                                                   \
   group,                                                                                    \
   together,                                                                                 \
   stages,                                                                                   \
   Kernel("w4_float8<" name ", tokens=" #tokens ">",                                         \
          reinterpret_cast<const void*>(w4_float8<floats, tokens, stages, together, group>), \
          kW4Float8MaxShared)}

const W4Float8Kernel kKernels[] = {TIERCEL_FLOAT8(true, 32, 8, 2, 128, "e2m1"),
                                   TIERCEL_FLOAT8(true, 128, 8, 1, 128, "e2m1"),
                                   TIERCEL_FLOAT8(true, 256, 5, 1, 128, "e2m1"),
                                   TIERCEL_FLOAT8(false, 32, 8, 2, 128, "int4, group=128"),
                                   TIERCEL_FLOAT8(false, 128, 8, 1, 128, "int4, group=128"),
                                   TIERCEL_FLOAT8(false, 32, 8, 1, 32, "int4, group=32"),
                                   TIERCEL_FLOAT8(false, 128, 8, 1, 32, "int4, group=32")};

}  // namespace

const W4Float8Kernel* w4_float8_kernels(int* count) {
  *count = static_cast<int>(std::size(kKernels));
  return kKernels;
}

}  // namespace tiercel
