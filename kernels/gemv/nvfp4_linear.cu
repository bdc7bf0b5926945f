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
//    largest magnitude below 2^15: no value within 2^32 of that loses a bit. Warps with the same
//    part of K and other rows share this work.
//  - Of a single token the eight columns of B have each another group of 16 values, and zeros: the
//    columns of the product belong to one scale each, which then multiplies sums, not weights.
//  - `parts` warps of a block and the blocks of a cluster share K; where that is not all of it,
//    the rows pass by again. Warps send their sums to the block of the cluster that owns the rows,
//    which after a `group` of turns adds those of all parts up.
#include <cstdint>

#include "kernels/gemv/nvfp4_linear_kernels.h"
#include "kernels/gemv/nvfp4_weights.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/ring.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

constexpr int kWeightBytes = 16 * kLinearSlice / 2;  // of a stage: a line of each row
constexpr int kScaleBytes = 16 * kLinearSlice / 16;

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

// A part's warps of a block.
__device__ __forceinline__ void part_sync(int part, int tiles) {
  if (tiles == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(part + 1), "r"(tiles * 32) : "memory");
  }
}

// A thread's part of x: 64 neighbouring values of each of its tokens, lane / 4 and that + 8, in the
// order of decode(). Of a single token (kSingle) those of two groups of 16 in every 128, if any.
template <int kTiles, bool kSingle>
struct Vectors {
  uint4 words[kTiles][8];

  // `values` as float16; what to multiply them by again.
  static __device__ __forceinline__ float scale(uint4& values) {
    const float2 factor = range_of(__reduce_max_sync(0xffffffffu, largest_of(values)));
    const uint4 v = values;
    values = make_uint4(scaled_pair(v.x << 16, v.z << 16, factor.x),
                        scaled_pair(v.y << 16, v.w << 16, factor.x),
                        scaled_pair(v.x & 0xffff0000u, v.z & 0xffff0000u, factor.x),
                        scaled_pair(v.y & 0xffff0000u, v.w & 0xffff0000u, factor.x));
    return factor.y;
  }

