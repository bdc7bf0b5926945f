// SPDX-License-Identifier: Apache-2.0
// nvfp4_linear: out[t, n] = sum over k of x[t, k] * weight[n, k], weight in NVFP4, x in bfloat16,
// up to 16 tokens.
//
// Bound by the bytes of the weights: at N = 7168, K = 16384, 58.7 MB and 7.3 MB of scales take 15
// us at 4.4 TB/s. At that rate a multiprocessor multiplies 33 weights per cycle, which leaves four
// thread instructions per weight, so the instruction count decides.
//  - A block keeps its part of x in shared memory, in the order in which threads read it as the B
//    operand of mma.m16n8k16. A warp moves along K with 16 rows of the weight, whose sums stay in
//    its registers. TMA loads these rows into the warp's own ring of stages, so the block needs no
//    barrier. Scales are loaded directly by the threads that use them.
//  - Weights are converted to bfloat16 in registers: e2m1's bits are moved into place, eleven
//    instructions per eight weights, and multiplied by their scale. The product is exact. The order
//    of K within a product is free, so each thread uses weights in memory order.
//  - For a single token, each of the eight columns of B holds a different group of 16 values and
//    zeros elsewhere. A sum then belongs to one scale, which multiplies the sum instead of the
//    weights. Each of the four threads that share a row owns two columns, which are zero for the
//    others' weights. Unscaled weights are too small for bfloat16, so they are float16. So is x,
//    multiplied by a power of two per 256 values that brings the largest magnitude below 2^15;
//    values down to 2^-31 of that lose no bit.
//  - `parts` warps of a block and the blocks of a cluster split K. They send their sums to the
//    block of the cluster that owns the rows, which adds all parts after a `group` of turns. If x
//    does not fit, K is divided into `sections`, and the rows of a group are read once per section.
#include <cstdint>

#include "kernels/gemv/nvfp4_linear_kernels.h"
#include "kernels/gemv/nvfp4_linear_x.cuh"
#include "kernels/gemv/w4_epilogue.cuh"
#include "kernels/gemv/w4_few_weights.cuh"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/tma.cuh"

namespace tiercel {
namespace {

constexpr int kLineBytes = 16 * kLinearLine / 2;  // of 16 rows, one stage

// The MMA on float16 (kHalves) or bfloat16.
template <bool kHalves>
__device__ __forceinline__ void multiply_accumulate(float (&c)[4], uint32_t a0, uint32_t a1,
                                                    uint32_t a2, uint32_t a3, uint32_t b0,
                                                    uint32_t b1) {
  if constexpr (kHalves) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Stores to `address` in block `owner`'s shared memory and counts the bytes on its barrier `met`; a
// plain store if there is only one block.
template <typename T>
__device__ __forceinline__ void send_sums(uint32_t address, uint32_t met, uint32_t owner,
                                          bool alone, T sum);

template <>
__device__ __forceinline__ void send_sums(uint32_t address, uint32_t met, uint32_t owner,
                                          bool alone, float sum) {
  if (alone) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(sum) : "memory");
    return;
  }
  asm volatile(
      "{ .reg .b32 remote, counter; mapa.shared::cluster.u32 remote, %0, %2;"
      " mapa.shared::cluster.u32 counter, %1, %2;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %3, [counter]; }" ::"r"(
          address),
      "r"(met), "r"(owner), "f"(sum)
      : "memory");
}

template <>
__device__ __forceinline__ void send_sums(uint32_t address, uint32_t met, uint32_t owner,
                                          bool alone, float4 v) {
  if (alone) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
    return;
  }
  asm volatile(
      "{ .reg .b32 remote, counter; mapa.shared::cluster.u32 remote, %0, %2;"
      " mapa.shared::cluster.u32 counter, %1, %2;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
      " [remote], {%3, %4, %5, %6}, [counter]; }" ::"r"(address),
      "r"(met), "r"(owner), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

// Elects one lane of a converged warp, in a form that the compiler recognises.
__device__ __forceinline__ bool elect_one() {
  uint32_t one;
  asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 %0, 1, 0, one; }"
               : "=r"(one));
  return one != 0;
}

