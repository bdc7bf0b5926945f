// SPDX-License-Identifier: Apache-2.0
// qk_norm_rope_backward: the gradients of queries and keys and, with qk_weight_grad, of the weights
// of their norms.
//
// A row is a head of a token, in the registers of D / 16 lanes as in qk_norm_rope_cache. With the
// result's gradient g turned back, a head x of factor r = 1 / sqrt(mean(x^2) + eps) and weight w,
//
//   grad_x = r * (g * w - x * r^2 * mean(g * w * x)),   grad_w = sum over rows of g * x * r.
//
// Both sums over a head are one reduction. q, k and the gradients are read once and written once:
// 8192 tokens of 32 + 8 heads of 128 bfloat16 are 252 MB, 60 us at 4.2 TB/s. A block takes every
// n-th group of rows of q or of k, so that its lanes add up grad_w in registers; its rows' sums
// are added in their order, and qk_weight_grad adds those of the blocks in theirs. The number of
// blocks does not depend on the device: the gradients' bits depend on the shapes alone.
#include <cstdint>

#include "kernels/rotary/element_formats.cuh"
#include "kernels/rotary/integers.cuh"
#include "kernels/rotary/qk_heads.cuh"
#include "kernels/rotary/rotary_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kEach = 2 * kQkVector;  // elements of a lane

__device__ __forceinline__ char* at(const HeadsOfTokens& heads, uint32_t token, uint32_t head) {
  return heads.data + token * heads.token_stride + head * heads.head_stride;
}

// The sums of a block's rows, in the order of the rows.
__device__ __forceinline__ void store_sums(const QkNormRopeBackwardArgs& args, int size,
                                           bool interleaved, const float (&sums)[2][kQkVector]) {
  __shared__ float of_threads[kEach][kQkBackwardThreads];
  const int lanes = blockDim.x, thread = threadIdx.y * lanes + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kEach; ++j) of_threads[j][thread] = sums[j / kQkVector][j % kQkVector];
  __syncthreads();
  for (int i = thread; i < lanes * kEach; i += lanes * blockDim.y) {
    const int lane = i % lanes, j = i / lanes;
    const HeadPlace place(args, lane, interleaved);
    const bool second = j >= kQkVector;  // a selection: indexed arrays would need local memory
    if (!(second ? place.has[1] : place.has[0])) continue;
    float sum = 0.0f;
    for (int row = 0; row < static_cast<int>(blockDim.y); ++row) {
      sum += of_threads[j][row * lanes + lane];
    }
    const int column = (second ? place.offsets[1] : place.offsets[0]) + j % kQkVector;
    args.partial[static_cast<int64_t>(blockIdx.x) * size + column] = sum;
  }
}

template <typename Element, bool kInterleaved>
__global__ void __launch_bounds__(kQkBackwardThreads, 4)
    qk_norm_rope_backward(const __grid_constant__ QkNormRopeBackwardArgs args) {
  const int lane = threadIdx.x;
  const HeadPlace own(args, lane, kInterleaved);
  const int (&offsets)[2] = own.offsets;
  const bool (&has)[2] = own.has;
  const bool is_q = blockIdx.x < args.q_blocks;
  const HeadsOfTokens& inputs = is_q ? args.q : args.k;
  const HeadsOfTokens& grads = is_q ? args.grad_q_out : args.grad_k_out;
  const HeadsOfTokens& results = is_q ? args.grad_q : args.grad_k;
  const char* const weight = is_q ? args.q_weight : args.k_weight;
  const uint32_t heads = is_q ? args.q_heads : args.kv_heads;
  const uint32_t rows = is_q ? args.q_rows : args.k_rows;
  const uint32_t block = is_q ? blockIdx.x : blockIdx.x - args.q_blocks;
  const uint32_t step = (is_q ? args.q_blocks : gridDim.x - args.q_blocks) * blockDim.y;
  grid_dependency_wait();
  grid_dependency_launch();

  float weights[2][kQkVector] = {}, sums[2][kQkVector] = {};
  if (weight != nullptr) {
    const bool wide = is_q ? args.wide_q_weight : args.wide_k_weight;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      Eight<Element> loaded = {};
      if (has[p]) loaded.load(weight, offsets[p], wide);
      loaded.get(weights[p], wide);
    }
  }
  // All threads of a block run as many steps: the reductions take whole warps.
  for (uint32_t first = block * blockDim.y; first < rows; first += step) {
    const uint32_t row = first + threadIdx.y;
    const bool there = row < rows;
    const uint32_t token = there ? row / heads : 0, head = there ? row - token * heads : 0;
    Integer position = {0, 0};
    Packed<Element, kQkVector> x[2] = {}, grad[2] = {};
    if (there) {
      if (own.turns) position.load(args.positions, token, args.wide_positions);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (!has[p]) continue;
        const int64_t offset = offsets[p] * Element::kBytes;
        grad[p].load(at(grads, token, head) + offset);
        if (weight != nullptr) x[p].load(at(inputs, token, head) + offset);
      }
    }
    if (const uint32_t next = row + step; next < rows) {
      const uint32_t later = next / heads, later_head = next - later * heads;
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (!has[p]) continue;
        const int64_t offset = offsets[p] * Element::kBytes;
        prefetch_l2(at(grads, later, later_head) + offset);
        if (weight != nullptr) prefetch_l2(at(inputs, later, later_head) + offset);
      }
    }
    float g[2][kQkVector];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int j = 0; j < kQkVector; ++j) g[p][j] = grad[p][j];
    }
    if (own.turns && there) {
      const uint64_t angle = position.clamped(args.wide_positions, args.last_position);
      const int64_t from = angle * static_cast<uint32_t>(args.rotated) + lane * kQkVector;
      Eight<Element> cosines, sines;
      cosines.load(args.angles, from, args.wide_angles);
      sines.load(args.angles, from + args.rotated / 2, args.wide_angles);
      float cosine[kQkVector], sine[kQkVector];
      cosines.get(cosine, args.wide_angles);
      sines.get(sine, args.wide_angles);
#pragma unroll
      for (int j = 0; j < kQkVector; ++j) sine[j] = -sine[j];
      turn_pairs<kInterleaved>(g, cosine, sine);
    }
    if (weight != nullptr) {
      float squares = 0.0f, dot = 0.0f;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int p = j / kQkVector, e = j % kQkVector;
        squares = fmaf(x[p][e], x[p][e], squares);
        dot = fmaf(g[p][e] * weights[p][e], x[p][e], dot);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        if (offset >= static_cast<int>(blockDim.x)) continue;
        squares += __shfl_xor_sync(kFullWarp, squares, offset);
        dot += __shfl_xor_sync(kFullWarp, dot, offset);
      }
      if (!there) continue;  // with eps = 0 its factor would be infinite
      const float factor = rsqrtf(fmaf(squares, args.inverse_size, args.eps));
      const float common = dot * factor * args.inverse_size * factor;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int p = j / kQkVector, e = j % kQkVector;
        const float normed = x[p][e] * factor;
        sums[p][e] = fmaf(g[p][e], normed, sums[p][e]);
        g[p][e] = factor * g[p][e] * weights[p][e] - normed * common;
      }
    }
    if (!there) continue;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (!has[p]) continue;
      Packed<Element, kQkVector> packed;
      packed.round(g[p]);
      packed.store(at(results, token, head) + offsets[p] * Element::kBytes);
    }
  }
  if (args.partial != nullptr && weight != nullptr) {
    store_sums(args, args.rotated + args.rest * kQkVector, kInterleaved, sums);
  }
}

