// SPDX-License-Identifier: Apache-2.0
// softmax and log_softmax over rows, forward and backward, with scale and mask.
//
// Bound by memory: forward reads and writes a row once, backward reads two and writes one.
// A group of threads holds a row in registers, kVectors 16-byte vectors per thread, so that nothing
// is read twice: 2 to 32 lanes of a warp (rows of up to 1024 16-bit scores), a block (32768), or a
// cluster of up to 16 blocks (262144). All loads are issued at once. The maximum M and the sum of
// exp(x - M) are reduced by shuffles, then through shared memory between warps and through
// distributed shared memory between blocks. A block loads nothing while it reduces, so the other
// blocks of the multiprocessor must. Speed depends on the bytes in flight that the registers can
// hold. 16-bit scores stay packed, two per register, and their exponentials are computed twice,
// which is cheaper than registers for the first results: 64 registers per thread hold 8 vectors,
// 128 KiB per multiprocessor. Both computations must be short, because a block has no loads in
// flight between its loads and its stores (exponentials.cuh). A bool mask of whole vectors is read
// with the scores and applied to the packed scores; an added mask is read completely before its
// first use. Rows that do not begin at a multiple of 16 bytes are read from the multiple before,
// with their neighbours' elements (rows.cuh). Rows too long for the registers are read twice
// (softmax_long.cuh).
#ifndef KERNELS_SOFTMAX_SOFTMAX_CUH_
#define KERNELS_SOFTMAX_SOFTMAX_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/softmax/exponentials.cuh"
#include "kernels/softmax/row_group.cuh"
#include "kernels/softmax/rows.cuh"
#include "kernels/softmax/softmax_kernels.h"

namespace tiercel {

// Keeps the compiler from holding unpacked values between uses, which takes twice the registers.
__device__ __forceinline__ void keep_packed(uint32_t (&words)[4]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) asm volatile("" : "+r"(words[w]));
}

template <int kCount>
__device__ __forceinline__ float sum_of(const float (&sums)[kCount]) {
  float sum = sums[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) sum += sums[i];
  return sum;
}

// 1 / x. With few vectors latency counts, so it is approximate to a unit in the last place. With
// many, the branch of the exact division keeps the compiler from unpacking vectors before it.
template <int kVectors>
__device__ __forceinline__ float inverse_of(float x) {
  if constexpr (kVectors > 2) return 1.0f / x;
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// x / sum; kExact: correct except for rare last places.
template <bool kExact>
__device__ __forceinline__ float share_of(float x, float sum, float inverse) {
  const float share = x * inverse;
  return kExact ? fmaf(fmaf(-sum, share, x), inverse, share) : share;
}

// Replaces a row's scores in registers by its results: float32 scores, or masked ones, which are
// already scaled. `factor` > 0 is the scale that remains to be applied.
template <bool kExact, typename Group, int kVectors, int kPerVector>
__device__ __forceinline__ void softmax_of(float (&x)[kVectors][kPerVector], const Group& group,
                                           float factor, bool log) {
  float largest = -kInfinity;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) largest = fmaxf(largest, x[v][i]);
  }
  largest = group.reduce(largest, MaxOf(), 0);
  const ExpBelow<kExact> exp_below(largest, factor);
  float sums[4] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      const float term = exp_below(x[v][i]);
      sums[i % 4] += term;
      if (!log) x[v][i] = term;
    }
  }
  const float sum = group.reduce(sum_of(sums), SumOf(), 1);
  if (log) {
    const float log_sum = logf(sum);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) x[v][i] = fmaf(x[v][i] - largest, factor, -log_sum);
    }
    return;
  }
  const float inverse = inverse_of<kVectors>(sum);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) x[v][i] = share_of<kExact>(x[v][i], sum, inverse);
  }
}

// The maximum of a thread's scores.
template <typename Format, int kVectors>
__device__ __forceinline__ float largest_of(const uint32_t (&words)[kVectors][4]) {
  if constexpr (Format::kBytes == 4) {
    float most = -kInfinity;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int w = 0; w < 4; ++w) most = fmaxf(most, __uint_as_float(words[v][w]));
    }
    return most;
  } else {
    uint32_t most = words[0][0];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int w = 0; w < 4; ++w) most = Format::max_pairs(most, words[v][w]);
    }
    float pair[2];
    Format::unpack(most, pair);
    return fmaxf(pair[0], pair[1]);
  }
}

