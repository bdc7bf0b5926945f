// SPDX-License-Identifier: Apache-2.0
// One warp's part of decode_attention: scores, softmax and sums of a few query rows over steps of
// keys, from a stage of its ring. See kernel.cuh for the plan.
//
// Keys are the rows of the products, query rows the columns: scores are K q^T, sums V^T p^T. Eight
// query rows fill a product, and both products have a query row in the same lanes. Lanes are named
// 4 g + t, as in warp_matrix.cuh. float8 is read in pairs of 8 bits: a sum over dimensions may take
// them in any order, and dimensions of V may be assigned to lanes in any way.
#ifndef KERNELS_ATTENTION_DECODE_WARP_CUH_
#define KERNELS_ATTENTION_DECODE_WARP_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/attention/common/tree.cuh"
#include "kernels/attention/decode/arithmetic.cuh"
#include "kernels/attention/decode/sequence.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/warp_matrix.cuh"

namespace tiercel {

// kD is the head dimension of the tiles; with kAnyD, heads may have fewer, the rest are zeros.
template <typename Format_, bool kFloat8_, int kD_, bool kAnyD_, int kTiles_, bool kSpread_>
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
  static constexpr int kFragments = kD / 32;  // 16-byte words of queries per lane, for 8 rows
  static constexpr int kPages = kStep > 32 ? kStep / 32 : 1;
  static constexpr int kRowBytes = kD * kElement;
  static constexpr int kPairs = kRowBytes / 32;    // of 16-byte chunks of a row
  static constexpr int kHalf = kStep * kRowBytes;  // a stage's keys, then as much of values
  static constexpr int kStage = 2 * kHalf;
  static constexpr bool kSpread = kSpread_;  // blocks share all tiles, or a cluster has one
  static constexpr int kWarps = decode_warps(kSpread, kStage, kTiles);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = decode_stages(kWarps);
};

// A stage's rows of 64 bytes or more as 16-byte chunks, so that 8 rows' chunks of one number lie in
// different banks: chunk c of row r is at this place.
template <int kRowBytes>
__device__ __forceinline__ uint32_t chunk_place(int row, int chunk) {
  if constexpr (kRowBytes >= 128) {
    return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
  } else {
    return row / 2 * 128 + (((row & 1) * 4 + chunk) ^ (row / 2 & 3)) * 16;
  }
}

// The place of a copy of copy_step: row `turn` * (rows at once) + own, chunk c * (lanes) + first.
// For rows of 128 bytes or more one exclusive or is the same for all even turns, one for odd ones.
template <int kRowBytes>
__device__ __forceinline__ uint32_t copy_place(int turn, int own, int c, int first) {
  if constexpr (kRowBytes >= 128) {
    const uint32_t place = own * kRowBytes + ((first ^ own) << 4);
    return (place ^ (turn % 2 * 64)) + turn * 4 * kRowBytes + c * 128;
  } else {
    return chunk_place<kRowBytes>(turn * (32 / (kRowBytes / 16)) + own, first);
  }
}

// The queries of the lane's two rows among each 8, and the factors of their scores. Row 2t + i of
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

  // Entries past the sequence's end are read, but not used. Negative ones are large unsigned.
  __device__ __forceinline__ void load(const DecodeArgs& args, const int32_t* table, int key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Shape::kPages; ++i) {
      const int at = min(key + 32 * i + lane % Shape::kStep, args.capacity - 1) >> args.page_bits;
      entry[i] =
          static_cast<int32_t>(min(static_cast<uint32_t>(load_strided(table, args.table_step, at)),
                                   static_cast<uint32_t>(args.last_page)));
    }
  }
  __device__ __forceinline__ int32_t of(int row) const {
    const int lane = row & 31;
    int32_t page = __shfl_sync(kFullWarp, entry[0], lane);
#pragma unroll
    for (int i = 1; i < Shape::kPages; ++i) {
      const int32_t other = __shfl_sync(kFullWarp, entry[i], lane);
      page = row / 32 == i ? other : page;
    }
    return page;
  }
};

