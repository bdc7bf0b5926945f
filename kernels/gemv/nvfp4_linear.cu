// SPDX-License-Identifier: Apache-2.0
// nvfp4_linear: out[t, n] = sum over k of x[t, k] * weight[n, k], weight in NVFP4, x in bfloat16,
// up to 16 tokens.
//
// The plan. The weights' bytes bind it: at N = 7168, K = 16384 58.7 MB and 7.3 MB of scales, 15 us
// at 4.4 TB/s; what is to be done for each of them must not take longer, and is what this kernel is
// about. A warp has a tile of 16 rows and its part of K, 256 values at a time, by its own queue of
// asynchronous copies: several KiB a warp are under way at any time, and each thread reads back
// only what it copied (but for scales, which a quad shares), so no barrier is needed. Weights
// become float16 in registers: e2m1's bits are moved to float16's places, eleven instructions for
// eight values, and multiplied by their scale. That product is exact. It is the A operand of
// mma.m16n8k16, the tokens are B, sums are float32. The order of K inside a product is free, so
// every thread takes weights as they lie; x is put into that order in shared memory.
// x becomes float16 too, times a power of two for each token that brings its largest magnitude
// below 2^15: no value within 2^32 of that loses a bit.
// K is split over `parts` warps of a block and over the blocks of a cluster, each of which holds
// only its part of x; sums meet in shared memory, at last through the cluster's.
#include <cstdint>

#include "kernels/gemv/nvfp4_linear_kernels.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Two e4m3 as float16, times 2^7, each twice.
__device__ __forceinline__ void spread_scales(uint32_t (&scales)[2], uint32_t bits) {
  uint32_t both;
  asm("{ .reg .b16 pair; cvt.u16.u32 pair, %1; cvt.rn.f16x2.e4m3x2 %0, pair; }"
      : "=r"(both)
      : "r"(bits));
  both = multiply_halves(both, 0x58005800u);
  scales[0] = __byte_perm(both, 0, 0x1010);
  scales[1] = __byte_perm(both, 0, 0x3232);
}

// Eight e2m1 as float16, times 2^-14, in the order 0 4, 2 6, 1 5, 3 7.
__device__ __forceinline__ void decode(uint32_t (&halves)[4], uint32_t word) {
  const uint32_t even = (word << 4 & 0x80808080u) | (word << 1 & 0x0e0e0e0eu);
  const uint32_t odd = (word & 0x80808080u) | (word >> 3 & 0x0e0e0e0eu);
  halves[0] = __byte_perm(even, 0, 0x2404);
  halves[1] = even & 0xff00ff00u;
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

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_blocks() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
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
      : "f"(bfloat16_bits_to_float(high) * factor), "f"(bfloat16_bits_to_float(low) * factor));
  return pair;
}

// Where in shared memory the eight values lie that belong to word `word` of a thread of a quad: a
// thread's four lie together, so placed that the eight lanes of a load use all banks.
__device__ __forceinline__ int place_of_x(int step, int tokens, int token, int in_quad, int word) {
  return ((step * tokens + token) * 4 + in_quad) * 4 + (word ^ in_quad ^ (token & 1));
}

// The largest of a and each half of the words, which are magnitudes.
__device__ __forceinline__ uint32_t largest_of(uint32_t a, const uint4& words) {
  constexpr uint32_t kMagnitudes = 0x7fff7fffu;
  uint32_t halves = words.x & kMagnitudes;
  for (uint32_t word : {words.y, words.z, words.w}) {
    asm("max.u16x2 %0, %0, %1;" : "+r"(halves) : "r"(word & kMagnitudes));
  }
  return max(a, max(halves & 0xffffu, halves >> 16));
}