// Computes each vector's results from its scores.
template <typename Format, int kVectors, typename Store, typename Result>
__device__ __forceinline__ void finish_rows(uint32_t (&words)[kVectors][4], Store& store,
                                            Result result) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float x[kSoftmaxVectorBytes / Format::kBytes];
    keep_packed(words[v]);
    unpack<Format>(words[v], x);
#pragma unroll
    for (float& value : x) value = result(value);
    store(v, x);
  }
}

// Computes the results from the row's maximum and sum of exponentials.
template <typename Format, int kVectors, typename Store, typename Exp>
__device__ __forceinline__ void finish_of(uint32_t (&words)[kVectors][4], const Exp& exp_below,
                                          float sum, float factor, bool log, Store& store) {
  if constexpr (std::is_same_v<Exp, PackedExpBelow>) {
    // One instruction serves both functions: two loops would be twice the code, and the compiler
    // would compute both results per score.
    const float by = log ? 1.0f : exp_below.factor;
    const float less = log ? exp_below.largest : exp_below.shift;
    const float times = log ? factor : inverse_of<kVectors>(sum);
    const float plus = log ? -exp_below.log_of(sum) : 0.0f;
    finish_rows<Format>(words, store, [&](float x) {
      const float below = fmaf(x, by, -less);
      return fmaf(log ? below : exp2_approx(below), times, plus);
    });
  } else if (log) {
    const float log_sum = exp_below.log_of(sum);
    finish_rows<Format>(words, store,
                        [&](float x) { return fmaf(x - exp_below.largest, factor, -log_sum); });
  } else {
    const float inverse = inverse_of<kVectors>(sum);
    finish_rows<Format>(words, store, [&](float x) {
      return share_of<Format::kBytes == 4>(exp_below(x), sum, inverse);
    });
  }
}

// softmax_of for packed 16-bit scores; passes each vector's results to `store(v, results)`.
template <typename Format, typename Group, int kVectors, typename Store>
__device__ __forceinline__ void softmax_of_packed(uint32_t (&words)[kVectors][4],
                                                  const Group& group, float factor, bool log,
                                                  Store& store) {
  const float largest = group.reduce(largest_of<Format>(words), MaxOf(), 0);
  const PackedExpBelow exp_below(largest, factor);
  float sums[4] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float x[8];
    keep_packed(words[v]);
    unpack<Format>(words[v], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i % 4] += exp_below(x[i]);
  }
  const float sum = group.reduce(sum_of(sums), SumOf(), 1);
  finish_of<Format>(words, exp_below, sum, factor, log, store);
}

// softmax_of for a row of a block or cluster. Each warp computes exponentials relative to its own
// maximum, so that one reduction yields maximum and sum (the online softmax).
template <typename Format, int kVectors, typename Store>
__device__ __forceinline__ void softmax_of_block(uint32_t (&words)[kVectors][4],
                                                 const BlockGroup& group, float factor, bool log,
                                                 Store& store) {
  constexpr bool kExact = Format::kBytes == 4;
  constexpr int kPerVector = kSoftmaxVectorBytes / Format::kBytes;
  constexpr bool kKeepsTerms = kVectors == 1;  // few rows: shortest latency
  float terms[kKeepsTerms ? kPerVector : 1];
  const float of_warp = group_reduce<32>(largest_of<Format>(words), MaxOf());
  float sums[4] = {};
  {
    const BlockExp<Format> exp_below(of_warp == -kInfinity ? 0.0f : of_warp, factor);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float x[kPerVector];
      keep_packed(words[v]);
      unpack<Format>(words[v], x);
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        const float term = exp_below(x[i]);
        sums[i % 4] += term;
        if (kKeepsTerms) terms[i] = term;
      }
    }
  }
  const float2 all =
      group.join(of_warp, lanes_reduce<32>(sum_of(sums), SumOf()),
                 [&](float x, float y) { return BlockExp<Format>(y, factor).of_largest(x); });
  const BlockExp<Format> exp_below(all.x, factor);
  if constexpr (kKeepsTerms) {
    if (!log) {
      const float share = exp_below.of_largest(of_warp);
      const float inverse = inverse_of<kVectors>(all.y);
#pragma unroll
      for (float& term : terms) term = share_of<kExact>(term * share, all.y, inverse);
      store(0, terms);
      return;
    }
  }
  finish_of<Format>(words, exp_below, all.y, factor, log, store);
}

// Applies a negative scale's sign to the scores, two per word.
template <typename Format>
__device__ __forceinline__ uint32_t sign_flip(float scale) {
  return scale < 0.0f ? (Format::kBytes == 4 ? 0x80000000u : 0x80008000u) : 0u;
}

