// SPDX-License-Identifier: Apache-2.0
// qk_norm_rope_cache: norms and rotates each head of q and k, and writes keys and values to the
// cache.
//
// All data is read once and written once: 8192 tokens of 32 + 8 + 8 heads of 128 bfloat16 are
// 201 MB, 48 us at 4.2 TB/s. A thread has one place in kHeads heads of a token: two vectors whose
// elements form pairs, or two that are only copied; so a rotation needs no other thread, and the
// sum of squares one reduction over the lanes of a head. Loads of data, position and slot are all
// in flight before the thread waits for one. Heads of k and v follow those of q; the same code
// processes all three. A thread writes only elements that it alone has read, so q_out may be q.
#include <cstdint>

#include "kernels/rotary/element_formats.cuh"
#include "kernels/rotary/float8_store.cuh"
#include "kernels/rotary/integers.cuh"
#include "kernels/rotary/qk_heads.cuh"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/early_launch.h"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

__device__ __forceinline__ const char* head_of(const QkNormRopeCacheArgs& args, int64_t token,
                                               int head) {
  const int kv_head = head - args.q_heads, v_head = kv_head - args.kv_heads;
  const HeadsOfTokens& heads = kv_head < 0  ? args.q
                               : v_head < 0 ? args.cache.key
                                            : args.cache.value;
  const int number = kv_head < 0 ? head : v_head < 0 ? kv_head : v_head;
  return heads.data + token * heads.token_stride + number * heads.head_stride;
}

template <typename Element, bool kMayBeFloat8>
__device__ __forceinline__ void store_eight(char* to, const float (&values)[kQkVector], bool float8,
                                            const Divisor& divisor) {
  if (kMayBeFloat8 && float8) {
    store_float8<kQkVector>(to, values, divisor);
  } else {
    Packed<Element, kQkVector> packed;
    packed.round(values);
    packed.store(to);
  }
}

// Cosines and sines of a lane's place, by a position that the kernel before may still write.
template <typename Element, bool kSections>
__device__ __forceinline__ void prefetch_angles(const QkNormRopeCacheArgs& args, int64_t token,
                                                int lane) {
  // With sections: the position of the lane's first pair.
  if constexpr (kSections) token += (args.axes[lane] & 3) * args.cache.tokens;
  Integer position;
  position.load(args.positions, token, args.wide_positions);
  const uint64_t row = position.clamped(args.wide_positions, args.last_position);
  const int64_t at = row * static_cast<uint32_t>(args.rotated) + lane * kQkVector;
  const int bytes = args.wide_angles ? 4 : Element::kBytes;
  prefetch_l2(args.angles + at * bytes);
  prefetch_l2(args.angles + (at + args.rotated / 2) * bytes);
}

template <typename Element>
__device__ __forceinline__ void prefetch_weight(const char* weight, int offset, bool is_float32) {
  if (weight != nullptr) prefetch_l2(weight + offset * (is_float32 ? 4 : Element::kBytes));
}