// Fills a warp's stages along K, then turn by turn. TMA writes, and counts, zeros behind the last
// row or the end of K. Scales are loaded into the registers of the threads that use them, four for
// each of their two rows.
template <W4Format kFormat>
struct Filler {
  const Nvfp4LinearArgs& args;
  char* weights;
  uint64_t* filled;
  int lane, tile, first_line;
  int turn, begin, end, last;
  int section, pass, row;
  unsigned k;
  int column, last_column;
  const char* scale[2];
  const char* zero[2];

  __device__ __forceinline__ bool more() const { return turn < last; }

  __device__ __forceinline__ void copy(int stage) const {
    if (!elect_one()) return;
    mbarrier_expect(filled + stage, kLineBytes);
    box_load(weights + stage * kLineBytes, &args.weight_map, k / 2, row, filled + stage);
  }

  __device__ __forceinline__ void read(LineScales<kFormat> (&scales)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scales[half].read(args.scales, scale[half], zero[half], column);
    }
  }

  // A prefetch to L2 is only a hint, so the previous grid may still write.
  __device__ __forceinline__ void prefetch_scales() const {
    if (lane % 4 != 0) return;
    const int at = kFormat == W4Format::kNvfp4   ? column
                   : kFormat == W4Format::kMxfp4 ? column / 2
                                                 : (column >> (args.scales.group_shift - 4)) * 2;
    prefetch_l2(scale[0] + at);
    prefetch_l2(scale[1] + at);
  }

  // Also prefetches the first line of weights.
  __device__ __forceinline__ void prefetch() const {
    if (lane == 0) box_prefetch(&args.weight_map, k / 2, row);
    prefetch_scales();
  }

  __device__ __forceinline__ void next() {
    k += args.parts * kLinearLine;
    column = min(column + args.parts * (kLinearLine / 16), last_column);
    if (++pass < args.passes) return;
    if (++turn == end) {
      if (++section == args.sections) {
        section = 0;
        begin = end;
        end = min(end + args.group, last);
      }
      turn = begin;
    }
    start();
  }

  // Out-of-range rows and columns are clamped to valid ones; their products are discarded.
  __device__ __forceinline__ void start() {
    pass = 0;
    k = (first_line + section * args.passes * args.parts) * static_cast<unsigned>(kLinearLine);
    column = min(static_cast<int>(k / 16) + lane % 4 * 4, last_column);
    row = (turn * args.tiles + tile) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int mine = min(row + half * 8 + lane / 4, args.features - 1);
      scale[half] = args.scales.scale + mine * args.scales.scale_row;
      if (kFormat == W4Format::kInt4) zero[half] = args.scales.zero + mine * args.scales.zero_row;
    }
  }
};

// The power of two that decoding, and scales, leave out.
template <bool kSingle>
__device__ constexpr float decoded_factor(W4Format format) {
  if (format == W4Format::kInt4) return 1.0f;
  return kSingle ? 0x1p14f : format == W4Format::kNvfp4 ? 0x1p7f : 0x1p64f;
}

