// SPDX-License-Identifier: Apache-2.0
// w4_linear for many tokens: out[t, n] = act(sum over k of x[t, k] * weight[n, k] + bias[n]), the
// weight in 4 bits.
//
// Weights are the A operand of wgmma, in registers: a thread decodes them there, so that they cost
// neither shared memory nor a second pass. Rows of the weight are therefore the product's rows, and
// tokens its columns.
//  - A block has 128 rows of the weight and up to 256 tokens. One warp loads both by TMA into a
//    ring of stages of 128 values of K; groups of two warpgroups decode and multiply, each
//    warpgroup 64 rows. Up to 96 tokens there are two groups, which take the stages in turn and add
//    up their sums at last: more warps hide the latency of decoding, which is what takes time
//    there.
//  - A thread needs one byte of every four of its row. It reads all of them, 16 bytes at a time
//    (threads that share a row read the same address), and picks its bytes: ten instructions for
//    four weights. The next 32 of K are decoded while the tensor cores multiply the last.
//  - Where there are fewer tiles than multiprocessors, the blocks of a cluster split K. Each sends
//    the others their shares of the tokens by asynchronous stores, and adds up its own share in the
//    order of K. A cluster barrier that publishes such stores would wait for all memory instead.
//  - Results are turned in shared memory, so that threads store 16 bytes of a token.
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "kernels/gemv/w4_tile.cuh"
#include "kernels/gemv/w4_tiles_kernels.h"
#include "kernels/gemv/w4_weights.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

constexpr int kRowBytes = kW4Step / 2;  // of a row of the weight in a stage

