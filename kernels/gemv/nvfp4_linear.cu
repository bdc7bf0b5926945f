// SPDX-License-Identifier: Apache-2.0
// nvfp4_linear: out[t, n] = sum over k of x[t, k] * weight[n, k], weight in NVFP4, x in bfloat16,
// up to 16 tokens.
//
// The plan. The weights' bytes bind it: at N = 7168, K = 16384 58.7 MB and 7.3 MB of scales, 15 us
// at 4.4 TB/s. At that rate a multiprocessor has 256 weights to multiply every nine cycles, so
// whatever else moves for them has to stay small beside them.
//  - A warp keeps its part of x, 256 values of K, in registers, as the B operand of mma.m16n8k16.
//    16 rows after 16 rows of the weight pass by, through the warp's own ring of stages, which the
//    copy engine fills: no barrier of the block.
//  - Weights become float16 in registers: e2m1's bits are moved to float16's places, eleven
//    instructions for eight weights, and multiplied by their scale. That product is exact. The
//    order of K inside a product is free, so every thread takes weights as they lie.
//  - x becomes float16 too, times a power of two for each token of a warp's part that brings its
//    largest magnitude below 2^15: no value within 2^32 of that loses a bit.
//  - Of a single token the eight columns of B have each another group of 16 values, and zeros: the
//    columns of the product belong to one scale each, which then multiplies sums, not weights.
//  - `parts` warps of a block and the blocks of a cluster share K; where that is not all of it,
//    the rows pass by again. Each thread adds its sums up in shared memory. Only after a `group` of
//    turns do they meet: in the block, then at the block of the cluster that owns them.
#include <cstdint>

#include "kernels/gemv/nvfp4_linear_kernels.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/ring.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

constexpr int kWeightBytes = 16 * kLinearSlice / 2;  // of a stage: a line of each row
constexpr int kScaleBytes = 16 * kLinearSlice / 16;

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Two e4m3 as float16, each twice.
__device__ __forceinline__ void spread_scales(uint32_t (&scales)[2], uint32_t bits) {
  asm("{ .reg .b16 pair, low, high; .reg .b32 both; cvt.u16.u32 pair, %2;"
      " cvt.rn.f16x2.e4m3x2 both, pair; mov.b32 {low, high}, both;"
      " mov.b32 %0, {low, low}; mov.b32 %1, {high, high}; }"
      : "=r"(scales[0]), "=r"(scales[1])
      : "r"(bits));
}

// Two e4m3 as float32.
__device__ __forceinline__ float2 wide_scales(uint32_t bits) {
  float2 scales;
  asm("{ .reg .b16 pair, low, high; .reg .b32 both; cvt.u16.u32 pair, %2;"
      " cvt.rn.f16x2.e4m3x2 both, pair; mov.b32 {low, high}, both;"
      " cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(scales.x), "=f"(scales.y)
      : "r"(bits));
  return scales;
}

// Eight e2m1 as float16, times 2^-14, in the order 0 4, 2 6, 1 5, 3 7. With kMultiply the pipe of
// products takes one of the bit moves, which is faster where there are few other products.
template <bool kMultiply>
__device__ __forceinline__ void decode(uint32_t (&halves)[4], uint32_t word) {
  const uint32_t even = (word << 4 & 0x80808080u) | (word << 1 & 0x0e0e0e0eu);
  const uint32_t odd = (word & 0x80808080u) | (word >> 3 & 0x0e0e0e0eu);
  halves[1] = even & 0xff00ff00u;
  if constexpr (kMultiply) {
    asm("mad.lo.u32 %0, %1, -256, %2;" : "=r"(halves[0]) : "r"(halves[1]), "r"(even << 8));
  } else {
    halves[0] = __byte_perm(even, 0, 0x2404);
  }
  halves[2] = __byte_perm(odd, 0, 0x2404);
  halves[3] = odd & 0xff00ff00u;
}

__device__ __forceinline__ void multiply_accumulate(float (&c)[4], uint32_t a0, uint32_t a1,
                                                    uint32_t a2, uint32_t a3, uint32_t b0,
                                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The power of two that brings a magnitude, as bfloat16 bits, to [2^14, 2^15), and its inverse.
__device__ __forceinline__ float2 range_of(uint32_t largest) {
  const int exponent = min(max(static_cast<int>(largest >> 7) - 127, -112), 127);
  const int shift = 14 - exponent;
  return {__uint_as_float((127 + shift) << 23), __uint_as_float((127 - shift) << 23)};
}

__device__ __forceinline__ uint32_t scaled_pair(uint32_t low, uint32_t high, float factor) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;"
      : "=r"(pair)
      : "f"(__uint_as_float(high) * factor), "f"(__uint_as_float(low) * factor));
  return pair;
}

