// SPDX-License-Identifier: Apache-2.0
// One warp's part of decode_attention: scores, softmax and sums of a few query rows over steps of
// keys, all in registers. See decode_attention.cuh for the whole.
//
// Keys lie in the rows of the products, query rows in the columns: scores are K q^T, sums V^T p^T.
// Eight query rows fill a product, and what belongs to a query row belongs to the same lanes in
// both. Lanes are called 4 g + t, as in warp_matrix.cuh. A sum over dimensions may take them in any
// order, so a lane reads 16 bytes of a key where the fragment has 4 bytes in each of 4 places, and
// the queries lie in shared memory in that order; dimensions of V may be shared out in any way.
#ifndef KERNELS_ATTENTION_DECODE_WARP_CUH_
#define KERNELS_ATTENTION_DECODE_WARP_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/attention/decode_arithmetic.cuh"
#include "kernels/attention/decode_sequence.cuh"
#include "kernels/sm90/warp_matrix.cuh"

namespace tiercel {

// kD is the head dimension of the tiles; with kAnyD there may be fewer, then reads past a row's end
// take its last 16 bytes again, which meet queries of 0 or become results that nobody stores.
template <typename Format_, bool kFloat8_, int kD_, bool kAnyD_, int kTiles_>
struct DecodeShape {
  using Format = Format_;  // of queries and results
  static constexpr bool kFloat8 = kFloat8_;
  using Multiplied = std::conditional_t<kFloat8, Float16, Format>;  // float8 converts to it exactly
  static constexpr int kD = kD_;
  static constexpr bool kAnyD = kAnyD_;
  static constexpr int kTiles = kTiles_;
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kElement = kFloat8 ? 1 : 2;  // bytes, of the cache
  static constexpr int kStep = decode_step(kD, kElement);
  static constexpr int kBlocks = kStep / 16;
  static constexpr int kKeyParts = kD * kElement / 64;  // of 16 bytes, of a lane, of a key
  static constexpr int kValueBytes = kD * kElement >= 128 ? 16 : 8;
  static constexpr int kValueWords = kValueBytes / 4;
  static constexpr int kValueParts = kD * kElement / (8 * kValueBytes);
  static constexpr int kValueElements = kValueBytes / kElement;  // neighbours, of a lane
  // Values of large heads come in rounds, for want of registers.
  static constexpr int kRounds = kStep * kD * kElement > 4096 ? 2 : 1;
  static constexpr int kRoundParts = kValueParts / kRounds;
  static constexpr int kFragments = kD / 32;  // 16-byte words of queries a lane, of 8 rows
  static constexpr int kPages = kStep > 32 ? kStep / 32 : 1;
};

// Which queries the lane's two rows of each 8 are of, and how their scores count. Row 2t + i of
// tile n is number 2n + i.
template <typename Shape>
struct Rows {
  int own[2 * Shape::kTiles];      // key that the query stands at
  float scale[2 * Shape::kTiles];  // of raw scores
};

template <typename Shape>
struct WarpState {
  float largest[2 * Shape::kTiles];  // score, in powers of 2
  float sum[2 * Shape::kTiles];      // this lane's share
  float out[Shape::kTiles][Shape::kD / 16][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < 2 * Shape::kTiles; ++r) largest[r] = -INFINITY, sum[r] = 0.0f;
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n) {
#pragma unroll
      for (int m = 0; m < Shape::kD / 16; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][m][i] = 0.0f;
      }
    }
  }
};

// The page table's entries for a step, key 32 i + lane in entry i.
template <typename Shape>
struct Pages {
  int32_t entry[Shape::kPages];

  // Entries past the sequence's end are read, but not used.
  __device__ __forceinline__ void load(const DecodeArgs& args, const int32_t* table, int key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Shape::kPages; ++i) {
      entry[i] =
          table[min(key + 32 * i + lane % Shape::kStep, args.capacity - 1) >> args.page_bits];
    }
  }
  __device__ __forceinline__ int32_t of(int row) const {
    int32_t page = __shfl_sync(kFullWarp, entry[0], row % 32);
#pragma unroll
    for (int i = 1; i < Shape::kPages; ++i) {
      const int32_t other = __shfl_sync(kFullWarp, entry[i], row % 32);
      page = row / 32 == i ? other : page;
    }
    return page;
  }
};

