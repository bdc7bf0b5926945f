// SPDX-License-Identifier: Apache-2.0
// w4_moe for activations of e4m3: rows of x times the 4-bit weights of their experts.
//
// The plan is that of w4_moe.cu for many tokens, with the products of w4_linear's kernel for e4m3
// (kernels/gemv/w4_float8.cu): rows of the weight are the product's rows, decoded in registers as
// the A operand of wgmma, tokens are its columns. A thread block multiplies a block of the routing
// with a tile of 128 rows of its expert, for all of K.
//  - Two warpgroups multiply 64 rows each. The other warps fill the ring: one box of weights by
//  TMA,
//    and rows of x gathered by cp.async, which need a fence before wgmma reads them.
//  - The warps that multiply read the weights' scales from memory, a step ahead.
//  - A token's scale multiplies its sums at last: it is that of the row of x that the token has.
//  - Blocks of up to 32 tokens have products of 32 columns, others of 128.
#include <cstdint>
#include <iterator>

#include "kernels/gemv/w4_float8_multiply.cuh"
#include "kernels/moe/w4_moe_epilogue.cuh"
#include "kernels/moe/w4_moe_kernels.h"
#include "kernels/moe/w4_moe_stages.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"

namespace tiercel {
namespace {

constexpr int kRows = kW4MoeFloat8Rows;
constexpr int kConsumers = w4_moe_consumers(kRows);
// Registers of a thread that multiplies and of one that loads, where a thread block is alone on a
// multiprocessor: of 384 threads times 168.
constexpr int kDealt = 232, kLeft = 40;
static_assert(kFloat8Step == kW4MoeStep);

// Fills the ring, by all loading warps.
template <int kTokens, int kStages, int kLoaders>
__device__ __forceinline__ void load_float8(const W4MoeArgs& args, char* shared, const int* sources,
                                            uint64_t* filled, uint64_t* freed, int expert,
                                            int group) {
  constexpr int kXBytes = kTokens * kW4MoeStep, kWeightBytes = kRows * kRowBytes;
  constexpr int kStageBytes = w4_moe_float8_stage_bytes(kTokens);
  const int thread = threadIdx.x - kConsumers;
  const auto load_weights = [&](int step, int stage) {
    if (thread != 0) return;
    mbarrier_expect(filled + stage, kWeightBytes);
    tile_load(shared + stage * kStageBytes + kXBytes, &args.weight_map, step * kRowBytes, group,
              expert, filled + stage);
  };
#pragma unroll 1
  for (int i = 0; i < min(kStages, args.steps); ++i) load_weights(i, i);
  if (args.down) grid_dependency_wait();
  const GatheredRows<kTokens, kLoaders, 8> x(args, shared, sources, thread);
  int stage = 0;
  uint32_t parity = 1;
#pragma unroll 1
  for (int step = 0; step < args.steps; ++step) {
    mbarrier_wait(freed + stage, parity);  // at once, the first time
    if (step >= kStages) load_weights(step, stage);
    x.copy(args, stage * kStageBytes, step);
    arrive_with_copies(filled + stage);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}

template <bool kFloats, int kTokens, int kStages, int kTogether, int kGroup>
__global__ void __launch_bounds__(w4_moe_float8_threads(kTogether), kTogether)
    w4_moe_float8(const __grid_constant__ W4MoeFloat8Args all_args) {
  constexpr int kStageBytes = w4_moe_float8_stage_bytes(kTokens);
  constexpr bool kHold = kTogether == 1;
  constexpr int kLoaders = w4_moe_float8_threads(kTogether) - kConsumers;
  const W4MoeArgs& args = all_args.moe;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t filled[kStages], freed[kStages];
  __shared__ int elements[kTokens], sources[kTokens];  // rows of out and of x, or -1
  __shared__ float x_scales[kTokens];
  __shared__ __align__(16) uint8_t tables[kFloats ? 64 : 256];
  const int block = blockIdx.x / args.row_tiles, tile = blockIdx.x % args.row_tiles;
  const int group = tile * (kRows / 16);
  // Uniform to the compiler.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    map_prefetch(&args.weight_map);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(filled + s, 1 + kLoaders);
      mbarrier_init(freed + s, kConsumers / 32);
    }
    mbarrier_init_fence();
  }
  if constexpr (kFloats) {
    if (threadIdx.x < 64) write_small_magnitudes(tables, threadIdx.x);
  } else if (threadIdx.x < 256) {
    write_number(tables, threadIdx.x / 16, threadIdx.x % 16);
  }
  if (!args.down) {
    grid_dependency_wait();
    grid_dependency_launch();
  }
  const int expert = expert_of(args, block, args.block_tokens);
  if (threadIdx.x < kTokens) {
    const int element = element_at(args, block, args.block_tokens, threadIdx.x);
    elements[threadIdx.x] = element;
    sources[threadIdx.x] = element < 0 ? -1 : element / args.divide;
  }
  __syncthreads();
  if (warp >= kConsumers / 32) {
    if (kTogether == 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLeft));
    if (expert >= 0) {
      load_float8<kTokens, kStages, kLoaders>(args, shared, sources, filled, freed, expert, group);
    } else if (args.down) {
      grid_dependency_wait();
    }
    return;
  }
  if (kTogether == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kDealt));
  if (args.down) {
    grid_dependency_wait();
    grid_dependency_launch();
    clear_unrouted<kConsumers>(args);
  }
  const auto store = [&](const float* results) {
    store_tile<BFloat16, kRows, kConsumers>(args, results, elements, args.block_tokens, tile);
  };
  if (expert < 0) {
    if (args.down && expert == -1) store(nullptr);
    return;
  }
  if (threadIdx.x < kTokens) {
    const int source = sources[threadIdx.x];
    x_scales[threadIdx.x] =
        source < 0 ? 0.0f : all_args.x_scale[source * int64_t{all_args.x_scale_step}];
  }

  // Rows of this thread, within the tile, are my_row and 8 further.
  const int my_row = warp * 16 + lane / 4;
  W4Scales scales = args.scales;  // of the expert
  const int64_t expert_rows = static_cast<int64_t>(expert) * args.weight_rows;
  scales.scale += expert_rows * scales.scale_row;
  if (scales.zero != nullptr) scales.zero += expert_rows * scales.zero_row;
  const float factor = args.global_scale != nullptr ? args.global_scale[expert] : 1.0f;
  float bias[2] = {-0.0f, -0.0f};
  Float8Rows rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(weight_row(args, group, my_row + half * 8), args.weight_rows - 1);
    rows.scale[half] =
        kept<kHold>(static_cast<uint32_t>(row) * static_cast<uint32_t>(scales.scale_row));
    rows.zero[half] =
        kept<kHold>(static_cast<uint32_t>(row) * static_cast<uint32_t>(scales.zero_row));
    if (args.bias != nullptr) bias[half] = BFloat16::from_bits(args.bias[expert_rows + row]);
  }
  if constexpr (kFloats) {
    largest_exponents(rows.largest, scales.scale, rows.scale, 0, args.k / 32);
  }
  float sums[kTokens / 2];
  multiply_float8<kFloats, kGroup, kStages, kStageBytes, kHold>(
      sums, scales, false, args.k, rows, 0, args.steps, my_row, shared, tables, filled, freed,
      [] {}, [] { copies_fence(); });
  if constexpr (kFloats) scale_by_largest(sums, rows.largest);
  consumers_sync<kConsumers>();  // every stage was read, and x_scales is written
  float* const results = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) {
    const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, half = i / 2 % 2;
    results[token * w4_moe_sum_row(kRows) + my_row + half * 8] =
        fmaf(sums[i] * x_scales[token], factor, bias[half]);
  }
  consumers_sync<kConsumers>();
  store(results);
}