// Converts a vector's words to the scores that softmax_of takes.
template <typename Format, bool kMasked>
struct ScoreReader {
  const SoftmaxArgs& args;
  const char* mask;
  uint32_t flip;
  float factor;

  __device__ __forceinline__ ScoreReader(const SoftmaxArgs& args, int64_t row)
      : args(args),
        mask(kMasked ? mask_row(args.mask, row) : nullptr),
        flip(sign_flip<Format>(args.scale)),
        factor(kMasked ? 1.0f : fabsf(args.scale)) {}

  template <typename Place>
  __device__ __forceinline__ void operator()(const uint32_t (&words)[4],
                                             float (&x)[Place::kPerVector], const Place& place,
                                             int v) const {
    if constexpr (kMasked) {
      unpack<Format>(words, x);
#pragma unroll
      for (int i = 0; i < Place::kPerVector; ++i) x[i] *= args.scale;
      apply_mask<Format>(x, args.mask, mask, place, v);
    } else {
      uint32_t flipped[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) flipped[w] = words[w] ^ flip;
      unpack<Format>(flipped, x);
    }
  }

  // Converts all of a thread's vectors.
  template <typename Place, int kVectors>
  __device__ __forceinline__ void read_all(const uint32_t (&words)[kVectors][4],
                                           float (&x)[kVectors][Place::kPerVector],
                                           const Place& place) const {
    if constexpr (kMasked) {
      if (args.mask.kind != SoftmaxMask::kKeep && args.mask.vectors &&
          args.columns % Place::kPerVector == 0) {
        load_added<Format>(x, args.mask, mask, place);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          float scores[Place::kPerVector];
          unpack<Format>(words[v], scores);
#pragma unroll
          for (int i = 0; i < Place::kPerVector; ++i) {
            x[v][i] = fmaf(scores[i], args.scale, x[v][i]);
          }
        }
        return;
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) (*this)(words[v], x[v], place, v);
  }
};

// The number of the largest blocks per multiprocessor for the launch bounds: the most without
// spills. Rows of whole vectors need few registers besides the `words` of their data. Blocks with
// one vector per thread are for few rows and need not share a multiprocessor.
constexpr int blocks_for(int max_threads, bool aligned, int words) {
  if (!aligned) return words > 32 ? 1 : max_threads > kSoftmaxWideThreads ? 2 : 3;
  const bool single = words < 8 && max_threads == kSoftmaxThreads;
  const int registers = words <= 8 && !single ? 32 : words <= 16 ? 40 : words <= 32 ? 64 : 128;
  return 65536 / registers / max_threads;
}

// The words that softmax_forward holds per vector: its scores, packed or not, and a mask's bytes.
template <typename Format>
constexpr int forward_words(bool masked, bool aligned) {
  if (masked && aligned) return 4 + 4 / Format::kBytes;
  return masked ? 16 / Format::kBytes : 4;
}

template <typename Format, typename Group, int kVectors, bool kMasked, bool kAligned,
          int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads,
                                  blocks_for(kMaxThreads, kAligned,
                                             forward_words<Format>(kMasked, kAligned) * kVectors))
    softmax_forward(const __grid_constant__ SoftmaxArgs args) {
  constexpr bool kKeeps = kMasked && kAligned;
  const Group group(args.blocks);
  const RowPlace<Format, Group, kAligned> place(args, group);
  constexpr bool kBlock = std::is_same_v<Group, BlockGroup>;
  if constexpr (kAligned ||
                (kBlock && kVectors == 8)) {  // the other kernels are for few or masked rows
    if (is_prefetching(args.prefetch_blocks)) prefetch_row<kVectors>(place, group, args.x);
  }
  grid_dependency_wait();
  // The next grid's blocks use the room that this grid's last blocks leave.
  grid_dependency_launch();

  uint32_t words[kVectors][4];
  constexpr bool kBranches = kAligned || (kMasked && kVectors < 8);
  load_row<kBlock && kVectors != 1 && kBranches>(words, place, args.x, args.pad);
  if constexpr (kKeeps) {
    uint32_t kept[kVectors][4 / Format::kBytes];
    load_kept(kept, args.mask, place);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) pad_dropped<Format>(words[v], kept[v], args.pad);
  }
  group.meet();
  const ScoreReader<Format, kMasked && !kKeeps> read(args, place.row);
  if constexpr ((Format::kBytes == 2 || kBlock) && (!kMasked || kKeeps)) {
    if (read.flip != 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[v][w] ^= read.flip;
      }
    }
    RowWriter<Format, std::decay_t<decltype(place)>> store(place, args.out);
    if constexpr (kBlock) {
      softmax_of_block<Format>(words, group, read.factor, args.log, store);
    } else {
      softmax_of_packed<Format>(words, group, read.factor, args.log, store);
    }
  } else {
    float x[kVectors][RowPlace<Format, Group>::kPerVector];
    read.read_all(words, x, place);
    softmax_of<Format::kBytes == 4>(x, group, read.factor, args.log);
    RowWriter<Format, std::decay_t<decltype(place)>> store(place, args.out);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) store(v, x[v]);
  }
}

