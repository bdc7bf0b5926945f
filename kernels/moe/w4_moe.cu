// SPDX-License-Identifier: Apache-2.0
// w4_moe: rows of x times the 4-bit weights of their experts.
//
// Weights are decoded in registers as operand A of wgmma, like in w4_linear's tiles
// (kernels/gemv/w4_tiles.cu), so that rows of the weight are the product's rows and tokens its
// columns.
//  - A thread block multiplies one block of the routing, of one expert, with a tile of the expert's
//    rows. Two warpgroups decode and multiply; further warps, a thread for each row of the tile,
//    fill a ring of stages of 128 values of K: one box of weights by TMA, rows of x gathered by
//    cp.async, and a row's scales, loaded two steps ahead and stored in the form in which they
//    are multiplied.
//  - The box takes the tile's rows in groups of 16: 8 rows, then 8 others. Gated, these are the
//    gates of 8 features and what they are for, wherever the checkpoint has them, so that both
//    are sums of one thread and the activation needs no exchange.
//  - Blocks of 32 tokens, for few: tiles of 64 rows, and the warpgroups take the steps of K in
//    turn, since bytes in flight and warps are scarce. The first adds the second's sums at last.
//    Blocks of 128 tokens: tiles of 128 rows, 64 for each warpgroup.
//  - Nobody waits for the host: thread blocks beyond the blocks in use return. Up to 16 ids there
//    is no routing: each id is a block.
//  - The second product reads the routing, scales and first weights while the first one ends: that
//    lets it start only when the routing's launch has ended.
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "kernels/activation/functions.cuh"
#include "kernels/gemv/w4_weights.cuh"
#include "kernels/moe/w4_moe_kernels.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

constexpr int kRowBytes = kW4MoeStep / 2;  // of a row of the weight in a stage
constexpr int kAhead = 2;                  // steps whose scales are in flight

__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kW4MoeConsumers) : "memory");
}

// Makes what other threads' copies brought visible to wgmma.
__device__ __forceinline__ void copies_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// This thread's arrival, when all copies that it has started are there.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void tile_load(void* to, const CUtensorMap* map, int byte, int group,
                                          int expert, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(byte), "r"(0), "r"(group), "r"(expert), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void tile_prefetch(const CUtensorMap* map, int byte, int group,
                                              int expert) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %2, %3, %4}];" ::"l"(map),
               "r"(byte), "r"(0), "r"(group), "r"(expert)
               : "memory");
}

template <int kTokens, int kRows>
struct Tile {
  // Warpgroups take the steps of K in turn. The number of stages is even then, so that each stage
  // is of one warpgroup, which sees all of its phases.
  static constexpr bool kTurns = kRows == 64;
  static constexpr int kXBytes = kTokens * kW4MoeStep * 2;
  static constexpr int kWeightBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = w4_moe_stage_bytes(kTokens, kRows);
  static constexpr int kSumRow = kRows + 4;  // floats of a token's sums: all banks in use
};

// The expert that an id names, or -1.
__device__ __forceinline__ int64_t id_of(const W4MoeArgs& args, int element) {
  return args.wide_ids ? static_cast<const int64_t*>(args.ids)[element]
                       : static_cast<const int32_t*>(args.ids)[element];
}

// The expert of a block of the routing, -1 for none, -2 for a block that is not in use.
template <int kTokens>
__device__ __forceinline__ int expert_of(const W4MoeArgs& args, int block) {
  if (args.slots == nullptr) {
    const int64_t id = id_of(args, block);
    return id >= 0 && id < args.experts ? static_cast<int>(id) : -1;
  }
  if (block * kTokens >= min(*args.used, args.slot_count)) return -2;
  const int expert = args.expert_ids[block];
  return expert >= 0 && expert < args.experts ? expert : -1;
}

// The element in a place of a block, or -1.
template <int kTokens>
__device__ __forceinline__ int element_at(const W4MoeArgs& args, int block, int place) {
  if (args.slots == nullptr) return place == 0 ? block : -1;
  const int slot = block * kTokens + place;
  const int element = slot < args.slot_count ? args.slots[slot] : -1;
  return element >= 0 && element < args.elements ? element : -1;
}

// The row of the expert's weight that is row `row` of a tile which begins at `group`.
__device__ __forceinline__ int weight_row(const W4MoeArgs& args, int group, int row) {
  const W4MoeRows& rows = args.rows;
  return (group + row / 16) * rows.group + row / 8 % 2 * rows.half + row % 8 * rows.next;
}

