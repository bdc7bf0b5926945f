// SPDX-License-Identifier: Apache-2.0
// attention_sinks_backward: the gradients of sinks, whose share of a row's sum is exp(sink - lse).
//
// Bound by memory: the result and its gradient are read once. A head's rows are divided among up to
// 64 blocks, each of which has several rows in flight, 16 bytes per thread. A thread adds up its
// rows in order, a block its threads, and a second kernel the blocks, so the sum is deterministic.
#include <cstdint>

#include "kernels/attention/sinks/sinks.h"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

constexpr int kThreads = kAttentionSinksThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kAtOnce = 4;  // rows of a thread in flight

__device__ __forceinline__ const char* row_of(const AttentionSinksRows& rows, int64_t entry,
                                              int64_t row, int head) {
  return rows.data + entry * rows.batch_stride + row * rows.row_stride + head * rows.head_stride;
}

template <typename Format>
__global__ void __launch_bounds__(kThreads)
    attention_sinks_backward(const __grid_constant__ AttentionSinksArgs args) {
  grid_dependency_wait();
  grid_dependency_launch();
  __shared__ float of_warps[kWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.x) / args.parts;
  const int part = static_cast<int>(blockIdx.x) % args.parts;
  const int lane = thread % args.lanes, step = kThreads / args.lanes;
  const float sink = args.sinks[head];
  float sum = 0.0f;
  for (int first = part * step * kAtOnce; first < args.count;
       first += args.parts * step * kAtOnce) {
    uint32_t out[kAtOnce][4] = {}, grad[kAtOnce][4] = {};
    int64_t at[kAtOnce];  // in lse
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int number = first + i * step + thread / args.lanes;
      const int entry = number / args.rows, row = number - entry * args.rows;
      const int64_t pair = static_cast<int64_t>(entry) * args.heads + head;
      at[i] = number < args.count ? pair * args.rows + row : -1;
      if (at[i] >= 0 && lane * 8 < args.d) {
        load_vector(out[i], row_of(args.out, entry, row, head) + lane * 16);
        load_vector(grad[i], row_of(args.grad, entry, row, head) + lane * 16);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float delta = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float a[2], b[2];
        Format::unpack(out[i][w], a);
        Format::unpack(grad[i][w], b);
        delta = fmaf(a[0], b[0], fmaf(a[1], b[1], delta));
      }
      for (int offset = args.lanes / 2; offset > 0; offset /= 2) {
        delta += __shfl_xor_sync(kFullWarp, delta, offset);
      }
      if (lane != 0 || at[i] < 0) continue;
      const float lse = args.lse[at[i]];
      if (lse == -INFINITY) continue;  // whatever the gradient of such a row holds
      if (args.grad_lse != nullptr) delta -= args.grad_lse[at[i]];
      // At most 1, however lse was rounded.
      sum = fmaf(-exp2_approx(fminf(sink - lse, 0.0f) * kLog2E), delta, sum);
    }
  }
  sum = lanes_reduce<32>(sum, Sum());
  if (thread % 32 == 0) of_warps[thread / 32] = sum;
  __syncthreads();
  if (thread < 32) {
    sum = lanes_reduce<kWarps>(of_warps[thread % kWarps], Sum());
    if (thread == 0) args.sums[blockIdx.x] = sum;
  }
}

// A warp has one head.
__global__ void __launch_bounds__(kThreads)
    attention_sinks_sum(const __grid_constant__ AttentionSinksArgs args) {
  static_assert(kAttentionSinksParts == 64, "a lane has two parts");
  grid_dependency_wait();
  grid_dependency_launch();
  const int head = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (head >= args.heads) return;
  const float* sums = args.sums + static_cast<int64_t>(head) * args.parts;
  float sum = lane < args.parts ? sums[lane] : 0.0f;
  if (lane + 32 < args.parts) sum += sums[lane + 32];
  sum = lanes_reduce<32>(sum, Sum());
  if (lane == 0) args.dsinks[head] = sum;
}

#define TIERCEL_SINKS(dtype)                                       \
  {DType::k##dtype, Kernel("attention_sinks_backward<" #dtype ">", \
                           reinterpret_cast<const void*>(attention_sinks_backward<dtype>))}

const AttentionSinksKernel kKernels[] = {TIERCEL_SINKS(BFloat16), TIERCEL_SINKS(Float16)};

const Kernel kSum("attention_sinks_sum", reinterpret_cast<const void*>(attention_sinks_sum));

}  // namespace

const AttentionSinksKernel* attention_sinks_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

const Kernel& attention_sinks_sum_kernel() { return kSum; }

}  // namespace tiercel
