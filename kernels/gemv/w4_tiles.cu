// SPDX-License-Identifier: Apache-2.0
// w4_linear for many tokens: out[t, n] = act(sum over k of x[t, k] * weight[n, k] + bias[n]), the
// weight in 4 bits.
//
// Weights are the A operand of wgmma, decoded in registers, so that they need neither shared memory
// nor a second pass. Rows of the weight are therefore the product's rows, and tokens its columns.
//  - A block has 128 rows of the weight and up to 256 tokens. One warp loads both by TMA into a
//    ring of stages of 128 values of K, others bring the scales there, ready for use; groups of two
//    warpgroups decode and multiply, each warpgroup 64 rows. Up to 128 tokens there are two groups,
//    which take the stages in turn and add up their sums at last: more warps hide the latency of
//    decoding, which is what takes time there.
//  - A thread needs one byte of every four of its row. It reads all of them, 16 bytes at a time
//    (threads that share a row read the same address), and picks its bytes: ten instructions for
//    four weights. The next 32 of K are decoded while the tensor cores multiply the last; they are
//    read only when those products are under way, or else the compiler decodes between the two
//    products. Products stay in flight from a step to the next.
//  - Where there are fewer tiles than multiprocessors, the blocks of a cluster split K. Each sends
//    the others their shares of the tokens by asynchronous stores, and adds up its own share in the
//    order of K. A cluster barrier that publishes such stores would wait for all memory instead.
//  - Where there are more, those behind the last whole wave are a launch of their own, in which the
//    blocks of a cluster split K.
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

// One of kWarps warps that bring the scales of the steps: it reads, unpacks and stores them.
template <typename Shape, int kWarps, bool kFloats, bool kBFloat16>
__device__ __forceinline__ void bring_scales(const W4TilesArgs& args, const W4Share& share,
                                             char* shared, W4Barriers<Shape>& barriers, int warp) {
  // A stage always has the same warp: it could take the phase before another's for its own.
  static_assert(Shape::kStages % kWarps == 0);
  constexpr int kRows = 2;  // of a lane at a time
  grid_dependency_wait();
  const W4Scales& scales = args.scales;
  const int lane = threadIdx.x % 32;
  int stage = warp;
  uint32_t parity = 1;
#pragma unroll 1  // the loader has few registers
  for (int step = share.first + warp; step < share.last; step += kWarps) {
    char* const weights = shared + stage * Shape::kStageBytes + Shape::kXBytes;
    uint4* const to = reinterpret_cast<uint4*>(weights + Shape::kWeightBytes) + lane;
#pragma unroll 1
    for (int i = 0; i < kW4Rows / 32; i += kRows) {
      StepBits<kFloats> bits[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const uint32_t row = min(share.first_row + (i + j) * 32 + lane, args.features - 1);
        load_scales<kFloats>(bits[j], scales, scales.scale, scales.zero,
                             row * static_cast<uint32_t>(scales.scale_row),
                             row * static_cast<uint32_t>(scales.zero_row), step * kW4Step, args.k);
      }
      if (i == 0) mbarrier_wait(barriers.freed + stage, parity);
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        StepScales<kFloats> step_scales;
        unpack_scales<kFloats, kBFloat16>(step_scales, bits[j], scales);
        to[(i + j) * 32] = step_scales.words();
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.filled + stage);
    stage += kWarps;
    if (stage >= Shape::kStages) stage -= Shape::kStages, parity ^= 1;
  }
}