// The largest magnitude among a lane's eight values, as bfloat16 bits.
__device__ __forceinline__ uint32_t largest_of(const uint4& words) {
  uint32_t halves = 0;
  for (uint32_t word : {words.x, words.y, words.z, words.w}) {
    asm("max.u16x2 %0, %0, %1;" : "+r"(halves) : "r"(word & 0x7fff7fffu));
  }
  return max(halves & 0xffffu, halves >> 16);
}

// A thread's part of x: 64 neighbouring values of each of its tokens, lane / 4 and that + 8, in the
// order of decode(). Of a single token (kSingle) those of two groups of 16 in every 128, if any.
template <int kTiles, bool kSingle>
struct Vectors {
  uint4 words[kTiles][8];
  float inverse[kTiles][2];  // of the factors, for the tokens of the thread's sums

  // `k` is the warp's first value, `staging` room for four tokens: they are read line by line, and
  // go through it to the threads that want them.
  __device__ __forceinline__ void load(const Nvfp4LinearArgs& args, int k, int lane,
                                       char* staging) {
    constexpr int kTokens = kSingle ? 1 : 8;
    constexpr int kTogether = kSingle ? 1 : 4;
    const int quad = lane / 4, in_quad = lane % 4;
    uint4* places = reinterpret_cast<uint4*>(staging);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      uint4 values[kTokens];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        values[i] = make_uint4(0, 0, 0, 0);
        if (t * 8 + i < args.tokens && k + lane * 8 < args.k) {
          const char* x = args.x + (t * 8 + i) * args.x_row + (k + lane * 8) * int64_t{2};
          values[i] = *reinterpret_cast<const uint4*>(x);
        }
      }
      float mine = 0.0f;  // lane i: token i's
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (t * 8 + i >= args.tokens) break;
        const float2 factor = range_of(__reduce_max_sync(0xffffffffu, largest_of(values[i])));
        if (lane == i) mine = factor.y;
        const uint4 v = values[i];
        values[i] = make_uint4(scaled_pair(v.x << 16, v.z << 16, factor.x),
                               scaled_pair(v.y << 16, v.w << 16, factor.x),
                               scaled_pair(v.x & 0xffff0000u, v.z & 0xffff0000u, factor.x),
                               scaled_pair(v.y & 0xffff0000u, v.w & 0xffff0000u, factor.x));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        inverse[t][i] = __shfl_sync(0xffffffffu, mine, kSingle ? 0 : in_quad * 2 + i);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) words[t][i] = make_uint4(0, 0, 0, 0);
      // The places of eights are such that all banks are used, both ways.
#pragma unroll
      for (int first = 0; first < kTokens; first += kTogether) {
        if (t * 8 + first >= args.tokens) break;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          places[i * 32 + (lane ^ (lane / 8 * 2 + i % 2))] = values[first + i];
        }
        __syncwarp();
        const int token = kSingle ? 0 : quad - first;
        if (0 <= token && token < kTogether) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (!kSingle || quad == in_quad * 2 + i % 4 / 2) {
              words[t][i] = places[token * 32 + (in_quad * 8 + i ^ (in_quad * 2 + token % 2))];
            }
          }
        }
        __syncwarp();
      }
    }
    // The copy engine writes there next.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
  }
};

// A warp's stages: of weights, 16 rows of eight 16-byte pieces in the copy engine's order of 128
// bytes; of scales, 16 rows; and what says that they are filled.
template <int kStages>
struct Ring {
  char* weights;
  char* scales;
  uint64_t* filled;

  __device__ __forceinline__ Ring(char* shared, int warp, int warps) {
    weights = shared + warp * kStages * kWeightBytes;
    shared += warps * kStages * kWeightBytes;
    scales = shared + warp * kStages * kScaleBytes;
    shared += warps * kStages * kScaleBytes;
    filled = reinterpret_cast<uint64_t*>(shared) + warp * kStages;
  }
};

// What fills it: turn by turn through a group, pass after pass along K, group after group. Scales
// whose rows are not at multiples of 16 bytes (not kBoxes) are copied by the threads.
template <int kStages, bool kBoxes>
struct Filler {
  const Nvfp4LinearArgs& args;
  const Ring<kStages>& ring;
  int lane, turn_rows, first_row, first_slice;
  int turn, begin, end, last, pass;