// The sums of the blocks' sums, 32 columns a block; blockIdx.y: of q or of k.
template <typename Element>
__global__ void __launch_bounds__(kQkWeightGradColumns* kQkWeightGradRows)
    qk_weight_grad(const __grid_constant__ QkWeightGradArgs args) {
  __shared__ float of_rows[kQkWeightGradRows][kQkWeightGradColumns];
  grid_dependency_wait();
  grid_dependency_launch();
  const bool is_q = blockIdx.y == 0;
  char* const out = is_q ? args.grad_q_weight : args.grad_k_weight;
  if (out == nullptr) return;
  const int column = blockIdx.x * kQkWeightGradColumns + threadIdx.x;
  const int begin = is_q ? 0 : args.q_blocks, end = is_q ? args.q_blocks : args.blocks;
  float sum = 0.0f;
  if (column < args.size) {
#pragma unroll 8
    for (int block = begin + threadIdx.y; block < end; block += kQkWeightGradRows) {
      sum += args.partial[static_cast<int64_t>(block) * args.size + column];
    }
  }
  of_rows[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= args.size) return;
#pragma unroll
  for (int row = 1; row < kQkWeightGradRows; ++row) sum += of_rows[row][threadIdx.x];
  if (is_q ? args.wide_q_weight : args.wide_k_weight) {
    reinterpret_cast<float*>(out)[column] = sum;
  } else {
    reinterpret_cast<uint16_t*>(out)[column] = static_cast<uint16_t>(Element::narrow(sum));
  }
}

#define TIERCEL_QK(dtype, interleaved)                                       \
  {DType::k##dtype, interleaved,                                             \
   Kernel("qk_norm_rope_backward<" #dtype ", interleaved=" #interleaved ">", \
          reinterpret_cast<const void*>(qk_norm_rope_backward<dtype##Element, interleaved>))}

const QkNormRopeBackwardKernel kBackward[] = {
    TIERCEL_QK(BFloat16, false), TIERCEL_QK(BFloat16, true), TIERCEL_QK(Float16, false),
    TIERCEL_QK(Float16, true)};

#define TIERCEL_QK_WEIGHT(dtype)                         \
  {DType::k##dtype, Kernel("qk_weight_grad<" #dtype ">", \
                           reinterpret_cast<const void*>(qk_weight_grad<dtype##Element>))}

const QkWeightGradKernel kWeightGrad[] = {TIERCEL_QK_WEIGHT(BFloat16), TIERCEL_QK_WEIGHT(Float16)};

}  // namespace

const QkNormRopeBackwardKernel* qk_norm_rope_backward_kernels(int* count) {
  *count = sizeof(kBackward) / sizeof(kBackward[0]);
  return kBackward;
}

const QkWeightGradKernel* qk_weight_grad_kernels(int* count) {
  *count = sizeof(kWeightGrad) / sizeof(kWeightGrad[0]);
  return kWeightGrad;
}

}  // namespace tiercel