// Replaces a vector's results y by its gradients, given the row's sum. Masked scores get 0, even
// where that would be NaN.
//   softmax: y (g - sum(g y)); log_softmax: g - exp(y) sum(g); times the scale.
template <bool kLog, bool kExact, int kPerVector>
__device__ __forceinline__ void gradients(float (&y)[kPerVector], const float (&grad)[kPerVector],
                                          float total, float scale, uint32_t keep) {
  const ExpBelow<kExact> exponential(0.0f, 1.0f);
#pragma unroll
  for (int i = 0; i < kPerVector; ++i) {
    const float score_grad =
        kLog ? fmaf(-exponential(y[i]), total, grad[i]) : y[i] * (grad[i] - total);
    y[i] = keep >> i & 1 ? score_grad * scale : 0.0f;
  }
}

// Adds a vector's terms of the row's sum.
template <typename Format, int kPerVector>
__device__ __forceinline__ void add_products(float (&sums)[4], const uint32_t (&y_words)[4],
                                             const uint32_t (&grad_words)[4], bool log) {
  float y[kPerVector], grad[kPerVector];
  unpack<Format>(y_words, y);
  unpack<Format>(grad_words, grad);
#pragma unroll
  for (int i = 0; i < kPerVector; ++i) sums[i % 4] = fmaf(grad[i], log ? 1.0f : y[i], sums[i % 4]);
}

template <typename Format, typename Group, int kVectors, bool kMasked, bool kAligned,
          int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads,
                                  kAligned ? blocks_for(kMaxThreads, true, 8 * kVectors) : 1)
    softmax_backward(const __grid_constant__ SoftmaxArgs args) {
  constexpr int kPerVector = RowPlace<Format, Group>::kPerVector;
  const Group group(args.blocks);
  const RowPlace<Format, Group, kAligned> place(args, group);
  if constexpr (kAligned) {
    if (is_prefetching(args.prefetch_blocks)) {
      prefetch_row<kVectors>(place, group, args.x);
      prefetch_row<kVectors>(place, group, args.grad);
    }
  }
  grid_dependency_wait();

  uint32_t y_words[kVectors][4], grad_words[kVectors][4];
  load_row(y_words, place, args.x, 0.0f);
  load_row(grad_words, place, args.grad, 0.0f);
  grid_dependency_launch();
  float sums[4] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    add_products<Format, kPerVector>(sums, y_words[v], grad_words[v], args.log);
  }
  group.meet();
  const float total = group.reduce(sum_of(sums), SumOf(), 0);
  const char* mask = kMasked ? mask_row(args.mask, place.row) : nullptr;
  // Unpacked values held across the reduction would take twice the registers, so the compiler must
  // not see that these words are unchanged.
  const uint32_t zero = args.blocks >> 31;
  const auto finish = [&](auto log) {
    RowWriter<Format, std::decay_t<decltype(place)>> store(place, args.out);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float y[kPerVector], grad[kPerVector];
      if constexpr (kPerVector == 8) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          asm volatile("xor.b32 %0, %0, %2; xor.b32 %1, %1, %2;"
                       : "+r"(y_words[v][w]), "+r"(grad_words[v][w])
                       : "r"(zero));
        }
      }
      unpack<Format>(y_words[v], y);
      unpack<Format>(grad_words[v], grad);
      uint32_t keep = ~0u;
      if constexpr (kMasked) keep = mask_bits(args.mask, mask, place, v);
      gradients<decltype(log)::value, Format::kBytes == 4>(y, grad, total, args.scale, keep);
      store(v, y);
    }
  };
  if (args.log) {
    finish(std::true_type());
  } else {
    finish(std::false_type());
  }
}

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_CUH_