template <W4Format kFormat, int kTiles, bool kSingle>
__global__ void __launch_bounds__(linear_max_threads(kFormat, kSingle ? 1 : kTiles * 8))
    nvfp4_linear(const __grid_constant__ Nvfp4LinearArgs args) {
  extern __shared__ __align__(1024) char shared[];
  constexpr bool kWholes = kFormat == W4Format::kInt4;
  constexpr int kSums = kSingle ? 16 : kTiles * 128;  // per warp, for 16 rows
  constexpr int kLineOfX = kSingle ? 512 : kTiles * kLinearTileBytes;
  // Prefetch two lines only for 2-8 tokens: one token is bound by memory, more by the MMAs.
  constexpr bool kTwo = !kSingle && kTiles == 1;
  // Uniform to the compiler, and without divisions, which would delay every block.
  const int part = __shfl_sync(0xffffffffu, threadIdx.y, 0);
  const int tile = __shfl_sync(0xffffffffu, threadIdx.z, 0);
  const int lane = threadIdx.x % 32;
  const int quad = lane / 4;
  const int in_quad = lane % 4;
  const int parts = args.parts;
  const int tiles = args.tiles;
  const int warp = tile * parts + part;
  const int warps = tiles * parts;
  const int blocks = cluster_blocks();
  const int blocks_shift = __ffs(blocks) - 1;  // a power of two
  const int rank = cluster_rank();
  const int first_turn = (blockIdx.x >> blocks_shift) * args.turns;
  const int last_turn = min(first_turn + args.turns, args.all_turns);
  const int lines = args.passes * parts;  // of K, per section
  const int first_line = rank * args.sections * lines;

  char* const x = shared + warps * 2 * kLineBytes;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(
      x + lines * (kLineOfX + (kSingle ? 16 : 0)) + (kSingle ? kLinearZeroBytes : 0));
  uint64_t* const filled = barriers + warp * 2;
  uint64_t* const met = barriers + warps * 2;  // counts the bytes of a group's sums
  if (lane == 0) {
    for (int s = 0; s < 2; ++s) mbarrier_init(filled + s, 1);
    if (warp == 0) mbarrier_init(met, 1);
    mbarrier_init_fence();
    map_prefetch(&args.weight_map);
  }
  __syncwarp();
  if (blocks > 1) cluster_arrive_relaxed();

  char* const my_weights = shared + warp * 2 * kLineBytes;
  Filler<kFormat> filler{args,
                         my_weights,
                         filled,
                         lane,
                         tile,
                         first_line + part,
                         first_turn,
                         first_turn,
                         min(first_turn + args.group, last_turn),
                         args.passes > 0 ? last_turn : first_turn,  // K may be 0
                         0,
                         0,
                         0,
                         0,
                         0,
                         args.k / 16 - 4,
                         {},
                         {}};
  filler.start();
  if (args.passes > 0) {
    if (args.prefetch_weights) filler.prefetch();
    // Every 16th warp of the grid handles a token.
    const int all = blockIdx.x * warps + warp;
    const int token = all % 16, column = (all / 16 * 32 + lane) * 64;
    if (token < args.tokens && column < args.k) {
      prefetch_l2(args.x + token * args.x_row + column * 2);
    }
  }
  grid_dependency_wait();
  grid_dependency_launch();
  LineScales<kFormat> scales[2];
  const bool any = filler.more();
  if (any) {
    filler.copy(0);
    // With several tokens, x comes before the scales: otherwise the compiler makes it wait for
    // scales in flight.
    if (kSingle) {
      filler.read(scales);
    } else {
      filler.prefetch_scales();
    }
  }
  load_x<kTiles, kSingle>(args, x, first_line * kLinearLine, lines, warp);
  if (any) {
    if (!kSingle) filler.read(scales);
    filler.next();
    if (kTwo && filler.more()) filler.copy(1);
  }
  bool copied = kTwo;  // the next to use
  __syncthreads();

  // Sums of every `blocks`th 16 rows, which the block owns: [block][part][sum]. Then the sums that
  // warps keep from section to section: [turn of the group][warp][sum].
  float* const received = reinterpret_cast<float*>(barriers + warps * 2 + 2);
  const int of_strip = blocks * parts * kSums;
  float* const kept =
      received + (args.group * tiles + blocks - 1) / blocks * of_strip + warp * kSums;
  const uint32_t my_received = shared_address(received + (rank * parts + part) * kSums) +
                               (kSingle ? (in_quad * 8 + quad) * 4 : lane * 16);
  const int piece = quad * 128 + (in_quad * 2 ^ quad) * 16;
  // For a single token: the group of 16, of every two, that this thread's column holds, or zeros in
  // other banks than the other threads read.
  const char* first_x = x + part * kLineOfX;
  int next_x = parts * kLineOfX;
  if constexpr (kSingle) {
    const bool real = quad / 2 == in_quad;
    first_x = real ? first_x + in_quad * 128 + quad % 2 * 32 : x + lines * kLineOfX + 64;
    next_x = real ? next_x : 0;
  }
  int stage = 0;
  uint32_t parity = 0, group_parity = 0;
  for (int begin = first_turn; begin < last_turn; begin += args.group) {
    const int turns = min(args.group, last_turn - begin);
    for (int section = 0; section < args.sections; ++section) {
      if (args.sections > 1 && (section > 0 || begin > first_turn)) {
        __syncthreads();  // all warps are done with the last one
        load_x<kTiles, kSingle>(args, x, (first_line + section * lines) * kLinearLine, lines, warp);
        __syncthreads();
      }
      const bool last = section == args.sections - 1;
      if (blocks > 1 && last) {
        cluster_wait();  // all blocks run and are done with the last sums
        const int strips = (turns * tiles + blocks - 1 - rank) >> blocks_shift;
        if (warp == 0 && lane == 0) mbarrier_expect(met, strips * of_strip * 4);
      }
      for (int turn = 0; turn < turns; ++turn) {
        float* const mine = kept + turn * warps * kSums;
        float products[kSingle ? 2 : kTiles][4] = {};
        float single[2] = {};
        if (!kSingle && section > 0) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            const float4 sum = reinterpret_cast<const float4*>(mine)[t * 32 + lane];
            products[t][0] = sum.x, products[t][1] = sum.y;
            products[t][2] = sum.z, products[t][3] = sum.w;
          }
        }
        const char* from_x = first_x;
        const char* inverse = x + lines * kLineOfX + kLinearZeroBytes + part * 16;
        for (int pass = 0; pass < args.passes; ++pass) {
          mbarrier_wait(filled + stage, parity);
          __syncwarp();
          const LineScales<kFormat> line[2] = {scales[0], scales[1]};
          // These scales are for the next pass. Whether only that waits for them is up to the
          // compiler's scoreboards; a wait in this pass costs a sixth of the time.
          if (filler.more()) {
            if (!copied) filler.copy(stage ^ 1);
            filler.read(scales);
            filler.next();
          }
          copied = false;
          const char* from = my_weights + stage * kLineBytes;
          float of_line[2] = {};
#pragma unroll
          for (int unit = 0; unit < 2; ++unit) {
            uint4 words[2];
            uint32_t offsets[2] = {};
            uint32_t factors[2][2];
            uint4 single_x[2];
            if constexpr (kSingle) {
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                for (float& product : products[j]) product = 0.0f;
                single_x[j] = *reinterpret_cast<const uint4*>(from_x + unit * 64 + j * 16);
              }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              words[half] =
                  *reinterpret_cast<const uint4*>(from + (piece ^ unit * 16) + half * 1024);
              if (!kSingle) line[half].pairs(factors[half], unit);
              if (kWholes) offsets[half] = line[half].template offset<!kSingle>(args.scales, unit);
            }
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              uint32_t a[2][4];
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const uint4& q = words[half];
                const uint32_t word = w == 0 ? q.x : w == 1 ? q.y : w == 2 ? q.z : q.w;
                decode_word<kFormat, !kSingle>(a[half], word, offsets[half]);
                if (!kSingle) {
#pragma unroll
                  for (int i = 0; i < 4; ++i) {
                    a[half][i] = multiply_pairs(a[half][i], factors[half][w / 2]);
                  }
                }
              }
              const int i = unit * 4 + w;
#pragma unroll
              for (int t = 0; t < kTiles; ++t) {
                const char* place =
                    from_x + t * kLinearTileBytes + i * kLinearPieceBytes + lane * 16;
                const uint4 b = kSingle ? single_x[w % 2] : *reinterpret_cast<const uint4*>(place);
                float (&p)[4] = products[kSingle ? w / 2 : t];
                multiply_accumulate<kSingle>(p, a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
                multiply_accumulate<kSingle>(p, a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
              }
            }
            if (kSingle) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const float2 scale = line[half].wide(unit);
                of_line[half] = fmaf(products[0][half * 2], scale.x, of_line[half]);
                of_line[half] = fmaf(products[kSingle][half * 2 + 1], scale.y, of_line[half]);
              }
            }
          }
          if constexpr (kSingle) {
            const float factor = *reinterpret_cast<const float*>(inverse);
            single[0] = fmaf(of_line[0], factor, single[0]);
            single[1] = fmaf(of_line[1], factor, single[1]);
            inverse += parts * 16;
          }
          from_x += next_x;
          stage ^= 1;
          parity ^= stage == 0;
        }
        const int strip = turn * tiles + tile;
        const int owner = strip & (blocks - 1);
        const uint32_t theirs = my_received + (strip >> blocks_shift) * of_strip * 4;
        if constexpr (kSingle) {
          // Four lanes hold a row's sum; lanes 0 and 1 of them get the sums of row and row + 8.
          const bool odd = in_quad % 2;
          float sum = odd ? single[1] : single[0];
          sum += __shfl_xor_sync(0xffffffffu, odd ? single[0] : single[1], 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          if (in_quad < 2) {
            float& place = mine[in_quad * 8 + quad];
            if (section > 0) sum += place;
            if (last) {
              send_sums(theirs, shared_address(met), owner, blocks == 1, sum);
            } else {
              place = sum;
            }
          }
        } else {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            const float (&p)[4] = products[t];
            const float4 sum = make_float4(p[0], p[1], p[2], p[3]);
            if (last) {
              send_sums(theirs + t * 512, shared_address(met), owner, blocks == 1, sum);
            } else {
              reinterpret_cast<float4*>(mine)[t * 32 + lane] = sum;
            }
          }
        }
      }
    }

    if (blocks > 1) {
      mbarrier_wait_cluster(met, group_parity);
      group_parity ^= 1;
    } else {
      __syncthreads();
    }
    const float* const global = args.epilogue.global_scale;
    const float factor = (global != nullptr ? *global : 1.0f) * decoded_factor<kSingle>(kFormat);
    const auto write = [&](int feature, int token, float sum) {
      if (feature >= args.features || token >= args.tokens) return;
      const float bias = bias_of<BFloat16>(args.epilogue, feature, args.features);
      const float value = activated(args.epilogue.activation, fmaf(sum, factor, bias));
      uint16_t bits;
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
      args.out[static_cast<int64_t>(token) * args.features + feature] = bits;
    };
    // Each iteration handles 16 rows and one tile of tokens.
    const int strips = turns * tiles;
    for (int job = warp;; job += warps) {
      const int mine = job / kTiles, t = job % kTiles;
      if (mine * blocks + rank >= strips) break;
      const float* from = received + mine * of_strip;
      const int feature = (begin * tiles + mine * blocks + rank) * 16 + quad;
      if constexpr (kSingle) {
        if (lane >= 16) break;
        float sum = 0.0f;
#pragma unroll 4
        for (int j = 0; j < blocks * parts; ++j) sum += from[j * kSums + lane];
        write(feature - quad + lane, 0, sum);
      } else {
        float4 sums = {};
#pragma unroll 4
        for (int j = 0; j < blocks * parts; ++j) {
          const float4 v = reinterpret_cast<const float4*>(from + j * kSums)[t * 32 + lane];
          sums.x += v.x, sums.y += v.y, sums.z += v.z, sums.w += v.w;
        }
        const int token = t * 8 + in_quad * 2;
        write(feature, token, sums.x);
        write(feature, token + 1, sums.y);
        write(feature + 8, token, sums.z);
        write(feature + 8, token + 1, sums.w);
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
  W4Format format;
  int tokens;
  Kernel kernel;
};

#define TIERCEL_KERNEL(format, name, tokens, tiles, single) \
  {format, tokens,                                          \
   Kernel(name "<tokens=" #tokens ">",                      \
          reinterpret_cast<const void*>(nvfp4_linear<format, tiles, single>), kLinearMaxShared)}

#define TIERCEL_FORMAT(format, name)                                                   \
  TIERCEL_KERNEL(format, name, 1, 1, true), TIERCEL_KERNEL(format, name, 8, 1, false), \
      TIERCEL_KERNEL(format, name, 16, 2, false)

// By number of tokens.
const Entry kKernels[] = {TIERCEL_FORMAT(W4Format::kNvfp4, "nvfp4_linear"),
                          TIERCEL_FORMAT(W4Format::kMxfp4, "mxfp4_linear"),
                          TIERCEL_FORMAT(W4Format::kInt4, "int4_linear")};

}  // namespace

const Kernel* nvfp4_linear_kernel(W4Format format, int tokens, int stages) {
  if (stages != 2) return nullptr;
  for (const Entry& entry : kKernels) {
    if (entry.format == format && entry.tokens >= tokens) return &entry.kernel;
  }
  return nullptr;
}

}  // namespace tiercel