  __device__ __forceinline__ void fill(int stage) {
    if (turn < last) {
      const int k = (first_slice + pass * args.parts) * kLinearSlice;
      const int row = turn * turn_rows + first_row;
      char* scales = ring.scales + stage * kScaleBytes;
      if (lane == 0) {
        uint64_t* filled = ring.filled + stage;
        const bool real = k < args.k && row < args.features;
        // What is behind the end of rows or of K comes as zeros, and counts.
        mbarrier_expect(filled, real ? kWeightBytes + (kBoxes ? kScaleBytes : 0) : 0);
        if (real) {
          box_load(ring.weights + stage * kWeightBytes, &args.weight_map, k / 2, row, filled);
          if (kBoxes) box_load(scales, &args.scale_map, k / 16, row, filled);
        }
      }
      if (!kBoxes) copy_scales(scales, k / 16, row);
    }
    if (!kBoxes) async_copy_commit();
    if (++turn < end) return;
    if (++pass == args.passes) {
      pass = 0;
      begin = end;
      end = min(end + args.group, last);
    }
    turn = begin;
  }

  __device__ __forceinline__ void copy_scales(char* scales, int column, int row) {
    const uint32_t to = shared_address(scales) + lane * 8;
    const int from = column + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const bool real = row + lane / 2 < args.features && from + i < args.k / 16;
      async_copy_4(to + i, args.scale + (row + lane / 2) * args.scale_row + from + i, real);
    }
  }
};

// kTiles tiles of 8 tokens, or a single token.
template <int kTiles, bool kSingle, int kStages, bool kBoxes>
__global__ void __launch_bounds__(kLinearMaxThreads)
    nvfp4_linear(const __grid_constant__ Nvfp4LinearArgs args) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kKept = kSingle ? 2 : 4;      // sums of a thread, for a tile of tokens
  constexpr int kSums = kTiles * kKept * 32;  // of 16 rows, of a warp
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int quad = lane / 4;
  const int in_quad = lane % 4;
  const int parts = args.parts;
  const int tiles = args.tiles;
  const int blocks = cluster_blocks();
  const int rank = cluster_rank();
  const int first_turn = blockIdx.x / blocks * args.turns;
  const int last_turn = min(first_turn + args.turns, args.all_turns);
  const int first_slice = rank * args.passes * parts + warp % parts;
  if (blocks > 1) cluster_arrive_relaxed();

  const Ring<kStages> ring(shared, warp, warps);
  if (lane == 0) {
    for (int s = 0; s < kStages; ++s) mbarrier_init(ring.filled + s, 1);
    mbarrier_init_fence();
  }
  __syncwarp();
  grid_dependency_wait();
  grid_dependency_launch();

  Filler<kStages, kBoxes> filler{args,
                                 ring,
                                 lane,
                                 tiles * 16,
                                 warp / parts * 16,
                                 first_slice,
                                 first_turn,
                                 first_turn,
                                 min(first_turn + args.group, last_turn),
                                 last_turn,
                                 0};
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) filler.fill(s);

  // [turn of the group][warp][sum of a thread][lane], then what a block owns of all blocks' sums.
  float* all_sums = reinterpret_cast<float*>(shared + warps * kStages * kLinearStageBytes);
  float* received = all_sums + args.group * warps * kSums;
  const int piece = quad * 128 + (in_quad * 2 ^ quad) * 16;
  Vectors<kTiles, kSingle> x;
  int stage = 0;
  uint32_t parity = 0;
  for (int begin = first_turn; begin < last_turn; begin += args.group) {
    const int turns = min(args.group, last_turn - begin);
    for (int pass = 0; pass < args.passes; ++pass) {
      const int k = (first_slice + pass * parts) * kLinearSlice;
      // The stage that is filled next is free until then.
      if (args.passes > 1 || begin == first_turn) {
        x.load(args, k, lane, ring.weights + (stage == 0 ? kStages - 1 : stage - 1) * kWeightBytes);
      }
      float* my_sums = all_sums + warp * kSums + lane;
      for (int turn = 0; turn < turns; ++turn) {
        mbarrier_wait(ring.filled + stage, parity);
        if (!kBoxes) async_copy_wait<kStages - 2>();
        __syncwarp();
        filler.fill(stage == 0 ? kStages - 1 : stage - 1);
        const char* weights = ring.weights + stage * kWeightBytes;
        const char* scales = ring.scales + stage * kScaleBytes + lane * 4;
        stage = stage + 1 == kStages ? 0 : stage + 1;
        parity ^= stage == 0;
        float products[kTiles][4] = {};
        float single[2] = {};
        if (k < args.k) {
          uint4 words[2][2];
          uint32_t bits[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int unit = 0; unit < 2; ++unit) {
              words[unit][half] =
                  *reinterpret_cast<const uint4*>(weights + half * 1024 + (piece ^ unit * 16));
            }
            bits[half] = *reinterpret_cast<const uint32_t*>(scales + half * 128);
          }
#pragma unroll
          for (int unit = 0; unit < 2; ++unit) {
            uint32_t factors[2][2];
            if (kSingle) {
              for (float& product : products[0]) product = 0.0f;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (!kSingle) spread_scales(factors[half], unit == 0 ? bits[half] : bits[half] >> 16);
            }
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              uint32_t a[2][4];
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const uint4& q = words[unit][half];
                decode<kTiles == 1>(a[half], w == 0 ? q.x : w == 1 ? q.y : w == 2 ? q.z : q.w);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  if (!kSingle) a[half][i] = multiply_halves(a[half][i], factors[half][w / 2]);
                }
              }
#pragma unroll
              for (int t = 0; t < kTiles; ++t) {
                const uint4& b = x.words[t][unit * 4 + w];
                multiply_accumulate(products[t], a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
                multiply_accumulate(products[t], a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
              }
            }
            if (kSingle) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const float2 scale = wide_scales(unit == 0 ? bits[half] : bits[half] >> 16);
                single[half] = fmaf(products[0][half * 2], scale.x, single[half]);
                single[half] = fmaf(products[0][half * 2 + 1], scale.y, single[half]);
              }
            }
          }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int i = 0; i < kKept; ++i) {
            float& sum = my_sums[(t * kKept + i) * 32];
            sum = fmaf(kSingle ? single[i % 2] : products[t][i], x.inverse[t][i % 2],
                       pass == 0 ? 0.0f : sum);
          }
        }
        my_sums += warps * kSums;
      }
    }

    const float factor = (args.global_scale != nullptr ? *args.global_scale : 1.0f) * 16384.0f;
    const auto write = [&](int row, int token, float sum) {
      const int feature = begin * tiles * 16 + row;
      if (feature >= args.features) return;
      uint16_t bits;
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(sum * factor));
      args.out[static_cast<int64_t>(token) * args.features + feature] = bits;
    };
    __syncthreads();
    if (blocks > 1) cluster_wait();  // they run, and have done with what they received before
    // Eight rows of one token lie together, in every fourth place.
    const int rows = turns * tiles * 16;
    const int outputs = rows * args.tokens;
    const int share = (outputs + blocks - 1) / blocks;
    for (int o = threadIdx.x; o < outputs; o += blockDim.x) {
      const int row = o % rows, token = o / rows;
      const float* from = all_sums + row / 16 * parts * kSums;
      float sum = 0.0f;
      if constexpr (kSingle) {
        from += row % 16 / 8 * 32 + row % 8 * 4;
#pragma unroll 4
        for (int p = 0; p < parts; ++p) {
          const float4 v = *reinterpret_cast<const float4*>(from + p * kSums);
          sum += (v.x + v.y) + (v.z + v.w);
        }
      } else {
        from += (token / 8 * 4 + row % 16 / 8 * 2 + token % 2) * 32 + row % 8 * 4 + token % 8 / 2;
#pragma unroll 8
        for (int p = 0; p < parts; ++p) sum += from[p * kSums];
      }
      if (blocks == 1) {
        write(row, token, sum);
      } else {
        store_remote(reinterpret_cast<uint32_t*>(received + rank * share + o % share), o / share,
                     __float_as_uint(sum));
      }
    }
    if (blocks == 1) {
      __syncthreads();
      continue;
    }
    cluster_arrive();
    cluster_wait();
    for (int i = threadIdx.x; i < share; i += blockDim.x) {
      const int o = rank * share + i;
      if (o >= outputs) break;
      float sum = 0.0f;
      for (int b = 0; b < blocks; ++b) sum += received[b * share + i];
      write(o % rows, o / rows, sum);
    }
    if (begin + args.group < last_turn) cluster_arrive();
  }
}