template <bool kFloats, bool kBFloat16, int kTokens, int kGroups, int kStages>
__global__ void __launch_bounds__(w4_threads(1, kGroups), 1)
    w4_tiles(const __grid_constant__ W4TilesArgs args) {
  using Shape = W4Tile<kTokens, kGroups, kStages, 1, 2>;
  using Format = std::conditional_t<kBFloat16, BFloat16, Float16>;
  constexpr int kScaleWarps = kStages % 3 == 0 ? 3 : 2;
  // Operands of each 32 of K; with registers for four, decoding runs further ahead.
  constexpr int kBuffers = kGroups == 1 ? 4 : 2;
  extern __shared__ __align__(1024) char shared[];
  __shared__ W4Barriers<Shape> barriers;
  const W4Share share(args, kTokens);
  barriers.init(share);
  grid_dependency_launch();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp >= Shape::kConsumers / 32) {
    run_loader<Shape>(args, share, shared, barriers, [&](int other) {
      if (other >= kScaleWarps) return;
      bring_scales<Shape, kScaleWarps, kFloats, kBFloat16>(args, share, shared, barriers, other);
    });
    return;
  }
  take_registers<Shape>();

  grid_dependency_wait();
  const int lane = threadIdx.x % 32;
  const int group = warp / (kW4Consumers / 32);
  // Rows of this thread, within the block, are my_row and 8 further.
  const int my_row = warp % (kW4Consumers / 32) * 16 + lane / 4;
  float sums[kTokens / 2];
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  // Without the shuffle the compiler computes it anew in each step.
  const uint32_t choice = __shfl_sync(0xffffffffu, byte_choice<kFloats>(lane % 4), lane);
  // In a register: an instruction takes one constant, and the mask is one. The compiler would put
  // a constant back.
  const uint32_t whole = __shfl_sync(0xffffffffu, kWhole<kBFloat16> + (args.k >> 31), lane);
  const uint64_t tiles = rows_descriptor(shared_address(shared));
  // This thread's first row of weights, and chunks of 16 bytes swizzled by rows.
  const char* const weights = shared + Shape::kXBytes + my_row * kRowBytes;
  const uint32_t swizzle = lane / 8 * 16;
  const char* const my_scales = shared + Shape::kXBytes + Shape::kWeightBytes + my_row * 16;
  StepScales<kFloats> scales[2];
  const auto read_scales = [&](int stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* const from = my_scales + stage * Shape::kStageBytes + half * 8 * 16;
      scales[half].set(*reinterpret_cast<const uint4*>(from));
    }
  };
  uint4 words[2];  // of the rows
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
        decode_bytes<kFloats, kBFloat16>(pairs, i == 0 ? v.x : v.z, i == 0 ? v.y : v.w, choice,
                                         whole);
        scale_pairs<kFloats, kBFloat16>(pairs, scales[half], chunk * 2 + i);
        a[chunk % kBuffers][i][half] = pairs[0];
        a[chunk % kBuffers][i][half + 2] = pairs[1];
      }
    }
  };
  int stage = group, last_stage = group;
  uint32_t parity = 0;
  const int first = share.first + group;
  if (first < share.last) {
    mbarrier_wait(barriers.filled + stage, 0);
    read_scales(stage);
    load_words(stage, 0);
    decode_chunk(0);
  }
  for (int step = first; step < share.last; step += kGroups) {
    const uint64_t x = tiles + stage * (Shape::kStageBytes >> 4);
    // The last step decodes its own first values once more, without a branch among products.
    int next_stage = stage;
    uint32_t next_parity = parity;
    if (step + kGroups < share.last) {
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
      if (chunk == 3) mbarrier_wait(barriers.filled + next_stage, next_parity);
      wgmma_wait<kBuffers - 1>();
      // Only products of this step are in flight. All lanes have read the last stage; one arrives
      // for its warp. In a branch the meeting would make the compiler run products one by one.
      if (chunk == kBuffers - 2) __syncwarp();
      if (chunk == kBuffers - 2 && step != first && lane == 0) {
        mbarrier_arrive(barriers.freed + last_stage);
      }
      // Words are read behind the wait: else the compiler decodes between the two products.
      if (chunk == 3) read_scales(next_stage);
      load_words(chunk < 3 ? stage : next_stage, (chunk + 1) % 4);
      decode_chunk((chunk + 1) % 4);
    }
    last_stage = stage;
    stage = next_stage, parity = next_parity;
  }
  wgmma_wait<0>();
  wgmma_settle(sums);

  float factor = missing_power<kBFloat16>(args.scales.format);
  if (args.epilogue.global_scale != nullptr) factor *= *args.epilogue.global_scale;
  const auto finish = [&](float sum, int, float bias) { return fmaf(sum, factor, bias); };
  finish_tile<Shape, Format>(args, shared, barriers, sums, my_row, finish);
}

#define TIERCEL_TILES(floats, bfloat16, tokens, groups, stages, name)                        \
  {tokens,                                                                                   \
   floats,                                                                                   \
   bfloat16,                                                                                 \
   groups,                                                                                   \
   1,                                                                                        \
   stages,                                                                                   \
   Kernel("w4_tiles<" name ", tokens=" #tokens ">",                                          \
          reinterpret_cast<const void*>(w4_tiles<floats, bfloat16, tokens, groups, stages>), \
          kW4MaxShared)}

#define TIERCEL_TILES_OF(floats, bfloat16, name)        \
  TIERCEL_TILES(floats, bfloat16, 32, 2, 12, name),     \
      TIERCEL_TILES(floats, bfloat16, 64, 2, 6, name),  \
      TIERCEL_TILES(floats, bfloat16, 96, 2, 6, name),  \
      TIERCEL_TILES(floats, bfloat16, 128, 2, 4, name), \
      TIERCEL_TILES(floats, bfloat16, 256, 1, 3, name)

const W4TilesKernel kKernels[] = {TIERCEL_TILES_OF(true, true, "e2m1, bfloat16"),
                                  TIERCEL_TILES(true, true, 192, 1, 3, "e2m1, bfloat16"),
                                  TIERCEL_TILES_OF(false, true, "int4, bfloat16"),
                                  TIERCEL_TILES_OF(true, false, "e2m1, float16"),
                                  TIERCEL_TILES_OF(false, false, "int4, float16")};

}  // namespace

const W4TilesKernel* w4_tiles_kernels(int* count) {
  *count = static_cast<int>(std::size(kKernels));
  return kKernels;
}

}  // namespace tiercel
