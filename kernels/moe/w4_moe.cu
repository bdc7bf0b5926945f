// SPDX-License-Identifier: Apache-2.0
// w4_moe: rows of x times the 4-bit weights of their experts.
//
// Weights are decoded in registers as operand A of the products, so that rows of the weight are the
// product's rows and tokens its columns.
//  - A thread block multiplies one block of the routing, of one expert, with a tile of the expert's
//    rows. Its first warps decode and multiply; the others fill a ring of stages of 128 values of
//    K: one box of weights by TMA, and rows of x gathered by cp.async.
//  - The box takes the tile's rows in groups of 16: 8 rows, then 8 others. If gated, these are the
//    gates and up rows of 8 features, in either order of the checkpoint, so that both sums are in
//    one thread and the activation needs no exchange.
//  - Blocks of up to 32 tokens, for few: bound by instructions, since all weights of an expert are
//    decoded for a token or two. Tiles of 64 rows; a warp multiplies 16 of them by mma.sync,
//    because the order of K within a product is free there: a lane decodes 32 neighbouring weights
//    and reads the same 32 values of x. wgmma reads x from shared memory in its own order, for
//    which a lane would decode one byte of each four that it reads. Two halves of a thread block
//    take the steps of K in turn, each with four warps and a warp that loads, and do not wait for
//    each other. The first adds the second's sums at last. Where tiles are fewer than places, the
//    thread blocks of a cluster divide K; the first adds the sums of the others in order. The
//    tile's scales are copied to shared memory at the beginning, and the ring has the rest of what
//    three thread blocks share.
//  - Blocks of 64 and 128 tokens: wgmma, 64 rows for each warpgroup, as in w4_linear's tiles
//    (kernels/gemv/w4_tiles.cu). Three warpgroups, or two thread blocks, hide the latency of
//    decoding. Scales are loaded some steps ahead, and stored in the form in which they multiply.
//  - No host synchronisation: thread blocks beyond the blocks in use return. Without a routing,
//    each id is a block.
//  - The second product reads the routing, scales and first weights while the first one ends: that
//    lets it start only when the routing's launch has ended.
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "kernels/gemv/w4_few_weights.cuh"
#include "kernels/gemv/w4_weights.cuh"
#include "kernels/moe/w4_moe_epilogue.cuh"
#include "kernels/moe/w4_moe_kernels.h"
#include "kernels/moe/w4_moe_stages.cuh"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/load_remote.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/warp_matrix.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

__device__ __forceinline__ void cluster_meet() {
  cluster_arrive();
  cluster_wait();
}

// 16 bytes and 4, at an address from shared_address().
__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared_2(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared_1(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

// mbarrier_arrive() at an address from shared_address().
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The factors of 32 values of K of a lane's two rows, from value `at` on, as they multiply the
// first and the second 16, and the addends of whole numbers. The rows' scales begin at `from` in
// shared memory; `zeros` bytes behind them are their zero points. Behind the end of K factors are
// zeros.
template <bool kFloats, bool kBFloat16>
__device__ __forceinline__ void read_factors(uint32_t (&factors)[2][2], uint32_t (&addends)[2],
                                             const W4MoeArgs& args, const uint32_t (&from)[2],
                                             int zeros, int at) {
  const W4Scales& scales = args.scales;
  const int place = at >> scales.group_shift;
  const bool real = at < args.k;
  const bool wide = !kFloats || scales.format == W4Format::kNvfp4;
  uint32_t bits[2] = {};
  if (wide) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t address = from[half] + (kFloats ? place : place * 2);
      if (real) bits[half] = load_shared_2(address);
      if constexpr (kFloats) {
        const uint32_t pair = e4m3_pair<kBFloat16>(bits[half]);
        factors[half][0] = spread(pair, 0), factors[half][1] = spread(pair, 1);
      } else {
        factors[half][0] = factors[half][1] = spread(bits[half], 0);
        addends[half] = kMinusEight<kBFloat16>;
        if (scales.zero != nullptr && real) {
          addends[half] = pairs_plus<kBFloat16>(
              kMinusWhole<kBFloat16>, spread(load_shared_2(address + zeros), 0) ^ 0x80008000u);
        }
      }
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) bits[half] = load_shared_1(from[half] + place);
    materialize_now(bits[0], bits[1]);  // before either is used
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factors[half][0] = factors[half][1] = real ? exponent_pair(bits[half]) : 0;
    }
  }
}