template <bool kFloats, bool kBFloat16, int kTokens, int kGroups, int kStages, int kBuffers>
__global__ void __launch_bounds__(w4_threads(1, kGroups), 1)
    w4_tiles(const __grid_constant__ W4TilesArgs args) {
  using Shape = W4Tile<kTokens, kGroups, kStages, 1, 2>;
  using Format = std::conditional_t<kBFloat16, BFloat16, Float16>;
  // With the registers, words are loaded one chunk ahead of their use.
  constexpr bool kAhead = kBuffers == 4;
  extern __shared__ __align__(1024) char shared[];
  __shared__ W4Barriers<Shape> barriers;
  const W4Share share(args, kTokens);
  barriers.init(share);
  grid_dependency_launch();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp >= Shape::kConsumers / 32) {
    run_loader<Shape>(args, share, shared, barriers);
    return;
  }
  take_registers<Shape>();

  grid_dependency_wait();
  const int lane = threadIdx.x % 32;
  const int group = warp / (kW4Consumers / 32);
  // Rows of this thread, within the block, are my_row and 8 further.
  const int my_row = warp % (kW4Consumers / 32) * 16 + lane / 4;
  uint32_t scale_rows[2], zero_rows[2];  // bytes
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row = min(share.first_row + my_row + half * 8, args.features - 1);
    scale_rows[half] = row * static_cast<uint32_t>(args.scales.scale_row);
    zero_rows[half] = row * static_cast<uint32_t>(args.scales.zero_row);
  }
  float sums[kTokens / 2];
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  const uint32_t choice = byte_choice<kFloats>(lane % 4);
  const uint32_t base = shared_address(shared);
  const uint64_t tiles = rows_descriptor(base);
  // This thread's first row of weights, and chunks of 16 bytes swizzled by rows.
  const char* const weights = shared + Shape::kXBytes + my_row * kRowBytes;
  const uint32_t swizzle = lane / 8 * 16;
  StepBits<kFloats> bits[2];
  const auto load_bits = [&](int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_scales<kFloats>(bits[half], args.scales, args.scales.scale, args.scales.zero,
                           scale_rows[half], zero_rows[half], min(step, share.last - 1) * kW4Step,
                           args.k);
    }
  };
  StepScales<kFloats> scales[2];
  const auto unpack_bits = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unpack_scales<kFloats, kBFloat16>(scales[half], bits[half], args.scales);
    }
  };
  uint4 words[2];  // of the rows, loaded before the products of the chunk before are awaited
  const auto load_words = [&](int stage, int chunk) {
    const char* const from = weights + stage * Shape::kStageBytes + (chunk * 16 ^ swizzle);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      words[half] = *reinterpret_cast<const uint4*>(from + half * 8 * kRowBytes);
    }
  };
  uint32_t a[kBuffers][2][4];
  // Decodes the words of the `chunk`th 32 values of K.
  const auto decode_chunk = [&](int chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = words[half];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t pairs[2];
        decode_bytes<kFloats, kBFloat16>(pairs, i == 0 ? v.x : v.z, i == 0 ? v.y : v.w, choice);
        scale_pairs<kFloats, kBFloat16>(pairs, scales[half], chunk * 2 + i);
        a[chunk % kBuffers][i][half] = pairs[0];
        a[chunk % kBuffers][i][half + 2] = pairs[1];
      }
    }
  };
  int stage = group;
  uint32_t parity = 0;
  int step = share.first + group;
  if (step < share.last) {
    load_bits(step);
    unpack_bits();
    load_bits(step + kGroups);
    mbarrier_wait(barriers.filled + stage, 0);
    load_words(stage, 0);
    decode_chunk(0);
    if (kAhead) load_words(stage, 1);
  }
  for (; step < share.last; step += kGroups) {
    const uint64_t x = tiles + stage * (Shape::kStageBytes >> 4);
    // The last step decodes its own first values once more, without a branch among products.
    const bool more = step + kGroups < share.last;
    int next_stage = stage;
    uint32_t next_parity = parity;
    if (more) {
      next_stage += kGroups;
      if (next_stage >= kStages) next_stage -= kStages, next_parity ^= 1;
    }
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int place = chunk / 2 * (Shape::kXBytes / 2) + (chunk % 2 * 2 + i) * 32;
        wgmma_from_registers<kBFloat16, false>(sums, a[chunk % kBuffers][i], x + (place >> 4),
                                               true);
      }
      wgmma_commit();
      if (chunk == (kAhead ? 2 : 3)) mbarrier_wait(barriers.filled + next_stage, next_parity);
      if (chunk == 3) unpack_bits();
      wgmma_wait<kAhead ? 2 : 1>();
      if (!kAhead) load_words(chunk < 3 ? stage : next_stage, (chunk + 1) % 4);
      decode_chunk((chunk + 1) % 4);
      if (kAhead) load_words(chunk < 2 ? stage : next_stage, (chunk + 2) % 4);
    }
    load_bits(step + 2 * kGroups);
    // The compiler runs products one by one if some are in flight at the loop's end.
    wgmma_wait<0>();
    wgmma_settle(sums);
    if (lane == 0) mbarrier_arrive(barriers.freed + stage);
    stage = next_stage, parity = next_parity;
  }

  float factor = missing_power<kBFloat16>(args.scales.format);
  if (args.epilogue.global_scale != nullptr) factor *= *args.epilogue.global_scale;
  const auto finish = [&](float sum, int, float bias) { return fmaf(sum, factor, bias); };
  finish_tile<Shape, Format>(args, shared, barriers, sums, my_row, finish);
}

#define TIERCEL_TILES(floats, bfloat16, tokens, groups, stages, buffers, name)                     \
  {tokens,                                                                                         \
   floats,                                                                                         \
   bfloat16,                                                                                       \
   groups,                                                                                         \
   1,                                                                                              \
   stages,                                                                                         \
   Kernel(                                                                                         \
       "w4_tiles<" name ", tokens=" #tokens ">",                                                   \
       reinterpret_cast<const void*>(w4_tiles<floats, bfloat16, tokens, groups, stages, buffers>), \
       kW4MaxShared)}

#define TIERCEL_TILES_OF(floats, bfloat16, name)           \
  TIERCEL_TILES(floats, bfloat16, 32, 2, 12, 4, name),     \
      TIERCEL_TILES(floats, bfloat16, 64, 2, 8, 4, name),  \
      TIERCEL_TILES(floats, bfloat16, 96, 2, 6, 2, name),  \
      TIERCEL_TILES(floats, bfloat16, 128, 1, 5, 4, name), \
      TIERCEL_TILES(floats, bfloat16, 256, 1, 3, 4, name)

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