// A step's keys and values as they lie in the cache.
template <typename Shape>
struct Step {
  uint32_t keys[Shape::kBlocks][2][Shape::kKeyParts][4];
  uint32_t values[Shape::kBlocks][4][Shape::kRoundParts][Shape::kValueWords];

  // Rows past `last`, the sequence's last key in this step, are that one again.
  static __device__ __forceinline__ const char* row(const DecodeArgs& args, const char* cache,
                                                    const DecodeStrides& strides,
                                                    const Pages<Shape>& pages, int key, int last,
                                                    int row) {
    row = min(row, last);
    const int place = (key + row) & ((1 << args.page_bits) - 1);
    return cache + static_cast<int64_t>(pages.of(row)) * strides.page +
           static_cast<int64_t>(place) * strides.place;
  }

  // Bytes from a row's start, at most those of its last 16.
  static __device__ __forceinline__ int within(const DecodeArgs& args, int bytes, int size) {
    return Shape::kAnyD ? min(bytes, args.d * Shape::kElement - size) : bytes;
  }

  __device__ __forceinline__ void load_keys(const DecodeArgs& args, const char* cache,
                                            const Pages<Shape>& pages, int key, int last) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* from =
            row(args, cache, args.k_strides, pages, key, last, 16 * block + 8 * half + g);
#pragma unroll
        for (int part = 0; part < Shape::kKeyParts; ++part) {
          load_vector_once(keys[block][half][part], from + within(args, 64 * part + 16 * t, 16));
        }
      }
    }
  }

  __device__ __forceinline__ void load_values(const DecodeArgs& args, const char* cache,
                                              const Pages<Shape>& pages, int key, int last,
                                              int round) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr int kBytes = Shape::kValueBytes;
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char* from = row(args, cache, args.v_strides, pages, key, last,
                               16 * block + 2 * t + i % 2 + i / 2 * 8);
#pragma unroll
        for (int part = 0; part < Shape::kRoundParts; ++part) {
          const int bytes = kBytes * (8 * (round * Shape::kRoundParts + part) + g);
          load_vector_once(values[block][i][part], from + within(args, bytes, kBytes));
        }
      }
    }
  }

  __device__ __forceinline__ void scores(const uint4* queries,
                                         float (&s)[Shape::kTiles][Shape::kBlocks][4]) const {
    using Multiplied = typename Shape::Multiplied;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n) {
#pragma unroll
      for (int block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][block][i] = 0.0f;
      }
#pragma unroll
      for (int f = 0; f < Shape::kFragments; ++f) {
        const uint4 q = queries[(n * Shape::kFragments + f) * 32 + lane];
#pragma unroll
        for (int block = 0; block < Shape::kBlocks; ++block) {
          float (&c)[4] = s[n][block];
          if constexpr (Shape::kFloat8) {
#pragma unroll
            for (int w = 0; w < 2; ++w) {
              const uint32_t low = keys[block][0][f / 2][f % 2 * 2 + w];
              const uint32_t high = keys[block][1][f / 2][f % 2 * 2 + w];
              warp_multiply_add<Multiplied>(
                  c, e4m3_pair_to_half2<false>(low), e4m3_pair_to_half2<false>(high),
                  e4m3_pair_to_half2<true>(low), e4m3_pair_to_half2<true>(high), w ? q.z : q.x,
                  w ? q.w : q.y);
            }
          } else {
            const uint32_t (&low)[4] = keys[block][0][f];
            const uint32_t (&high)[4] = keys[block][1][f];
            warp_multiply_add<Multiplied>(c, low[0], high[0], low[1], high[1], q.x, q.y);
            warp_multiply_add<Multiplied>(c, low[2], high[2], low[3], high[3], q.z, q.w);
          }
        }
      }
    }
  }

  // out += V^T p, where p is float32 probabilities as `scores` gives scores.
  __device__ __forceinline__ void sums(const float (&p)[Shape::kTiles][Shape::kBlocks][4],
                                       int round, WarpState<Shape>* state) const {
    using Multiplied = typename Shape::Multiplied;
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      uint32_t weights[Shape::kTiles][2];
#pragma unroll
      for (int n = 0; n < Shape::kTiles; ++n) {
        weights[n][0] = warp_transpose(Multiplied::pack(&p[n][block][0]));
        weights[n][1] = warp_transpose(Multiplied::pack(&p[n][block][2]));
      }
      const auto multiply = [&](int m, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
#pragma unroll
        for (int n = 0; n < Shape::kTiles; ++n) {
          warp_multiply_add<Multiplied>(state->out[n][m], a0, a1, a2, a3, weights[n][0],
                                        weights[n][1]);
        }
      };
#pragma unroll
      for (int part = 0; part < Shape::kRoundParts; ++part) {
#pragma unroll
        for (int w = 0; w < Shape::kValueWords; ++w) {
          const int word = (round * Shape::kRoundParts + part) * Shape::kValueWords + w;
          uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = values[block][i][part][w];
          if constexpr (Shape::kFloat8) {
            const int m = 2 * word;
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
              const uint32_t low = __byte_perm(x[0], x[1], pair ? 0x7362 : 0x5140);
              const uint32_t high = __byte_perm(x[2], x[3], pair ? 0x7362 : 0x5140);
              multiply(m + pair, e4m3_pair_to_half2<false>(low), e4m3_pair_to_half2<true>(low),
                       e4m3_pair_to_half2<false>(high), e4m3_pair_to_half2<true>(high));
            }
          } else {
            multiply(word, __byte_perm(x[0], x[1], 0x5410), __byte_perm(x[0], x[1], 0x7632),
                     __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[2], x[3], 0x7632));
          }
        }
      }
    }
  }
};