  // `k` is the warp's first value. Tokens are read line by line, each by one of the part's `tiles`
  // warps, and go through their staging, room for four tokens each and `pitch` bytes apart, to the
  // threads that want them. `inverses`: the part's, by token.
  __device__ __forceinline__ void load(const Nvfp4LinearArgs& args, int k, int lane, int part,
                                       int tile, char* staging, int pitch, float* inverses) {
    constexpr int kTokens = kSingle ? 1 : kTiles * 8;
    constexpr int kAtOnce = kSingle ? 1 : 8;  // of a warp
    const int tiles = kSingle ? 1 : args.tiles;
    const int quad = lane / 4, in_quad = lane % 4;
    const int first_tile = kSingle ? tile : 0;
    if (kSingle) tile = 0;
    part_sync(part, tiles);  // all have done with the last pass's inverses
    uint4* mine = reinterpret_cast<uint4*>(staging + (first_tile + tile) * pitch);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) words[t][i] = make_uint4(0, 0, 0, 0);
    }
    for (int base = 0; base < min(kTokens, args.tokens); base += 8 * tiles) {
      uint4 values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int token = base + i / 4 * 4 * tiles + tile * 4 + i % 4;
        values[i] = make_uint4(0, 0, 0, 0);
        if (token < args.tokens && k + lane * 8 < args.k) {
          const char* x = args.x + token * args.x_row + (k + lane * 8) * int64_t{2};
          values[i] = *reinterpret_cast<const uint4*>(x);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int token = base + i / 4 * 4 * tiles + tile * 4 + i % 4;
        if (token >= args.tokens) break;
        const float factor = scale(values[i]);
        if (lane == 0) inverses[token] = factor;
      }
      // The places of eights are such that all banks are used, both ways.
#pragma unroll
      for (int round = 0; round < (kAtOnce + 3) / 4; ++round) {
        const int first = base + round * 4 * tiles;
        if (first >= args.tokens) break;
#pragma unroll
        for (int i = 0; i < min(kAtOnce, 4); ++i) {
          mine[i * 32 + (lane ^ (lane / 8 * 2 + i % 2))] = values[round * 4 + i];
        }
        part_sync(part, tiles);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const int slot = kSingle ? 0 : t * 8 + quad - first;
          if (0 <= slot && slot < 4 * tiles) {
            const uint4* places =
                reinterpret_cast<const uint4*>(staging + (first_tile + slot / 4) * pitch);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              if (!kSingle || quad == in_quad * 2 + i % 4 / 2) {
                words[t][i] = places[slot % 4 * 32 + (in_quad * 8 + i ^ (in_quad * 2 + slot % 2))];
              }
            }
          }
        }
        part_sync(part, tiles);
      }
    }
    // The copy engine writes to the staging next.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    part_sync(part, tiles);
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
  __shared__ __align__(
      8) float inverses[kLinearMaxThreads / 32][kTiles * 8];  // by part (of one token: warp)
  constexpr int kSums = kSingle ? 16 : kTiles * 128;          // of 16 rows, of a warp
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be uniform
  const int warps = blockDim.x / 32;
  const int quad = lane / 4;
  const int in_quad = lane % 4;
  const int parts = args.parts;
  const int part = warp % parts;
  const int tiles = args.tiles;
  const int tile = warp / parts;
  const int blocks = cluster_blocks();
  const int blocks_shift = __ffs(blocks) - 1;  // a power of two
  const int rank = cluster_rank();
  const int first_turn = blockIdx.x / blocks * args.turns;
  const int last_turn = min(first_turn + args.turns, args.all_turns);
  const int first_slice = rank * args.passes * parts + part;
  if (blocks > 1) cluster_arrive_relaxed();

  const Ring<kStages> ring(shared, warp, warps);
  if (lane == 0) {
    for (int s = 0; s < kStages; ++s) mbarrier_init(ring.filled + s, 1);
    mbarrier_init_fence();
  }
  __syncwarp();
  grid_dependency_wait();
  grid_dependency_launch();

  Filler<kStages, kBoxes> filler{args,       ring,       lane,
                                 tiles * 16, tile * 16,  first_slice,
                                 first_turn, first_turn, min(first_turn + args.group, last_turn),
                                 last_turn,  0};
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) filler.fill(s);

  // Of 16 rows that the block owns, every `blocks`th: [block][part][sum], then what the warp keeps
  // from pass to pass: [turn of the group][warp][sum].
  float* received = reinterpret_cast<float*>(shared + warps * kStages * kLinearStageBytes);
  const int of_strip = blocks * parts * kSums;
  float* kept = received + (args.group * tiles + blocks - 1) / blocks * of_strip + warp * kSums;
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
        char* staging =
            shared + (part * kStages + (stage == 0 ? kStages : stage) - 1) * kWeightBytes;
        x.load(args, k, lane, part, tile, staging, parts * kStages * kWeightBytes,
               inverses[kSingle ? warp : part]);
      }
      if (blocks > 1 && pass == args.passes - 1) {
        cluster_wait();  // they run, and have done with what they received before
      }
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
                decode(a[half], w == 0 ? q.x : w == 1 ? q.y : w == 2 ? q.z : q.w);
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
        const int strip = turn * tiles + tile;
        float* mine = kept + turn * warps * kSums;
        const int owner = strip & (blocks - 1);
        float* theirs =
            received + (strip >> blocks_shift) * of_strip + (rank * parts + part) * kSums;
        const bool last = pass == args.passes - 1;
        if constexpr (kSingle) {
          // A row's sum is in four lanes; lanes 0 and 1 of these get this row's and that + 8's.
          const bool odd = in_quad % 2;
          float sum = odd ? single[1] : single[0];
          sum += __shfl_xor_sync(0xffffffffu, odd ? single[0] : single[1], 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          sum *= inverses[warp][0];
          const int place = in_quad * 8 + quad;
          if (in_quad < 2) {
            if (pass > 0) sum += mine[place];
            if (!last) {
              mine[place] = sum;
            } else {
              store_remote(reinterpret_cast<uint32_t*>(theirs + place), owner,
                           __float_as_uint(sum));
            }
          }
        } else {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            const int place = t * 32 + lane;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (pass > 0) sum = reinterpret_cast<float4*>(mine)[place];
            // What there is for columns behind the last token is not looked at.
            const auto inverse = reinterpret_cast<const float2*>(inverses[part])[t * 4 + in_quad];
            sum.x = fmaf(products[t][0], inverse.x, sum.x);
            sum.y = fmaf(products[t][1], inverse.y, sum.y);
            sum.z = fmaf(products[t][2], inverse.x, sum.z);
            sum.w = fmaf(products[t][3], inverse.y, sum.w);
            if (!last) {
              reinterpret_cast<float4*>(mine)[place] = sum;
            } else if (blocks > 1) {
              store_remote(reinterpret_cast<float4*>(theirs) + place, owner, sum);
            } else {
              reinterpret_cast<float4*>(theirs)[place] = sum;
            }
          }
        }
      }
    }

    if (blocks > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
    const float factor = (args.global_scale != nullptr ? *args.global_scale : 1.0f) * 16384.0f;
    const auto write = [&](int feature, int token, float sum) {
      if (feature >= args.features || token >= args.tokens) return;
      uint16_t bits;
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(sum * factor));
      args.out[static_cast<int64_t>(token) * args.features + feature] = bits;
    };
    const int strips = turns * tiles;
    for (int mine = warp; mine * blocks + rank < strips; mine += warps) {
      const float* from = received + mine * of_strip;
      const int feature = (begin * tiles + mine * blocks + rank) * 16 + quad;
      if constexpr (kSingle) {
        if (lane >= 16) break;
        float sum = 0.0f;
#pragma unroll 8
        for (int j = 0; j < blocks * parts; ++j) sum += from[j * kSums + lane];
        write(feature - quad + lane, 0, sum);
      } else {
        float4 sums[kTiles] = {};
#pragma unroll 4
        for (int j = 0; j < blocks * parts; ++j) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            const float4 v = reinterpret_cast<const float4*>(from + j * kSums)[t * 32 + lane];
            sums[t].x += v.x, sums[t].y += v.y, sums[t].z += v.z, sums[t].w += v.w;
          }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const int token = t * 8 + in_quad * 2;
          write(feature, token, sums[t].x);
          write(feature, token + 1, sums[t].y);
          write(feature + 8, token, sums[t].z);
          write(feature + 8, token + 1, sums[t].w);
        }
      }
    }
    if (begin + args.group >= last_turn) break;
    if (blocks > 1) {
      cluster_arrive();
    } else {
      __syncthreads();
    }
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