// A block covers lanes x heads x tokens, the grid tokens x heads. The lanes of a head are a power
// of two; a block has whole warps, all of which take part in the reductions. kFloat8: q_out, the
// cache or both are float8; a kernel of its own, because a third of the code is for that.
// kSections: a token has three positions, and each pair turns by the one that args.axes tells.
template <typename Element, bool kInterleaved, bool kFloat8, int kHeads, bool kSections>
__global__ void __launch_bounds__(kQkMostThreads, kHeads == 1 ? 4 : 1)
    qk_norm_rope_cache(const __grid_constant__ QkNormRopeCacheArgs args) {
  const KvCacheArgs& cache = args.cache;
  const int lane = threadIdx.x;
  const HeadPlace own(args, lane, kInterleaved);
  const bool turns = own.turns;
  const int (&offsets)[2] = own.offsets;
  const bool (&has)[2] = own.has;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const int first = blockIdx.y * kHeads * blockDim.y + threadIdx.y;
  const bool there = token < cache.tokens;
  if (is_prefetching(cache.prefetch_blocks) && there) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * blockDim.y;
      if (head >= args.heads) continue;
      const char* from = head_of(args, token, head);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (has[p]) prefetch_l2(from + offsets[p] * Element::kBytes);
      }
    }
    if (lane + threadIdx.y + threadIdx.z + blockIdx.y == 0) {
      prefetch_line(args.positions, blockIdx.x, cache.tokens * (args.wide_positions ? 8 : 4));
      if (cache.slots != nullptr) {
        prefetch_line(cache.slots, blockIdx.x, cache.tokens * (cache.wide_slots ? 8 : 4));
      }
    }
    if (threadIdx.y + blockIdx.y == 0) {  // one head's threads for all heads
      if (turns) prefetch_angles<Element, kSections>(args, token, lane);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (blockIdx.x > 0 || !has[p]) continue;
        prefetch_weight<Element>(args.q_weight, offsets[p], args.wide_q_weight);
        prefetch_weight<Element>(args.k_weight, offsets[p], args.wide_k_weight);
      }
    }
  }
  grid_dependency_wait_and_launch(args.early_launch);

  constexpr int kPositions = kSections ? 3 : 1;
  Integer positions[kPositions] = {}, number = {~0u, ~0u};
  if (there) {
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      positions[i].load(args.positions, i * cache.tokens + token, args.wide_positions);
    }
    if (cache.slots != nullptr) number.load(cache.slots, token, cache.wide_slots);
  }
  Packed<Element, kQkVector> x[kHeads][2] = {};
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first + i * blockDim.y;
    if (!there || head >= args.heads) continue;
    const char* from = head_of(args, token, head);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (has[p]) x[i][p].load(from + offsets[p] * Element::kBytes);
    }
  }
  // With two heads per thread there are no registers for all weights at once.
  Eight<Element> weights[kHeads == 1 ? 2 : 1] = {};
  const auto load_weight = [&](Eight<Element>& to, int head, int p) {
    const bool is_q = head < args.q_heads;
    const char* const weight = is_q ? args.q_weight : args.k_weight;
    if (weight == nullptr || head >= args.q_heads + args.kv_heads || !has[p]) return;
    to.load(weight, offsets[p], is_q ? args.wide_q_weight : args.wide_k_weight);
  };
  if constexpr (kHeads == 1) {
#pragma unroll
    for (int p = 0; p < 2; ++p) load_weight(weights[p], first, p);
  }
  float scales[kHeads];  // of float8; loaded here, so that no store waits for them
  if constexpr (kFloat8) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * blockDim.y, kv_head = head - args.q_heads;
      const int v_head = kv_head - args.kv_heads;
      const float* const from = kv_head < 0  ? args.q_scale
                                : v_head < 0 ? cache.key_scale
                                             : cache.value_scale;
      const bool per_head = kv_head < 0  ? args.q_scale_per_head
                            : v_head < 0 ? cache.key_scale_per_head
                                         : cache.value_scale_per_head;
      const int number_of_head = kv_head < 0 ? head : v_head < 0 ? kv_head : v_head;
      scales[i] = from != nullptr && head < args.heads ? from[per_head ? number_of_head : 0] : 1.0f;
    }
  }
  Eight<Element> cosines = {}, sines = {};
  if (kSections && turns && there) {
    uint32_t rows[kPositions];
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      rows[i] = positions[i].clamped(args.wide_positions, args.last_position);
    }
    const uint32_t axes = args.axes[lane];
#pragma unroll
    for (int j = 0; j < kQkVector; ++j) {
      const uint32_t axis = axes >> 2 * j & 3;
      const uint64_t row = axis == 0   ? rows[0]
                           : axis == 1 ? rows[kPositions / 2]
                                       : rows[kPositions - 1];
      const int64_t at = row * static_cast<uint32_t>(args.rotated) + lane * kQkVector + j;
      cosines.load_one(j, args.angles, at, args.wide_angles);
      sines.load_one(j, args.angles, at + args.rotated / 2, args.wide_angles);
    }
  } else if (turns && there) {
    const uint64_t row = positions[0].clamped(args.wide_positions, args.last_position);
    const int64_t at = row * static_cast<uint32_t>(args.rotated) + lane * kQkVector;
    cosines.load(args.angles, at, args.wide_angles);
    sines.load(args.angles, at + args.rotated / 2, args.wide_angles);
  }
  const int64_t slot = cache.slots != nullptr ? number.value(cache.wide_slots) : token;
  const bool kept = static_cast<uint64_t>(slot) < static_cast<uint64_t>(cache.slot_count);

  float squares[kHeads] = {};
  if (args.q_weight != nullptr || args.k_weight != nullptr) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kQkVector; ++j) {
        const float value = x[i][j / kQkVector][j % kQkVector];
        squares[i] = fmaf(value, value, squares[i]);
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      if (offset >= static_cast<int>(blockDim.x)) continue;
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        squares[i] += __shfl_xor_sync(kFullWarp, squares[i], offset);
      }
    }
  }
  if (!there) return;