// The block's part of x, from value `first` on, `chunks` eights a token, in shared memory; and each
// token's inverse factor. Eight tokens at a time, whose loads leave together.
__device__ __forceinline__ void stage_x(uint4* shared, uint32_t* largest, float* inverse,
                                        const Nvfp4LinearArgs& args, int first, int chunks) {
  constexpr int kTogether = 8;
  const int threads = blockDim.x;
  if (threadIdx.x < args.tokens) largest[threadIdx.x] = 0;
  __syncthreads();
  for (int group = 0; group < args.tokens; group += kTogether) {
    const int tokens = min(kTogether, args.tokens - group);
    uint4 values[kTogether];
    const auto load = [&](int chunk) {
      const int k = first + chunk * 8;
      const char* x = args.x + group * args.x_row + k * 2;
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        values[t] = make_uint4(0, 0, 0, 0);
        if (t < tokens && k < args.k) {
          values[t] = *reinterpret_cast<const uint4*>(x + t * args.x_row);
        }
      }
    };
    uint32_t bits[kTogether] = {};
    for (int chunk = threadIdx.x; chunk < chunks; chunk += threads) {
      load(chunk);
#pragma unroll
      for (int t = 0; t < kTogether; ++t) bits[t] = largest_of(bits[t], values[t]);
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      if (t >= tokens) break;
      bits[t] = warp_max(bits[t]);
      if (threadIdx.x % 32 == 0) atomicMax(&largest[group + t], bits[t]);
    }
    __syncthreads();
    for (int chunk = threadIdx.x; chunk < chunks; chunk += threads) {
      if (chunks > threads) load(chunk);  // else it is still there
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        if (t >= tokens) break;
        const float factor = range_of(largest[group + t]).x;
        const uint4& v = values[t];
        shared[place_of_x(chunk / 16, args.tokens, group + t, chunk / 4 % 4, chunk % 4)] =
            make_uint4(scaled_pair(v.x & 0xffffu, v.z & 0xffffu, factor),
                       scaled_pair(v.y & 0xffffu, v.w & 0xffffu, factor),
                       scaled_pair(v.x >> 16, v.z >> 16, factor),
                       scaled_pair(v.y >> 16, v.w >> 16, factor));
      }
    }
  }
  if (threadIdx.x < args.tokens) inverse[threadIdx.x] = range_of(largest[threadIdx.x]).y;
  __syncthreads();
}