// Half of the steps of few tokens, by the warp of 16 rows that begin at `row`: each second one,
// from the `first` on. A lane has 32 values of K of a step of each of its two rows, as they lie in
// memory, and the same 32 of x. The order of K within a step is therefore another one, as is that
// within 8 values, which is decode_word()'s.
template <bool kFloats, bool kBFloat16>
__device__ __forceinline__ void multiply_few(const W4MoeArgs& args, const FewRing& ring,
                                             int present, int first, int row,
                                             float (&sums)[kW4MoeFewTokens / 8][4]) {
  using Product = std::conditional_t<kBFloat16, BFloat16, Float16>;
  constexpr W4Format kFormat = kFloats ? W4Format::kNvfp4 : W4Format::kInt4;
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  const int eights = (present + 7) / 8;  // of tokens
  const int scale_row = static_cast<int>(args.scales.scale_row);
  const uint32_t base = shared_address(ring.shared);
  const uint32_t scales =
      base + args.stages * args.stage_bytes + scale_place(args, row + lane / 4) * scale_row;
  uint32_t x = base + first * args.stage_bytes + few_x_place(lane / 4, quarter * 4);
  uint32_t weights = base + (first + 1) * args.stage_bytes - 64 * kRowBytes +
                     (row + lane / 4) * kRowBytes + (quarter ^ lane / 8) * 16;
  uint32_t met = shared_address(ring.barriers + first);
  const uint32_t last = shared_address(ring.barriers + args.stages);
  int at = (ring.begin + first) * kW4MoeStep + quarter * 32;
  uint32_t parity = 0;
  mbarrier_wait(shared_address(ring.scaled()), 0);
#pragma unroll 1
  for (; at < ring.end * kW4MoeStep; at += 2 * kW4MoeStep) {
    materialize_now(weights, x, met, at);
    uint32_t words[2][4], factors[2][2], addends[2] = {};
    const uint32_t rows[2] = {scales, scales + scale_place(args, 8) * scale_row};
    read_factors<kFloats, kBFloat16>(factors, addends, args, rows, 64 * scale_row, at);
    mbarrier_wait(met, parity);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = load_shared_16(weights + half * 8 * kRowBytes);
      words[half][0] = v.x, words[half][1] = v.y, words[half][2] = v.z, words[half][3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        decode_word<kFormat, kBFloat16>(a[half], words[half][i], addends[half]);
#pragma unroll
        for (uint32_t& pair : a[half]) pair = pairs_times<kBFloat16>(pair, factors[half][i / 2]);
      }
      const uint32_t values = (x ^ i % 2 * 64) + i / 2 * 128;
#pragma unroll
      for (int n = 0; n < kW4MoeFewTokens / 8; ++n) {
        if (n >= eights && n > 0) break;
        const uint4 v = load_shared_16(values + n * 8 * (kW4MoeStep * 2));
        warp_multiply_add<Product>(sums[n], a[0][0], a[1][0], a[0][1], a[1][1], v.x, v.y);
        warp_multiply_add<Product>(sums[n], a[0][2], a[1][2], a[0][3], a[1][3], v.z, v.w);
      }
    }
    __syncwarp();
    if (lane == 0) arrive_at(met + kW4MoeFewStages * 8);
    int further = 2;  // stages
    if (met + 16 >= last) further -= args.stages, parity ^= 1;
    weights += further * args.stage_bytes, x += further * args.stage_bytes, met += further * 8;
  }
}

