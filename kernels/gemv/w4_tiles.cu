// SPDX-License-Identifier: Apache-2.0
// w4_linear for many tokens: out[t, n] = act(sum over k of x[t, k] * weight[n, k] + bias[n]), the
// weight in 4 bits.
//
// Weights are the A operand of wgmma, in registers: a thread decodes them there, so that they cost
// neither shared memory nor a second pass. Rows of the weight are therefore the product's rows, and
// tokens its columns.
//  - A block has 128 rows of the weight and up to 256 tokens. One warp loads both by TMA into a
//    ring of stages of 128 values of K; two warpgroups decode and multiply, each 64 rows.
//  - A thread needs one byte of every four of its row. It reads all of them, 16 bytes at a time
//    (threads that share a row read the same address), and picks its bytes: ten instructions for
//    four weights. The next 32 of K are decoded while the tensor cores multiply the last.
//  - Where there are fewer tiles than multiprocessors, the blocks of a cluster split K. Each leaves
//    its sums in its shared memory and adds up those of every block for its share of the tokens, in
//    the order of K.
//  - Results are turned in shared memory, so that threads store 16 bytes of a token.
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "kernels/gemv/w4_tile.cuh"
#include "kernels/gemv/w4_tiles_kernels.h"
#include "kernels/gemv/w4_weights.cuh"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

constexpr int kRowBytes = kW4Step / 2;  // of a row of the weight in a stage

template <bool kFloats, bool kBFloat16, int kTokens, int kRows, int kStages, int kTogether>
__global__ void __launch_bounds__(w4_threads(kTogether), kTogether)
    w4_tiles(const __grid_constant__ W4TilesArgs args) {
  using Shape = W4Tile<kTokens, kRows, kStages, 2>;
  using Format = std::conditional_t<kBFloat16, BFloat16, Float16>;
  constexpr int kMatrices = Shape::kMatrices;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t filled[kStages], freed[kStages];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  const int blocks = cluster_blocks(), rank = cluster_rank();
  const int tile = blockIdx.x / blocks;
  const int first_token = tile % args.token_tiles * kTokens;
  const int first_row = tile / args.token_tiles * kRows;
  const int share = (args.steps + blocks - 1) / blocks;
  const int first = min(rank * share, args.steps), last = min(first + share, args.steps);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(filled + s, 1);
      mbarrier_init(freed + s, kW4Consumers / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_launch();

  // Alone on a multiprocessor, the loader's warpgroup gives registers to the others: of 384 times
  // 168, 128 times 24 and 256 times 240.
  if (warp >= kW4Consumers / 32) {
    if (kTogether == 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == kW4Consumers / 32 && lane == 0) {
      load_stages<Shape>(args, shared, filled, freed, first, last, first_row, first_token);
    }
    __syncwarp();
    if (blocks > 1) {
      cluster_arrive();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
    return;
  }
  if (kTogether == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");

  grid_dependency_wait();
  // Rows of this thread, within the block, are my_row + 64 m and 8 further.
  const int my_row = warp / 4 * (64 * kMatrices) + warp % 4 * 16 + lane / 4;
  uint32_t scale_rows[kMatrices][2], zero_rows[kMatrices][2];  // bytes
#pragma unroll
  for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = min(first_row + my_row + m * 64 + half * 8, args.features - 1);
      scale_rows[m][half] = row * static_cast<uint32_t>(args.scales.scale_row);
      zero_rows[m][half] = row * static_cast<uint32_t>(args.scales.zero_row);
    }
  }
  float sums[kMatrices][kTokens / 2];
#pragma unroll
  for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
    for (float& sum : sums[m]) sum = 0.0f;
  }
  const uint32_t choice = byte_choice<kFloats>(lane % 4);
  const uint32_t base = shared_address(shared);
  const uint32_t swizzle = lane / 8;  // of chunks of 16 bytes, by rows of 64
  StepBits<kFloats> bits[kMatrices][2];
  const auto load_bits = [&](int step) {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_scales<kFloats>(bits[m][half], args.scales, args.scales.scale, args.scales.zero,
                             scale_rows[m][half], zero_rows[m][half], step * kW4Step, args.k);
      }
    }
  };
  StepScales<kFloats> scales[kMatrices][2];
  const auto unpack_bits = [&] {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unpack_scales<kFloats, kBFloat16>(scales[m][half], bits[m][half], args.scales);
      }
    }
  };
  uint32_t a[2][2][kMatrices][4];
  // The `chunk`th 32 values of K of a stage, to the buffer of its parity.
  const auto decode_chunk = [&](int stage, int chunk) {
    const char* const weights = shared + stage * Shape::kStageBytes + Shape::kXBytes;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = *reinterpret_cast<const uint4*>(
            weights + (my_row + m * 64 + half * 8) * kRowBytes + (chunk ^ swizzle) * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t pairs[2];
          decode_bytes<kFloats, kBFloat16>(pairs, i == 0 ? v.x : v.z, i == 0 ? v.y : v.w, choice);
          scale_pairs<kFloats, kBFloat16>(pairs, scales[m][half], chunk * 2 + i);
          a[chunk % 2][i][m][half] = pairs[0];
          a[chunk % 2][i][m][half + 2] = pairs[1];
        }
      }
    }
  };
  int stage = 0;
  uint32_t parity = 0;
  if (first < last) {
    load_bits(first);
    unpack_bits();
    load_bits(min(first + 1, last - 1));
    mbarrier_wait(filled, 0);
    decode_chunk(0, 0);
  }
  for (int step = first; step < last; ++step) {
    const uint32_t x = base + stage * Shape::kStageBytes;
    // The last step decodes its own first values once more, without a branch among products.
    const bool more = step + 1 < last;
    const int next_stage = !more ? stage : stage + 1 == kStages ? 0 : stage + 1;
    const uint32_t next_parity = parity ^ (more && next_stage == 0);
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint64_t b =
            rows_descriptor(x + chunk / 2 * (Shape::kXBytes / 2) + (chunk % 2 * 2 + i) * 32);
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          wgmma_from_registers<kBFloat16, false>(sums[m], a[chunk % 2][i][m], b, true);
        }
      }
      wgmma_commit();
      if (chunk == 3) {
        unpack_bits();
        mbarrier_wait(filled + next_stage, next_parity);
      }
      wgmma_wait<1>();
      decode_chunk(chunk < 3 ? stage : next_stage, (chunk + 1) % 4);
    }
    load_bits(min(step + 2, last - 1));
    // The compiler runs products one by one if some are in flight at the loop's end.
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) wgmma_settle(sums[m]);
    if (lane == 0) mbarrier_arrive(freed + stage);
    stage = next_stage, parity = next_parity;
  }

  float factor = missing_power<kBFloat16>(args.scales.format);
  if (args.epilogue.global_scale != nullptr) factor *= *args.epilogue.global_scale;
  const auto finish = [&](float sum, int, float bias) { return fmaf(sum, factor, bias); };
  finish_tile<Shape, Format>(args, shared, sums, my_row, first_row, first_token, blocks, rank,
                             finish);
}