template <bool kFloats, bool kBFloat16, int kTokens, int kRows, int kStages>
__device__ __forceinline__ void load_stages(const W4MoeArgs& args, char* shared, const int* sources,
                                            uint64_t* filled, uint64_t* freed, int expert,
                                            int group) {
  using Shape = Tile<kTokens, kRows>;
  constexpr int kAtOnce = kRows / 16;  // rows of x: 16 threads each
  const int thread = threadIdx.x - kW4MoeConsumers;
  const int64_t row = static_cast<int64_t>(expert) * args.weight_rows +
                      min(weight_row(args, group, thread), args.weight_rows - 1);
  const char* const scale = args.scales.scale + row * args.scales.scale_row;
  const char* const zero =
      args.scales.zero == nullptr ? nullptr : args.scales.zero + row * args.scales.zero_row;
  StepBits<kFloats> ahead[kAhead];
  const auto load_bits = [&](StepBits<kFloats>& bits, int step) {
    load_scales<kFloats>(bits, args.scales, scale, zero, min(step, args.steps - 1) * kW4MoeStep,
                         args.k);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_bits(ahead[i], i);
  if (args.down) {
    if (thread == 0) {
      for (int i = 0; i < min(kStages, args.steps); ++i) {
        tile_prefetch(&args.weight_map, i * kRowBytes, group, expert);
      }
    }
    grid_dependency_wait();
  }
  const int chunk = thread % 16, token = thread / 16;
  int passes = 0;
#pragma unroll
  for (int i = 0; i < kTokens / kAtOnce; ++i) {
    if (sources[token + i * kAtOnce] >= 0) passes = i + 1;
  }
  const uint32_t x_place = shared_address(shared) + chunk / 8 * (Shape::kXBytes / 2) + token * 128;
  const char* const x = args.x + chunk * 16;
  int stage = 0;
  uint32_t parity = 1;
#pragma unroll 1
  for (int base = 0; base < args.steps; base += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int step = base + i;
      if (step >= args.steps) break;
      mbarrier_wait(freed + stage, parity);
      char* const to = shared + stage * Shape::kStageBytes;
      if (thread == 0) {
        mbarrier_expect(filled + stage, Shape::kWeightBytes);
        tile_load(to + Shape::kXBytes, &args.weight_map, step * kRowBytes, group, expert,
                  filled + stage);
      }
      // Zeros behind the end of K; columns of padding hold anything.
      const bool real = step * kW4MoeStep + chunk * 8 < args.k;
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        const int at = pass * kAtOnce;
        const int source = sources[token + at];
        if (source < 0) continue;
        const char* from = x + source * args.x_row + step * (kW4MoeStep * 2);
        async_copy_16(
            x_place + stage * Shape::kStageBytes + at * 128 + (chunk % 8 ^ (token + at) % 8) * 16,
            real ? from : args.x, real);
      }
      StepScales<kFloats> scales;
      unpack_scales<kFloats, kBFloat16>(scales, ahead[i], args.scales);
      uint4 words;
      if constexpr (kFloats) {
        words = {scales.scale[0], scales.scale[1], scales.scale[2], scales.scale[3]};
      } else {
        words = {scales.scale[0], scales.scale[1], scales.zero[0], scales.zero[1]};
      }
      reinterpret_cast<uint4*>(to + Shape::kXBytes + Shape::kWeightBytes)[thread] = words;
      arrive_with_copies(filled + stage);
      mbarrier_arrive(filled + stage);
      load_bits(ahead[i], step + kAhead);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
}

// The activation of a gate and the value that it gates.
__device__ __forceinline__ float gated(const W4MoeArgs& args, float gate, float value) {
  // Comparisons, unlike min and max, keep NaN.
  if (gate > args.limit) gate = args.limit;
  if (value > args.limit) value = args.limit;
  if (value < -args.limit) value = -args.limit;
  switch (args.activation) {
    case W4MoeActivation::kGelu:
      return Gelu<false>::value(gate) * value;
    case W4MoeActivation::kRelu:
      return Relu<false>::value(gate) * value;
    default: {
      if (args.activation == W4MoeActivation::kSiluResidual) value += 1.0f;
      return sigmoid_times<false>(args.alpha * gate, gate) * value;
    }
  }
}

// Four features of a token, of the sums of its rows with their bias.
__device__ __forceinline__ void finish(const W4MoeArgs& args, const float* sums, int feature,
                                       float (&v)[4]) {
  if (args.gated) {
    const float* const from = sums + feature / 8 * 16 + feature % 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = gated(args, from[j], from[j + 8]);
    return;
  }
  const bool squares = !args.down;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float positive = Relu<false>::value(sums[feature + j]);
    v[j] = squares ? positive * positive : sums[feature + j];
  }
}

