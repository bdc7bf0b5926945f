// SPDX-License-Identifier: Apache-2.0
// w4_linear for many tokens: out[t, n] = act(sum over k of x[t, k] * weight[n, k] + bias[n]), the
// weight in 4 bits.
//
// Weights are the A operand of wgmma, in registers: a thread decodes them there, so that they cost
// neither shared memory nor a second pass. Rows of the weight are therefore the product's rows, and
// tokens its columns.
//  - A block has 128 rows of the weight and up to 256 tokens. One warp loads both by TMA
//  into
//    a ring of stages of 128 values of K; two warpgroups decode and multiply, each 64 rows.
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

#include "kernels/gemv/w4_epilogue.cuh"
#include "kernels/gemv/w4_tiles_kernels.h"
#include "kernels/gemv/w4_weights.cuh"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

constexpr int kRowBytes = kW4Step / 2;  // of a row of the weight in a stage
constexpr int kHalfStep = kW4Step / 2;  // values of K in a row of x's swizzle

__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kW4Consumers) : "memory");
}

// Four sums in block `rank`'s shared memory.
__device__ __forceinline__ float4 load_remote(const float4* address, uint32_t rank) {
  float4 v;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %4, %5;"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(shared_address(address)), "r"(rank)
      : "memory");
  return v;
}

// Stores four 8x8 matrices, turned. Lane 8 m + r passes the address of column r of matrix m.
__device__ __forceinline__ void store_turned(uint32_t place, const uint32_t (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

template <int kTokens, int kRows, int kStages>
struct Tile {
  static constexpr int kXBytes = kTokens * kW4Step * 2;
  static constexpr int kStageBytes = w4_stage_bytes(kTokens, kRows);
  static constexpr int kMatrices = kRows / 128;  // of 64 rows, a warpgroup
  static constexpr int kOutRow = kRows * 2 + 16;
};

template <typename Shape, int kTokens, int kStages>
__device__ __forceinline__ void load_stages(const W4TilesArgs& args, char* shared, uint64_t* filled,
                                            uint64_t* freed, int first, int last, int row,
                                            int token) {
  map_prefetch(&args.weight_map);
  map_prefetch(&args.x_map);
  for (int i = first; i < min(first + kStages, last); ++i) {
    box_prefetch(&args.weight_map, i * kRowBytes, row);
  }
  grid_dependency_wait();
  for (int i = first; i < last; ++i) {
    const int turn = i - first, stage = turn % kStages;
    if (turn >= kStages) mbarrier_wait(freed + stage, turn / kStages + 1 & 1);
    char* const to = shared + stage * Shape::kStageBytes;
    mbarrier_expect(filled + stage, Shape::kStageBytes);
    box_load(to, &args.x_map, i * kW4Step, token, filled + stage);
    box_load(to + Shape::kXBytes / 2, &args.x_map, i * kW4Step + kHalfStep, token, filled + stage);
    box_load(to + Shape::kXBytes, &args.weight_map, i * kRowBytes, row, filled + stage);
  }
}

template <bool kFloats, bool kBFloat16, int kTokens, int kRows, int kStages, int kTogether>
__global__ void __launch_bounds__(w4_threads(kTogether), kTogether)
    w4_tiles(const __grid_constant__ W4TilesArgs args) {
  using Shape = Tile<kTokens, kRows, kStages>;
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
      load_stages<Shape, kTokens, kStages>(args, shared, filled, freed, first, last, first_row,
                                           first_token);
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
  consumers_sync();  // every stage was read
  const bool plain = blocks == 1 && args.epilogue.activation == W4Activation::kNone;
  char* const results = shared + (plain ? 0 : kRows * kTokens * 4);
  // Stores 16 tokens: matrices of 8 rows and 8 tokens.
  const auto store = [&](int pair, int row, const float* v) {
    const uint32_t words[4] = {Format::pack(v), Format::pack(v + 2), Format::pack(v + 4),
                               Format::pack(v + 6)};
    const int token = pair * 16 + lane / 16 * 8 + lane % 8;
    const int feature = row - lane / 4 + lane / 8 % 2 * 8;
    store_turned(shared_address(results + token * Shape::kOutRow + feature * 2), words);
  };
  constexpr int kPairs = kTokens / 16;
  if (plain) {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      const int row = my_row + m * 64;
      const float low = bias_of<Format>(args.epilogue, first_row + row, args.features);
      const float high = bias_of<Format>(args.epilogue, first_row + row + 8, args.features);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          v[j] = fmaf(sums[m][pair * 8 + j], factor, j / 2 % 2 == 0 ? low : high);
        }
        store(pair, row, v);
      }
    }
  } else {
    float4* const parts = reinterpret_cast<float4*>(shared) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kMatrices * kPairs * 2; ++i) {
      const float* s = sums[i / (kPairs * 2)] + i % (kPairs * 2) * 4;
      parts[i * kW4Consumers] = make_float4(s[0], s[1], s[2], s[3]);
    }
    if (blocks > 1) {
      cluster_arrive();
      cluster_wait();
    }
    for (int i = rank; i < kMatrices * kPairs; i += blocks) {
      const int row = my_row + i / kPairs * 64;
      float v[8] = {};
      for (int b = 0; b < blocks; ++b) {
        const float4* from = parts + i * 2 * kW4Consumers;
        const float4 first_part = blocks == 1 ? from[0] : load_remote(from, b);
        const float4 second_part =
            blocks == 1 ? from[kW4Consumers] : load_remote(from + kW4Consumers, b);
        v[0] += first_part.x, v[1] += first_part.y, v[2] += first_part.z, v[3] += first_part.w;
        v[4] += second_part.x, v[5] += second_part.y, v[6] += second_part.z, v[7] += second_part.w;
      }
      const float low = bias_of<Format>(args.epilogue, first_row + row, args.features);
      const float high = bias_of<Format>(args.epilogue, first_row + row + 8, args.features);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = activated(args.epilogue.activation, fmaf(v[j], factor, j / 2 % 2 == 0 ? low : high));
      }
      store(i % kPairs, row, v);
    }
  }
  if (blocks > 1) cluster_arrive();
  consumers_sync();
  constexpr int kChunks = kRows / 8;  // of 16 bytes, a token
  const bool whole = args.features % 8 == 0;
  for (int i = threadIdx.x; i < kTokens * kChunks; i += kW4Consumers) {
    const int token = i / kChunks, feature = i % kChunks * 8;
    if (first_token + token >= args.tokens || first_row + feature >= args.features) continue;
    if (blocks > 1 && (feature / 64 % kMatrices * (kTokens / 16) + token / 16) % blocks != rank)
      continue;
    const uint4 v = *reinterpret_cast<const uint4*>(results + token * Shape::kOutRow + feature * 2);
    uint16_t* const to =
        args.out + (first_token + token) * int64_t{args.features} + first_row + feature;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = v;
      continue;
    }
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (first_row + feature + j < args.features) {
        to[j] = static_cast<uint16_t>(words[j / 2] >> j % 2 * 16);
      }
    }
  }
  if (blocks > 1) cluster_wait();
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
