// SPDX-License-Identifier: Apache-2.0
// gated_rms_norm: the norm of linear attention's output, times its gate.
//
// Bound by memory: x and gate are read and the result is written once. A group of lanes of a warp
// has a row in registers, so that the sum of squares takes a few shuffles and no barrier. All loads
// of a row are in flight before anything waits.
#include <cstdint>

#include "kernels/delta/delta_kernels.h"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

template <typename Format>
__device__ __forceinline__ void load_eight(const char* from, float (&values)[8]) {
  uint32_t words[4];
  load_vector(words, from);
  unpack<Format>(words, values);
}

template <typename Format>
__device__ __forceinline__ void load_weight(const GatedNormArgs& args, int column,
                                            float (&values)[8]) {
  if (args.weight_float) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t words[4];
      load_vector(words, args.weight + (column + 4 * i) * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) values[4 * i + j] = __uint_as_float(words[j]);
    }
  } else {
    load_eight<Format>(args.weight + column * 2, values);
  }
}

// Vector i of a lane is i * lanes behind its first, so that a row is read in order.
template <typename Format, int kVectors>
__global__ void __launch_bounds__(kGatedNormThreads)
    gated_rms_norm(const __grid_constant__ GatedNormArgs args) {
  const int lane = threadIdx.x % args.lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kGatedNormThreads / args.lanes) +
                      threadIdx.x / args.lanes;
  grid_dependency_wait();
  grid_dependency_launch();
  float x[kVectors][8], gate[kVectors][8];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (lane + i * args.lanes) * 8;
    const bool real = row < args.rows && column < args.columns;
#pragma unroll
    for (int j = 0; j < 8; ++j) x[i][j] = gate[i][j] = 0.0f;
    if (!real) continue;
    load_eight<Format>(args.x + row * args.x_stride + column * 2, x[i]);
    load_eight<Format>(args.gate + row * args.gate_stride + column * 2, gate[i]);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(x[i][j], x[i][j], sum);
  }
  for (int lanes = 1; lanes < args.lanes; lanes *= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, lanes);
  }
  const float factor = rsqrtf(sum / static_cast<float>(args.columns) + args.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (lane + i * args.lanes) * 8;
    if (row >= args.rows || column >= args.columns) continue;
    float weight[8], results[8];
    load_weight<Format>(args, column, weight);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float opened = __fdividef(gate[i][j], 1.0f + exp2_approx(-kLog2E * gate[i][j]));
      results[j] = x[i][j] * factor * weight[j] * opened;
    }
    uint32_t words[4];
    pack<Format>(results, words);
    store_vector(args.out + (row * args.columns + column) * 2, words);
  }
}

#define TIERCEL_GATED_NORM(dtype, vectors)                    \
  {DType::k##dtype, vectors,                                  \
   Kernel("gated_rms_norm<" #dtype ", vectors=" #vectors ">", \
          reinterpret_cast<const void*>(gated_rms_norm<dtype, vectors>))}

const GatedNormKernel kKernels[] = {
    TIERCEL_GATED_NORM(BFloat16, 1),
    TIERCEL_GATED_NORM(BFloat16, 4),
    TIERCEL_GATED_NORM(Float16, 1),
    TIERCEL_GATED_NORM(Float16, 4),
};

}  // namespace

const GatedNormKernel* gated_norm_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