template <bool kFloats, bool kBFloat16, int kTokens, int kRows, int kStages, int kTogether>
__global__ void __launch_bounds__(w4_moe_threads(kRows), kTogether)
    w4_moe(const __grid_constant__ W4MoeArgs args) {
  using Shape = Tile<kTokens, kRows>;
  using Format = std::conditional_t<kBFloat16, BFloat16, Float16>;
  static_assert(!Shape::kTurns || kStages % 2 == 0);
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t filled[kStages], freed[kStages];
  __shared__ int elements[kTokens], sources[kTokens];  // rows of out and of x, or -1
  const int block = blockIdx.x / args.row_tiles, tile = blockIdx.x % args.row_tiles;
  const int group = tile * (kRows / 16);
  const int tile_features = args.gated ? kRows / 2 : kRows;
  if (threadIdx.x == 0) {
    map_prefetch(&args.weight_map);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(filled + s, 1 + 2 * kRows);
      mbarrier_init(freed + s, kW4MoeConsumers / 32 / (Shape::kTurns ? 2 : 1));
    }
    mbarrier_init_fence();
  }
  if (!args.down) {
    grid_dependency_wait();
    grid_dependency_launch();
  }
  const int expert = expert_of<kTokens>(args, block);
  if (threadIdx.x < kTokens) {
    const int element = element_at<kTokens>(args, block, threadIdx.x);
    elements[threadIdx.x] = element;
    sources[threadIdx.x] = element < 0 ? -1 : element / args.divide;
  }
  __syncthreads();
  // Uniform to the compiler.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp >= kW4MoeConsumers / 32) {
    if (expert >= 0) {
      load_stages<kFloats, kBFloat16, kTokens, kRows, kStages>(args, shared, sources, filled, freed,
                                                               expert, group);
    } else if (args.down) {
      grid_dependency_wait();
    }
    return;
  }
  if (args.down) {
    grid_dependency_wait();
    grid_dependency_launch();
    // Ids that are in no block: a row for each thread.
    if (args.slots != nullptr) {
      for (int64_t e = blockIdx.x + static_cast<int64_t>(threadIdx.x) * gridDim.x;
           e < args.elements; e += static_cast<int64_t>(kW4MoeConsumers) * gridDim.x) {
        const int64_t id = id_of(args, static_cast<int>(e));
        if (id >= 0 && id < args.bound) continue;
        uint4* const row = reinterpret_cast<uint4*>(args.out + e * args.features);
        for (int i = 0; i < args.features / 8; ++i) row[i] = make_uint4(0, 0, 0, 0);
      }
    }
  }
  const int first_feature = tile * tile_features;
  // Four features of a token at a time; `results` has the sums of all rows.
  const auto store = [&](const float* results) {
    const int quads = tile_features / 4;
    for (int i = threadIdx.x; i < kTokens * quads; i += kW4MoeConsumers) {
      const int token = i / quads, feature = i % quads * 4;
      const int element = elements[token];
      if (element < 0 || first_feature + feature >= args.features) continue;
      float v[4] = {};
      if (results != nullptr) finish(args, results + token * Shape::kSumRow, feature, v);
      const int64_t row = static_cast<int64_t>(element) * args.features;
      *reinterpret_cast<uint2*>(args.out + row + first_feature + feature) =
          make_uint2(Format::pack(v), Format::pack(v + 2));
    }
  };
  if (expert < 0) {
    if (args.down && expert == -1) store(nullptr);
    return;
  }

  const int lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;
  // Rows of this thread, within the tile, are my_row and 8 further.
  const int my_row = (Shape::kTurns ? 0 : warpgroup * 64) + warp % 4 * 16 + lane / 4;
  float sums[kTokens / 2];
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  const uint32_t choice = byte_choice<kFloats>(lane % 4);
  const uint32_t base = shared_address(shared);
  const uint32_t swizzle = lane / 8;  // of chunks of 16 bytes, by rows of 64
  StepScales<kFloats> scales[2];
  const auto read_scales = [&](int stage) {
    const uint4* const from = reinterpret_cast<const uint4*>(shared + stage * Shape::kStageBytes +
                                                             Shape::kXBytes + Shape::kWeightBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = from[my_row + half * 8];
      scales[half].scale[0] = words.x, scales[half].scale[1] = words.y;
      if constexpr (kFloats) {
        scales[half].scale[2] = words.z, scales[half].scale[3] = words.w;
      } else {
        scales[half].zero[0] = words.z, scales[half].zero[1] = words.w;
      }
    }
  };
  uint32_t a[2][2][4];
  // The `chunk`th 32 values of K of a stage, to the buffer of its parity.
  const auto decode_chunk = [&](int stage, int chunk) {
    const char* const weights = shared + stage * Shape::kStageBytes + Shape::kXBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = *reinterpret_cast<const uint4*>(weights + (my_row + half * 8) * kRowBytes +
                                                      (chunk ^ swizzle) * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t pairs[2];
        decode_bytes<kFloats, kBFloat16>(pairs, i == 0 ? v.x : v.z, i == 0 ? v.y : v.w, choice);
        scale_pairs<kFloats, kBFloat16>(pairs, scales[half], chunk * 2 + i);
        a[chunk % 2][i][half] = pairs[0];
        a[chunk % 2][i][half + 2] = pairs[1];
      }
    }
  };
  constexpr int kStride = Shape::kTurns ? 2 : 1;
  const int first = Shape::kTurns ? warpgroup : 0;
  int stage = first;
  uint32_t parity = 0;
  const auto meet = [&](int next_stage, uint32_t next_parity) {
    mbarrier_wait(filled + next_stage, next_parity);
    copies_fence();
    read_scales(next_stage);
  };
  if (first < args.steps) {
    meet(stage, 0);
    decode_chunk(stage, 0);
  }
  for (int step = first; step < args.steps; step += kStride) {
    const uint32_t x = base + stage * Shape::kStageBytes;
    // The last step decodes its own first values once more, without a branch among products.
    const bool more = step + kStride < args.steps;
    const bool wraps = more && stage + kStride >= kStages;
    const int next_stage = !more ? stage : stage + kStride - (wraps ? kStages : 0);
    const uint32_t next_parity = parity ^ wraps;
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint64_t b =
            rows_descriptor(x + chunk / 2 * (Shape::kXBytes / 2) + (chunk % 2 * 2 + i) * 32);
        wgmma_from_registers<kBFloat16, false>(sums, a[chunk % 2][i], b, true);
      }
      wgmma_commit();
      if (chunk == 3) meet(next_stage, next_parity);
      wgmma_wait<1>();
      decode_chunk(chunk < 3 ? stage : next_stage, (chunk + 1) % 4);
    }
    // The compiler runs products one by one if some are in flight at the loop's end.
    wgmma_wait<0>();
    wgmma_settle(sums);
    if (lane == 0) mbarrier_arrive(freed + stage);
    stage = next_stage, parity = next_parity;
  }

  float factor = missing_power<kBFloat16>(args.scales.format);
  if (args.global_scale != nullptr) factor *= args.global_scale[expert];
  float bias[2] = {-0.0f, -0.0f};
  if (args.bias != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(weight_row(args, group, my_row + half * 8), args.weight_rows - 1);
      bias[half] =
          Format::from_bits(args.bias[static_cast<int64_t>(expert) * args.weight_rows + row]);
    }
  }
  consumers_sync();  // every stage was read
  float* const results = reinterpret_cast<float*>(shared);
  // Sum i is of row my_row, or of the 8th behind it, and this token.
  const auto place_of = [&](int i) {
    const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    return results + token * Shape::kSumRow + my_row + i / 2 % 2 * 8;
  };
  if constexpr (Shape::kTurns) {
    if (warpgroup == 1) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) *place_of(i) = sums[i];
    }
    consumers_sync();
    if (warpgroup == 0) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sums[i] += *place_of(i);
    }
  }
  if (!Shape::kTurns || warpgroup == 0) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) *place_of(i) = fmaf(sums[i], factor, bias[i / 2 % 2]);
  }
  consumers_sync();
  store(results);
}