#define TIERCEL_TILES(floats, bfloat16, tokens, rows, stages, together, name)                     \
  {tokens,                                                                                        \
   rows,                                                                                          \
   floats,                                                                                        \
   bfloat16,                                                                                      \
   together,                                                                                      \
   stages,                                                                                        \
   Kernel(                                                                                        \
       "w4_tiles<" name ", tokens=" #tokens ", rows=" #rows ">",                                  \
       reinterpret_cast<const void*>(w4_tiles<floats, bfloat16, tokens, rows, stages, together>), \
       kW4MaxShared)}

#define TIERCEL_TILES_OF(floats, bfloat16, name)             \
  TIERCEL_TILES(floats, bfloat16, 32, 128, 6, 2, name),      \
      TIERCEL_TILES(floats, bfloat16, 64, 128, 4, 2, name),  \
      TIERCEL_TILES(floats, bfloat16, 128, 128, 5, 1, name), \
      TIERCEL_TILES(floats, bfloat16, 256, 128, 3, 1, name)

const W4TilesKernel kKernels[] = {TIERCEL_TILES_OF(true, true, "e2m1, bfloat16"),
                                  TIERCEL_TILES_OF(false, true, "int4, bfloat16"),
                                  TIERCEL_TILES_OF(true, false, "e2m1, float16"),
                                  TIERCEL_TILES_OF(false, false, "int4, float16")};

}  // namespace

const W4TilesKernel* w4_tiles_kernels(int* count) {
  *count = static_cast<int>(std::size(kKernels));
  return kKernels;
}

}  // namespace tiercel