// Masks and caps a step's raw scores and makes probabilities of them, relative to the largest score
// so far; what was summed before is brought to that.
template <typename Shape>
__device__ __forceinline__ void softmax(const DecodeArgs& args, const Rows<Shape>& rows,
                                        const Sequence<Shape::kStep>& sequence, int key,
                                        float (&s)[Shape::kTiles][Shape::kBlocks][4],
                                        WarpState<Shape>* state) {
  constexpr int kTiles = Shape::kTiles, kBlocks = Shape::kBlocks;
  const int g = threadIdx.x % 32 / 4;
  const bool capped = args.cap_log2 != 0.0f;
  if (capped) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][block][i] = hyperbolic_tangent(s[n][block][i] * rows.scale[2 * n + i % 2]);
        }
      }
    }
  }
  if (!sequence.all_see(args, key)) {
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      const int own = rows.own[r], end = sequence.length - 1;
      const int first = args.left < 0 ? 0 : own - args.left;
      const int last = args.right < 0 ? end : min(own + args.right, end);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = key + 16 * block + 8 * half + g;
          const bool seen = at < sequence.prefix || (at >= first && at <= last);
          if (!seen) s[r / 2][block][r % 2 + 2 * half] = -INFINITY;
        }
      }
    }
  }
  float factor[2 * kTiles], largest[2 * kTiles], against[2 * kTiles];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) {
    factor[r] = capped ? args.cap_log2 : rows.scale[r];
    float step_largest = -INFINITY;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float (&c)[4] = s[r / 2][block];
      step_largest = fmaxf(step_largest, fmaxf(c[r % 2], c[r % 2 + 2]));
    }
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      step_largest = fmaxf(step_largest, __shfl_xor_sync(kFullWarp, step_largest, offset));
    }
    largest[r] = fmaxf(state->largest[r], step_largest * factor[r]);
    against[r] = largest[r] == -INFINITY ? 0.0f : largest[r];
    grown |= largest[r] > state->largest[r];
  }
  if (__any_sync(kFullWarp, grown)) {
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      const float shrink = power_of_2(state->largest[r] - against[r]);
      state->sum[r] *= shrink;
      state->largest[r] = largest[r];
#pragma unroll
      for (int m = 0; m < Shape::kD / 16; ++m) {
        state->out[r / 2][m][r % 2] *= shrink;
        state->out[r / 2][m][r % 2 + 2] *= shrink;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 2 * n + i % 2;
        const float p = power_of_2(fmaf(s[n][block][i], factor[r], -against[r]));
        state->sum[r] += p;
        s[n][block][i] = p;
      }
    }
  }
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_WARP_CUH_