#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first + i * blockDim.y;
    if (head >= args.heads) continue;
    const int kv_head = head - args.q_heads, v_head = kv_head - args.kv_heads;
    const bool is_q = kv_head < 0, is_value = v_head >= 0;
    const char* const weight = is_q ? args.q_weight : is_value ? nullptr : args.k_weight;
    float values[2][kQkVector];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int j = 0; j < kQkVector; ++j) values[p][j] = x[i][p][j];
    }
    if (weight != nullptr) {
      const float factor = rsqrtf(fmaf(squares[i], args.inverse_size, args.eps));
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (kHeads > 1) load_weight(weights[0], head, p);
        float each[kQkVector];
        weights[kHeads == 1 ? p : 0].get(each, is_q ? args.wide_q_weight : args.wide_k_weight);
#pragma unroll
        for (int j = 0; j < kQkVector; ++j) values[p][j] = values[p][j] * factor * each[j];
      }
    }
    if (turns && !is_value) {
      float cosine[kQkVector], sine[kQkVector];
      if constexpr (kSections) {
        cosines.get_each(cosine, args.wide_angles);
        sines.get_each(sine, args.wide_angles);
      } else {
        cosines.get(cosine, args.wide_angles);
        sines.get(sine, args.wide_angles);
      }
      turn_pairs<kInterleaved>(values, cosine, sine);
    }
    char* to;
    Divisor divisor = {1.0f, 1.0f, true, true};
    bool float8;
    if (is_q) {
      to = args.q_out.data + token * args.q_out.token_stride + head * args.q_out.head_stride;
      float8 = kFloat8 && args.float8_q;
    } else {
      if (!kept) continue;
      const int number_of_head = is_value ? v_head : kv_head;
      const int64_t block =
          cache.block_shift >= 0 ? slot >> cache.block_shift : slot / cache.block_size;
      const int64_t place = slot - block * cache.block_size;
      const int64_t (&strides)[3] = is_value ? cache.value_strides : cache.key_strides;
      to = (is_value ? cache.value_cache : cache.key_cache) + block * strides[0] +
           place * strides[1] + number_of_head * strides[2];
      float8 = kFloat8 && args.float8_cache;
    }
    if (kFloat8) divisor = divisor_by(scales[i]);
    const int bytes = float8 ? 1 : Element::kBytes;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (has[p])
        store_eight<Element, kFloat8>(to + offsets[p] * bytes, values[p], float8, divisor);
    }
  }
}

#define TIERCEL_QK(dtype, interleaved, float8, heads, sections)                          \
  {DType::k##dtype,                                                                      \
   interleaved,                                                                          \
   float8,                                                                               \
   sections,                                                                             \
   heads,                                                                                \
   Kernel("qk_norm_rope_cache<" #dtype ", interleaved=" #interleaved ", float8=" #float8 \
          ", sections=" #sections ", heads=" #heads ">",                                 \
          reinterpret_cast<const void*>(                                                 \
              qk_norm_rope_cache<dtype##Element, interleaved, float8, heads, sections>))}
#define TIERCEL_QK_HEADS(dtype, interleaved, float8)    \
  TIERCEL_QK(dtype, interleaved, float8, 1, false),     \
      TIERCEL_QK(dtype, interleaved, float8, 2, false), \
      TIERCEL_QK(dtype, interleaved, float8, 1, true),  \
      TIERCEL_QK(dtype, interleaved, float8, 2, true)
#define TIERCEL_QK_DTYPE(dtype)                                                \
  TIERCEL_QK_HEADS(dtype, false, false), TIERCEL_QK_HEADS(dtype, false, true), \
      TIERCEL_QK_HEADS(dtype, true, false), TIERCEL_QK_HEADS(dtype, true, true)

const QkNormRopeCacheKernel kKernels[] = {TIERCEL_QK_DTYPE(BFloat16), TIERCEL_QK_DTYPE(Float16)};

}  // namespace

const QkNormRopeCacheKernel* qk_norm_rope_cache_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