// Starts the copies of a step's keys and values. Rows past `last`, the sequence's last key in this
// step, become zeros.
template <typename Shape>
__device__ __forceinline__ void copy_step(const DecodeArgs& args, const char* k, const char* v,
                                          const Pages<Shape>& pages, int key, int last,
                                          uint32_t stage) {
  constexpr int kLanes = Shape::kRowBytes < 128 ? Shape::kRowBytes / 16 : 8;  // of a row
  constexpr int kAtOnce = 32 / kLanes;                                        // rows
  constexpr int kTurns = Shape::kStep / kAtOnce;
  constexpr int kChunks = Shape::kRowBytes / 16 / kLanes;  // of a lane
  const int lane = threadIdx.x % 32, first = lane % kLanes, own = lane / kLanes;
  const int mask = (1 << args.page_bits) - 1;
  const char *from_k[kTurns], *from_v[kTurns];
  if ((Shape::kStep - 1 & ~mask) == 0) {
    // A step lies in one page, whose entry all lanes have.
    const int64_t page = pages.entry[0], place = (key & mask) + own;
    from_k[0] = k + page * args.k_strides.page + place * args.k_strides.place;
    from_v[0] = v + page * args.v_strides.page + place * args.v_strides.place;
#pragma unroll
    for (int i = 1; i < kTurns; ++i) {
      from_k[i] = from_k[i - 1] + int64_t{kAtOnce} * args.k_strides.place;
      from_v[i] = from_v[i - 1] + int64_t{kAtOnce} * args.v_strides.place;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = i * kAtOnce + own;
      const int64_t page = pages.of(row), place = (key + row) & mask;
      from_k[i] = k + page * args.k_strides.page + place * args.k_strides.place;
      from_v[i] = v + page * args.v_strides.page + place * args.v_strides.place;
    }
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const bool exists = i * kAtOnce + own <= last;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const bool real = !Shape::kAnyD || (c * kLanes + first) * 16 < args.d * Shape::kElement;
      const uint32_t to = stage + copy_place<Shape::kRowBytes>(i, own, c, first);
      async_copy_16(to, from_k[i] + c * kLanes * 16 + first * 16, exists && real);
      async_copy_16(to + Shape::kHalf, from_v[i] + c * kLanes * 16 + first * 16, exists && real);
    }
  }
}

// The address that a lane gives to ldmatrix for 16 rows and a pair of chunks: matrices 0 and 1 are
// rows 0 to 7 and 8 to 15 of the first chunk or, with kAcross, both chunks of rows 0 to 7.
template <typename Shape, bool kAcross>
__device__ __forceinline__ uint32_t matrix_place() {
  const int lane = threadIdx.x % 32, upper = lane / 8 % 2, later = lane / 16;
  return chunk_place<Shape::kRowBytes>(lane % 8 + 8 * (kAcross ? later : upper),
                                       kAcross ? upper : later);
}

// The place for another pair of chunks and block of 16 rows.
template <typename Shape>
__device__ __forceinline__ uint32_t matrix_place(uint32_t place, int pair, int block) {
  return (place ^ (pair % 4 * 32)) + pair / 4 * 128 + block * 16 * Shape::kRowBytes;
}

template <typename Shape>
__device__ __forceinline__ void scores(uint32_t keys, const uint4* queries,
                                       float (&s)[Shape::kTiles][Shape::kBlocks][4]) {
  using Multiplied = typename Shape::Multiplied;
  const int lane = threadIdx.x % 32;
  const uint32_t place = keys + matrix_place<Shape, false>();
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) {
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][block][i] = 0.0f;
    }
  }
  uint4 q[Shape::kTiles];
#pragma unroll
  for (int pair = 0; pair < Shape::kPairs; ++pair) {
    if (Shape::kFloat8 || pair % 2 == 0) {
#pragma unroll
      for (int n = 0; n < Shape::kTiles; ++n) {
        const int f = Shape::kFloat8 ? pair : pair / 2;
        q[n] = queries[(n * Shape::kFragments + f) * 32 + lane];
      }
    }
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      uint32_t a[4];
      load_matrices<false>(a, matrix_place<Shape>(place, pair, block));
#pragma unroll
      for (int n = 0; n < Shape::kTiles; ++n) {
        float (&c)[4] = s[n][block];
        if constexpr (Shape::kFloat8) {
          warp_multiply_add<Multiplied>(
              c, e4m3_pair_to_half2<false>(a[0]), e4m3_pair_to_half2<false>(a[1]),
              e4m3_pair_to_half2<true>(a[0]), e4m3_pair_to_half2<true>(a[1]), q[n].x, q[n].y);
          warp_multiply_add<Multiplied>(
              c, e4m3_pair_to_half2<false>(a[2]), e4m3_pair_to_half2<false>(a[3]),
              e4m3_pair_to_half2<true>(a[2]), e4m3_pair_to_half2<true>(a[3]), q[n].z, q[n].w);
        } else {
          warp_multiply_add<Multiplied>(c, a[0], a[1], a[2], a[3], pair % 2 ? q[n].z : q[n].x,
                                        pair % 2 ? q[n].w : q[n].y);
        }
      }
    }
  }
}