#define TIERCEL_FLOAT8(floats, tokens, stages, together, group, name)                            \
  {tokens,                                                                                       \
   kRows,                                                                                        \
   floats,                                                                                       \
   true,                                                                                         \
   stages,                                                                                       \
   Kernel("w4_moe_float8<" name ", tokens=" #tokens ">",                                         \
          reinterpret_cast<const void*>(w4_moe_float8<floats, tokens, stages, together, group>), \
          stages * w4_moe_float8_stage_bytes(tokens)),                                           \
   group,                                                                                        \
   together}

const W4MoeKernel kKernels[] = {TIERCEL_FLOAT8(true, 32, 8, 2, 128, "e2m1"),
                                TIERCEL_FLOAT8(true, 128, 8, 1, 128, "e2m1"),
                                TIERCEL_FLOAT8(false, 32, 8, 2, 128, "int4, group=128"),
                                TIERCEL_FLOAT8(false, 128, 8, 1, 128, "int4, group=128"),
                                TIERCEL_FLOAT8(false, 32, 8, 1, 32, "int4, group=32"),
                                TIERCEL_FLOAT8(false, 128, 8, 1, 32, "int4, group=32")};

}  // namespace

const W4MoeKernel* w4_moe_float8_kernels(int* count) {
  *count = static_cast<int>(std::size(kKernels));
  return kKernels;
}

}  // namespace tiercel