// kTiles tiles of 8 tokens.
template <int kTiles, int kStages>
__global__ void __launch_bounds__(linear_max_threads(8 * kTiles))
    nvfp4_linear(const __grid_constant__ Nvfp4LinearArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ uint32_t largest[kLinearMaxTokens];
  __shared__ float inverse[kLinearMaxTokens];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int in_quad = lane % 4;
  const int quad = lane / 4;
  const int parts = args.parts;
  const int part = warp % parts;
  const int blocks = cluster_blocks();
  const int rank = cluster_rank();
  const int tiles_of_block = warps / parts;
  const int tile = blockIdx.x / blocks * tiles_of_block + warp / parts;
  const int row = tile * 16 + quad;
  const int all_stages = (args.k + kLinearStage - 1) / kLinearStage;
  const int first_stage = rank * args.block_stages;
  const int stages = max(0, min(args.block_stages, all_stages - first_stage));
  const int first = first_stage * kLinearStage;

  // A warp's queue: [stage][row half][step][lane] 16 bytes of weights, [stage][16 rows] of scales.
  char* queue = reinterpret_cast<char*>(shared) + warp * kStages * kLinearStageBytes;
  const uint32_t queue_address = static_cast<uint32_t>(__cvta_generic_to_shared(queue));
  uint4* x = shared + warps * kStages * kLinearStageBytes / 16;

  // What comes next for this thread.
  const char* weight =
      args.weight + row * args.weight_row + first / 2 + in_quad * 16 + part * (kLinearStage / 2);
  const char* scale =
      args.scale + row * args.scale_row + first / 16 + in_quad * 4 + part * (kLinearStage / 16);
  int left = min(stages * kLinearStage, args.k - first) - part * kLinearStage;  // of K
  const int64_t weight_half = 8 * args.weight_row;
  const int64_t scale_half = 8 * args.scale_row;
  const bool real_low = row < args.features;
  const bool real_high = row + 8 < args.features;
  const auto copy = [&](int slot) {
    const uint32_t to = queue_address + slot * kLinearStageBytes;
    if (left > 0) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const bool in = step * 128 + in_quad * 32 < left;
        const char* from = weight + step * 64;
        async_copy_16(to + (step * 32 + lane) * 16, from, in && real_low);
        async_copy_16(to + (64 + step * 32 + lane) * 16, from + weight_half, in && real_high);
      }
      const bool in = in_quad * 64 < left;
      async_copy_4(to + 2048 + lane * 4, scale, in && real_low);
      async_copy_4(to + 2048 + 128 + lane * 4, scale + scale_half, in && real_high);
    }
    async_copy_commit();
    weight += parts * (kLinearStage / 2);
    scale += parts * (kLinearStage / 16);
    left -= parts * kLinearStage;
  };

  grid_dependency_wait();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) copy(s);
  stage_x(x, largest, inverse, args, first, stages * (kLinearStage / 8));

  // A column of the product past the last token is as good as any: it is not stored.
  const uint4* my_x[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    my_x[w] = x + place_of_x(part * 2, args.tokens, min(quad, args.tokens - 1), in_quad, w);
  }
  const int other_tile = min(8, max(args.tokens - 1 - quad, 0)) / 8 * 8 * 16;
  const int x_step = args.tokens * 16;
  float sums[kTiles][4] = {};
  int slot = 0;
  for (int stage = part; stage < stages; stage += parts) {
    copy(slot == 0 ? kStages - 1 : slot - 1);
    async_copy_wait<kStages - 1>();
    __syncwarp();
    const char* from = queue + slot * kLinearStageBytes;
    slot = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t scales[2][2];
      uint4 words[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        words[half] = reinterpret_cast<const uint4*>(from)[half * 64 + step * 32 + lane];
        spread_scales(scales[half],
                      *reinterpret_cast<const uint16_t*>(from + 2048 + half * 128 + quad * 16 +
                                                         step * 8 + in_quad * 2));
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t a[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4& q = words[half];
          decode(a[half], w == 0 ? q.x : w == 1 ? q.y : w == 2 ? q.z : q.w);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[half][i] = multiply_halves(a[half][i], scales[half][w / 2]);
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint4 b = my_x[w][t * other_tile];
          multiply_accumulate(sums[t], a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
          multiply_accumulate(sums[t], a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
        }
        my_x[w] += step == 0 ? x_step : (2 * parts - 1) * x_step;
      }
    }
  }

  // Sums [warp][tile of tokens][4][lane], over the queues' place.
  constexpr int kSums = kTiles * 4 * 32;
  async_copy_wait<0>();
  __syncthreads();
  float* all_sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = t * 8 + in_quad * 2 + i % 2;
      const float factor = token < args.tokens ? inverse[token] : 0.0f;
      all_sums[warp * kSums + (t * 4 + i) * 32 + lane] = sums[t][i] * factor;
    }
  }
  if (blocks > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  grid_dependency_launch();
  const float factor = (args.global_scale != nullptr ? *args.global_scale : 1.0f) * 128.0f;
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(all_sums));
  for (int o = rank * blockDim.x + threadIdx.x; o < tiles_of_block * kSums;
       o += blocks * blockDim.x) {
    const int place = o % kSums;
    const int i = place / 32 % 4;
    const int token = place / 128 * 8 + place % 4 * 2 + i % 2;
    const int feature =
        (blockIdx.x / blocks * tiles_of_block + o / kSums) * 16 + place % 32 / 4 + i / 2 * 8;
    if (token >= args.tokens || feature >= args.features) continue;
    float sum = 0.0f;
    for (int b = 0; b < blocks; ++b) {
      uint32_t there;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(b));
      there += (o / kSums * parts * kSums + place) * 4;
      for (int p = 0; p < parts; ++p) {
        float value;
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there + p * kSums * 4));
        sum += value;
      }
    }
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(sum * factor));
    args.out[static_cast<int64_t>(token) * args.features + feature] = bits;
  }
  if (blocks > 1) cluster_barrier();  // no block leaves while another reads its sums
}

struct Entry {
  int tokens;
  int stages;
  Kernel kernel;
};

#define TIERCEL_KERNEL(tiles, stages)                           \
  {8 * tiles, stages,                                           \
   Kernel("nvfp4_linear<tiles=" #tiles ", stages=" #stages ">", \
          reinterpret_cast<const void*>(nvfp4_linear<tiles, stages>), kLinearMaxShared)}

const Entry kKernels[] = {TIERCEL_KERNEL(1, 2), TIERCEL_KERNEL(1, 3), TIERCEL_KERNEL(2, 2),
                          TIERCEL_KERNEL(2, 3)};

}  // namespace

const Kernel* nvfp4_linear_kernel(int tokens, int stages) {
  for (const Entry& entry : kKernels) {
    if (entry.tokens >= tokens && entry.stages == stages) return &entry.kernel;
  }
  return nullptr;
}

}  // namespace tiercel