// All steps of many tokens, by the warpgroup of 64 rows; `row` is the thread's first.
template <bool kFloats, bool kBFloat16, int kTokens, int kRows, int kStages>
__device__ __forceinline__ void multiply_many(const W4MoeArgs& args, const char* shared,
                                              uint64_t* filled, uint64_t* freed, int row,
                                              float (&sums)[kTokens / 2]) {
  using Shape = Tile<kTokens, kRows>;
  const int lane = threadIdx.x % 32;
  const uint32_t choice = byte_choice<kFloats>(lane % 4);
  const uint32_t base = shared_address(shared);
  const uint32_t swizzle = lane / 8;  // of chunks of 16 bytes, by rows of 64
  StepScales<kFloats> scales[2];
  const auto read_scales = [&](int stage) {
    const uint4* const from = reinterpret_cast<const uint4*>(shared + stage * Shape::kStageBytes +
                                                             Shape::kXBytes + Shape::kWeightBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = from[row + half * 8];
      scales[half].scale[0] = words.x, scales[half].scale[1] = words.y;
      if constexpr (kFloats) {
        scales[half].scale[2] = words.z, scales[half].scale[3] = words.w;
      } else {
        scales[half].zero[0] = words.z, scales[half].zero[1] = words.w;
      }
    }
  };
  uint32_t a[2][2][4];
  uint4 coded[2];
  // The `chunk`th 32 values of K of a stage.
  const auto read_chunk = [&](int stage, int chunk) {
    const char* const weights = shared + stage * Shape::kStageBytes + Shape::kXBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      coded[half] = *reinterpret_cast<const uint4*>(weights + (row + half * 8) * kRowBytes +
                                                    (chunk ^ swizzle) * 16);
    }
  };
  // To the buffer of its parity.
  const auto decode_chunk = [&](int chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = coded[half];
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
  int stage = 0;
  uint32_t parity = 0;
  const auto meet = [&](int next_stage, uint32_t next_parity) {
    mbarrier_wait(filled + next_stage, next_parity);
    copies_fence();
    read_scales(next_stage);
  };
  meet(0, 0);
  read_chunk(0, 0);
  decode_chunk(0);
  for (int step = 0; step < args.steps; ++step) {
    const uint32_t x = base + stage * Shape::kStageBytes;
    // The last step decodes its own first values once more, without a branch among products.
    const bool more = step + 1 < args.steps;
    const int next_stage = !more ? stage : stage + 1 == kStages ? 0 : stage + 1;
    const uint32_t next_parity = parity ^ (more && next_stage == 0);
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
      read_chunk(chunk < 3 ? stage : next_stage, (chunk + 1) % 4);
      wgmma_wait<1>();
      decode_chunk((chunk + 1) % 4);
    }
    // The compiler runs products one by one if some are in flight at the loop's end.
    wgmma_wait<0>();
    wgmma_settle(sums);
    __syncwarp();  // all lanes have read the stage; one lane arrives for its warp
    if (lane == 0) mbarrier_arrive(freed + stage);
    stage = next_stage, parity = next_parity;
  }
}