// out += V^T p, where p is float32 probabilities as `scores` gives scores.
template <typename Shape>
__device__ __forceinline__ void sums(uint32_t values,
                                     const float (&p)[Shape::kTiles][Shape::kBlocks][4],
                                     WarpState<Shape>* state) {
  using Multiplied = typename Shape::Multiplied;
  const uint32_t place = values + matrix_place<Shape, !Shape::kFloat8>();
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
    for (int pair = 0; pair < Shape::kPairs; ++pair) {
      uint32_t a[4];
      load_matrices<true>(a, matrix_place<Shape>(place, pair, block));
      if constexpr (Shape::kFloat8) {
        // A lane has two dimensions of two keys in a word: the first go to row g, the others to
        // row g + 8.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t low = __byte_perm(a[2 * i], 0, 0x3120);
          const uint32_t high = __byte_perm(a[2 * i + 1], 0, 0x3120);
          multiply(2 * pair + i, e4m3_pair_to_half2<false>(low), e4m3_pair_to_half2<true>(low),
                   e4m3_pair_to_half2<false>(high), e4m3_pair_to_half2<true>(high));
        }
      } else {
        multiply(pair, a[0], a[1], a[2], a[3]);
      }
    }
  }
}

template <typename Shape>
using Scores = float[Shape::kTiles][Shape::kBlocks][4];

template <typename Shape>
__device__ __forceinline__ void hide_outside(const DecodeArgs& args, const Rows<Shape>& rows,
                                             const Sequence<Shape::kStep>& sequence, int key,
                                             Scores<Shape>& s) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2 * Shape::kTiles; ++r) {
    const int own = rows.own[r], end = sequence.length - 1;
    const int first = args.left < 0 ? 0 : own - args.left;
    const int last = args.right < 0 ? end : min(own + args.right, end);
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = key + 16 * block + 8 * half + g;
        const bool seen = at < sequence.prefix || (at >= first && at <= last);
        if (!seen) s[r / 2][block][r % 2 + 2 * half] = -INFINITY;
      }
    }
  }
}

template <typename Shape>
__device__ __forceinline__ void hide_by_tree(const Sequence<Shape::kStep>& sequence, int key,
                                             const TreeRow* tree, Scores<Shape>& s) {
  static_assert(Shape::kStep <= 64, "a word has a bit for each key of a step");
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int old = sequence.length - sequence.queries;
#pragma unroll
  for (int r = 0; r < 2 * Shape::kTiles; ++r) {
    const uint64_t seen = tree_keys(tree[r / 2 * 8 + 2 * t + r % 2], old, key + g);
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool own = (seen >> (16 * block + 8 * half) & 1) != 0;
        if (!own) s[r / 2][block][r % 2 + 2 * half] = -INFINITY;
      }
    }
  }
}

// Scores may exceed their reference by so many powers of 2 until the sums are rescaled. Then
// probabilities are up to 256, which float16 holds as exactly as those up to 1.
constexpr float kSlack = 8.0f;

// A row's probabilities are relative to it.
__device__ __forceinline__ float reference(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

// Masks and caps a step's raw scores and turns them into probabilities, relative to the largest
// score so far, or one that was less by kSlack at most; rescales the earlier sums to that.
template <typename Shape>
__device__ __forceinline__ void softmax(const DecodeArgs& args, const Rows<Shape>& rows,
                                        const Sequence<Shape::kStep>& sequence, int key,
                                        const TreeRow* tree, Scores<Shape>& s,
                                        WarpState<Shape>* state) {
  constexpr int kTiles = Shape::kTiles, kBlocks = Shape::kBlocks;
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
    if (args.tree == nullptr) {
      hide_outside(args, rows, sequence, key, s);
    } else {
      hide_by_tree<Shape>(sequence, key, tree, s);
    }
  }
  float highest[2 * kTiles];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) {
    const float factor = capped ? args.cap_log2 : rows.scale[r];
    highest[r] = -INFINITY;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = r % 2; i < 4; i += 2) {
        float& score = s[r / 2][block][i];
        // Not fused with what follows: the largest one is rounded here as the others are.
        score = __fmul_rn(score, factor);
        highest[r] = fmaxf(highest[r], score);
      }
    }
    grown |= highest[r] - state->largest[r] > kSlack;
  }
  if (__any_sync(kFullWarp, grown)) {
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        highest[r] = fmaxf(highest[r], __shfl_xor_sync(kFullWarp, highest[r], offset));
      }
      const float before = state->largest[r];
      // A row's reference depends on the row alone.
      if (highest[r] - before > kSlack) state->largest[r] = highest[r];
      const float shrink = exp2_approx(before - reference(state->largest[r]));
      state->sum[r] *= shrink;
#pragma unroll
      for (int m = 0; m < Shape::kD / 16; ++m) {
        state->out[r / 2][m][r % 2] *= shrink;
        state->out[r / 2][m][r % 2 + 2] *= shrink;
      }
    }
  }
  float against[2 * kTiles];
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) against[r] = reference(state->largest[r]);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 2 * n + i % 2;
        const float p = exp2_approx(s[n][block][i] - against[r]);
        state->sum[r] += p;
        s[n][block][i] = p;
      }
    }
  }
}

}  // namespace tiercel

#endif  // KERNELS_ATTENTION_DECODE_WARP_CUH_