#define TIERCEL_W4_MOE(floats, bfloat16, tokens, rows, stages, together, name)                     \
  {tokens,                                                                                         \
   rows,                                                                                           \
   floats,                                                                                         \
   bfloat16,                                                                                       \
   stages,                                                                                         \
   Kernel("w4_moe<" name ", tokens=" #tokens ">",                                                  \
          reinterpret_cast<const void*>(w4_moe<floats, bfloat16, tokens, rows, stages, together>), \
          stages * w4_moe_stage_bytes(tokens, rows))}

#define TIERCEL_W4_MOE_OF(floats, bfloat16, name)       \
  TIERCEL_W4_MOE(floats, bfloat16, 32, 64, 4, 3, name), \
      TIERCEL_W4_MOE(floats, bfloat16, 128, 128, 5, 1, name)

const W4MoeKernel kKernels[] = {TIERCEL_W4_MOE_OF(true, true, "e2m1, bfloat16"),
                                TIERCEL_W4_MOE_OF(false, true, "int4, bfloat16"),
                                TIERCEL_W4_MOE_OF(true, false, "e2m1, float16"),
                                TIERCEL_W4_MOE_OF(false, false, "int4, float16")};

}  // namespace

const W4MoeKernel* w4_moe_kernels(int* count) {
  *count = static_cast<int>(std::size(kKernels));
  return kKernels;
}

}  // namespace tiercel