template <bool kFloats, bool kBFloat16, int kTokens, int kRows, int kStages, int kTogether>
__global__ void __launch_bounds__(w4_moe_threads(kRows), kTogether)
    w4_moe(const __grid_constant__ W4MoeArgs args) {
  using Shape = Tile<kTokens, kRows>;
  using Format = std::conditional_t<kBFloat16, BFloat16, Float16>;
  static_assert(!Shape::kFew || (kStages == kW4MoeFewStages && kStages % 2 == 0));
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t barriers[2 * kStages + 1];
  uint64_t *const filled = barriers, *const freed = barriers + kStages;
  __shared__ int elements[kTokens], sources[kTokens];  // rows of out and of x, or -1
  __shared__ const char* x_rows[Shape::kFew ? kTokens : 1];
  // The blocks of a cluster divide K.
  const int parts = Shape::kFew ? cluster_blocks() : 1, part = Shape::kFew ? cluster_rank() : 0;
  const int index = blockIdx.x / parts;
  const int block = index / args.row_tiles, tile = index % args.row_tiles;
  const int begin = part * args.part_steps, end = min(begin + args.part_steps, args.steps);
  const int group = tile * (kRows / 16);
  // Uniform to the compiler.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  const int loader = warp - Shape::kConsumers / 32;
  FewRing ring{shared, barriers, group, 0, begin, end};
  if constexpr (Shape::kFew) {
    if (loader >= 0 && lane == 0) {
      map_prefetch(&args.weight_map);
      ring.set_up(args, loader);
    }
  } else if (threadIdx.x == 0) {
    map_prefetch(&args.weight_map);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(filled + s, 1 + 2 * Shape::kLoaders);
      mbarrier_init(freed + s, Shape::kConsumers / 32);
    }
    mbarrier_init_fence();
  }
  if (!args.down) {
    grid_dependency_wait();
    grid_dependency_launch();
  }
  const int block_tokens = Shape::kFew ? args.block_tokens : kTokens;
  const int expert = expert_of(args, block, block_tokens);
  ring.expert = expert;
  if constexpr (Shape::kFew) {
    // Each thread requests only what its own barriers count, so that nothing waits for the others.
    if (loader >= 0 && lane == 0 && expert >= 0) ring.start(args, loader);
  }
  if (threadIdx.x < kTokens) {
    const int element = element_at(args, block, block_tokens, threadIdx.x);
    elements[threadIdx.x] = element;
    const int source = element < 0 ? -1 : element / args.divide;
    sources[threadIdx.x] = source;
    // Columns of padding hold anything, here a row that exists.
    if (Shape::kFew) x_rows[threadIdx.x] = args.x + max(source, 0) * args.x_row;
  }
  __syncthreads();
  // Few tokens: those up to the last that is not padding.
  const int present =
      Shape::kFew ? 32 - __clz(__ballot_sync(0xffffffffu, sources[lane] >= 0)) : kTokens;
  if (loader >= 0) {
    if (expert >= 0) {
      if constexpr (Shape::kFew) {
        if (args.down) {
          // Without lists, all weights of the second product fit into the L2 cache.
          if (args.slots == nullptr && lane == 0) {
            for (int i = begin + loader + args.stages; i < end; i += 2) {
              tile_prefetch(&args.weight_map, i * kRowBytes, group, expert);
            }
          }
          grid_dependency_wait();
        }
        load_few(args, ring, x_rows, present, loader);
      } else {
        load_many<kFloats, kBFloat16, kTokens, kRows, kStages>(args, shared, sources, filled, freed,
                                                               expert, group);
      }
      if (parts > 1) {
        __syncwarp();
        cluster_meet();
        cluster_meet();
      }
    } else if (args.down) {
      grid_dependency_wait();
    }
    return;
  }
  if (args.down) {
    grid_dependency_wait();
    grid_dependency_launch();
    clear_unrouted<Shape::kConsumers>(args);
  }
  const auto store = [&](const float* results) {
    store_tile<Format, kRows, Shape::kConsumers>(args, results, elements, block_tokens, tile);
  };
  if (expert < 0) {
    if (args.down && expert == -1) store(nullptr);
    return;
  }

  const int warpgroup = warp / 4;
  // Rows of this thread, within the tile, are my_row and 8 further.
  const int first_row = (Shape::kFew ? 0 : warpgroup * 64) + warp % 4 * 16;
  const int my_row = first_row + lane / 4;
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
  float sums[kTokens / 2];
  if constexpr (Shape::kFew) {
    float eights[kTokens / 8][4] = {};
    multiply_few<kFloats, kBFloat16>(args, ring, present, warpgroup, first_row, eights);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sums[i] = eights[i / 4][i % 4];
  } else {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    multiply_many<kFloats, kBFloat16, kTokens, kRows, kStages>(args, shared, filled, freed, my_row,
                                                               sums);
  }
  consumers_sync<Shape::kConsumers>();  // every stage was read
  float* const results = reinterpret_cast<float*>(shared);
  // Sum i is of row my_row, or of the 8th behind it, and this token.
  const auto place_of = [&](int i) {
    const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    return results + token * w4_moe_sum_row(kRows) + my_row + i / 2 % 2 * 8;
  };
  if constexpr (Shape::kFew) {
    if (warpgroup == 1) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) *place_of(i) = sums[i];
    }
    consumers_sync<Shape::kConsumers>();
    if (warpgroup == 0) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sums[i] += *place_of(i);
    }
    if (parts > 1) {
      if (warpgroup == 0 && part > 0) {
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) *place_of(i) = sums[i];
      }
      cluster_meet();
      if (warpgroup == 0 && part == 0) {
        for (int other = 1; other < parts; ++other) {
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i) sums[i] += load_remote(place_of(i), other);
        }
      }
      cluster_meet();
      if (part > 0) return;
    }
  }
  if (!Shape::kFew || warpgroup == 0) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) *place_of(i) = fmaf(sums[i], factor, bias[i / 2 % 2]);
  }
  consumers_sync<Shape::kConsumers>();
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
          rows == 64 ? kW4MoeMostShared : stages * w4_moe_stage_bytes(tokens, rows))}

#define TIERCEL_W4_MOE_OF(floats, bfloat16, name)        \
  TIERCEL_W4_MOE(floats, bfloat16, 32, 64, 16, 3, name), \
      TIERCEL_W4_MOE(floats, bfloat16, 128, 192, 4, 1, name)

const W4MoeKernel kKernels[] = {TIERCEL_W4_MOE_OF(true, true, "e2m1, bfloat16"),
                                TIERCEL_W4_MOE(true, true, 64, 128, 4, 2, "e2m1, bfloat16"),
                                TIERCEL_W4_MOE_OF(false, true, "int4, bfloat16"),
                                TIERCEL_W4_MOE_OF(true, false, "e2m1, float16"),
                                TIERCEL_W4_MOE_OF(false, false, "int4, float16")};

}  // namespace

const W4MoeKernel* w4_moe_kernels(int* count) {
  *count = static_cast<int>(std::size(kKernels));
  return kKernels;
}

}  // namespace tiercel