struct Entry {
  int tokens;
  int stages;
  bool boxes;
  Kernel kernel;
};

#define TIERCEL_KERNEL(tokens, tiles, single, stages, boxes)                         \
  {tokens, stages, boxes,                                                            \
   Kernel("nvfp4_linear<tokens=" #tokens ", stages=" #stages ", boxes=" #boxes ">",  \
          reinterpret_cast<const void*>(nvfp4_linear<tiles, single, stages, boxes>), \
          kLinearMaxShared)}
#define TIERCEL_KERNELS(stages, boxes)                                                   \
  TIERCEL_KERNEL(1, 1, true, stages, boxes), TIERCEL_KERNEL(8, 1, false, stages, boxes), \
      TIERCEL_KERNEL(16, 2, false, stages, boxes)

// By tokens.
const Entry kKernels[] = {TIERCEL_KERNELS(2, true), TIERCEL_KERNELS(3, true),
                          TIERCEL_KERNELS(2, false)};

}  // namespace

const Kernel* nvfp4_linear_kernel(int tokens, int stages, bool boxes) {
  for (const Entry& entry : kKernels) {
    if (entry.tokens >= tokens && entry.stages == stages && entry.boxes == boxes) {
      return &entry.kernel;
    }
  }
  return nullptr;
}

}  // namespace tiercel
