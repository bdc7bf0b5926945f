// SPDX-License-Identifier: Apache-2.0
// rms_norm_quant and act_and_mul_quant: values that leave the kernel as e4m3 with their scales.
//
// Bound by memory, or by latency with few rows: at [8192, 4096] in bfloat16 a norm reads 64 MiB and
// writes 32 MiB, 24 us at 4.2 TB/s. A block has one row, in registers from the load to the store.
// Scales cost no second reduction: the norm's factor is the same for the whole row and positive, so
// that the largest |x * weight|, found together with the sum of squares, times this factor is the
// largest magnitude, bit for bit. With a scale per group of 128 the maximum is that of 16 lanes.
#include <cstdint>
#include <type_traits>

#include "kernels/activation/functions.cuh"
#include "kernels/quant/eight.cuh"
#include "kernels/quant/fused_quant_kernels.h"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kVector = 8;       // elements, 16 bytes
constexpr int kGroupLanes = 16;  // of a group of 128

struct Norm {};

// The sum and the maximum of the block's values, of whole warps.
__device__ __forceinline__ void reduce_block(float* sum, uint32_t* largest, bool wants_largest) {
  __shared__ uint2 scratch[32];
  *sum = lanes_reduce<32>(*sum, Sum());
  if (wants_largest) *largest = warp_max(*largest);
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps == 1) return;
  if (lane == 0) scratch[threadIdx.x / 32] = make_uint2(__float_as_uint(*sum), *largest);
  __syncthreads();
  const uint2 part = lane < warps ? scratch[lane] : make_uint2(0, 0);
  *sum = lanes_reduce<32>(__uint_as_float(part.x), Sum());
  if (wants_largest) *largest = warp_max(part.y);
}

__device__ __forceinline__ uint32_t magnitude(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

// A block per row. `Producer` is Norm, or the function of a gated activation.
template <typename Producer, typename Format, int kVectors>
__global__ void __launch_bounds__(kFusedQuantMostThreads)
    fused_quant(const __grid_constant__ FusedQuantArgs args) {
  constexpr bool kNorm = std::is_same_v<Producer, Norm>;
  const int64_t row = blockIdx.x;
  const char* const x = args.x + row * args.row_bytes;
  const char* const factors = kNorm ? nullptr : args.factors + row * args.row_bytes;
  char* const residual =
      kNorm && args.residual != nullptr ? args.residual + row * args.residual_row_bytes : nullptr;
  if (is_prefetching(args.prefetch_blocks)) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * blockDim.x + threadIdx.x;
      if (index >= args.vectors) continue;
      prefetch_l2(x + index * 16);
      if (!kNorm) prefetch_l2(factors + index * 16);
      if (residual != nullptr) prefetch_l2(residual + index * 16);
    }
  }
  grid_dependency_wait();
  grid_dependency_launch();

  uint32_t words[kVectors][4] = {}, others[kVectors][4] = {};
  uint32_t weights[kNorm ? kVectors : 1][8] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * blockDim.x + threadIdx.x;
    if (index >= args.vectors) continue;
    load_vector(words[v], x + index * 16);
    if (!kNorm) load_vector(others[v], factors + index * 16);
    if (residual != nullptr) load_vector(others[v], residual + index * 16);
    if (kNorm && args.weight != nullptr) {  // before a store, behind which no load may move
      const char* const weight = args.weight + index * (args.wide_weight ? 32 : 16);
      load_vector(reinterpret_cast<uint32_t (&)[4]>(weights[v][0]), weight);
      if (args.wide_weight) {
        load_vector(reinterpret_cast<uint32_t (&)[4]>(weights[v][4]), weight + 16);
      }
    }
  }
  float values[kVectors][kVector];
  float sum = 0.0f;
  uint32_t largest[kVectors];  // of each vector
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * blockDim.x + threadIdx.x;
    largest[v] = 0;
    if constexpr (kNorm) {
      if (residual != nullptr) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[v][w] = Format::add_pairs(words[v][w], others[v][w]);
        if (index < args.vectors) store_vector(residual + index * 16, words[v]);
      }
      unpack<Format>(words[v], values[v]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum = fmaf(values[v][i], values[v][i], sum);
      if (args.weight != nullptr) {
        float each[kVector];
        if (args.wide_weight) {
          unpack<Float32>(weights[v], each);
        } else {
          unpack<Format>(reinterpret_cast<const uint32_t (&)[4]>(weights[v]), each);
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[v][i] *= each[i];
      }
    } else {
      float gates[kVector], ups[kVector];
      unpack<Format>(words[v], gates);
      unpack<Format>(others[v], ups);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[v][i] = Producer::value(gates[i]) * ups[i];
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest[v] = max(largest[v], magnitude(values[v][i]));
  }

  uint32_t of_row = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    of_row = max(of_row, largest[v]);
    if (args.granularity == Fp8Granularity::kGroup) {
      largest[v] = lanes_reduce<kGroupLanes>(largest[v], Max());
    }
  }
  const bool by_row = args.granularity == Fp8Granularity::kRow;
  if (kNorm || by_row) reduce_block(&sum, &of_row, by_row);
  float factor = 1.0f;
  if constexpr (kNorm) factor = rsqrtf(fmaf(sum, args.inverse_columns, args.eps));
  float scale = 1.0f;
  if (by_row) {
    scale = e4m3_scale(magnitude(__uint_as_float(of_row) * factor));
    if (threadIdx.x == 0) args.scale[row] = scale;
  } else if (args.granularity == Fp8Granularity::kTensor) {
    scale = *args.scale;
  }
  float inverse = __frcp_rn(scale);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * blockDim.x + threadIdx.x;
    if (index >= args.vectors) continue;
    const int64_t at = row * args.columns + int64_t{index} * kVector;
    if constexpr (kNorm) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[v][i] *= factor;
      if (args.normed != nullptr) {
        uint32_t rounded[4];
        pack<Format>(values[v], rounded);
        store_vector(args.normed + at * 2, rounded);
      }
    }
    if (args.granularity == Fp8Granularity::kGroup) {
      scale = e4m3_scale(magnitude(__uint_as_float(largest[v]) * factor));
      inverse = __frcp_rn(scale);
      if (index % kGroupLanes == 0) args.scale[row * args.groups + index / kGroupLanes] = scale;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[v][i] *= inverse;
    uint32_t codes[2];
    pack<Float8E4M3>(values[v], codes);
    store_vector(args.q + at, codes);
  }
}

#define TIERCEL_FUSED(producer, function, dtype, vectors)                 \
  {FusedQuantProducer::k##producer, DType::k##dtype, vectors,             \
   Kernel("fused_quant<" #producer ", " #dtype ", vectors=" #vectors ">", \
          reinterpret_cast<const void*>(fused_quant<function, dtype, vectors>))}
#define TIERCEL_FUSED_DTYPES(producer, function, vectors) \
  TIERCEL_FUSED(producer, function, BFloat16, vectors),   \
      TIERCEL_FUSED(producer, function, Float16, vectors)
#define TIERCEL_FUSED_SHORT(producer, function) \
  TIERCEL_FUSED_DTYPES(producer, function, 1), TIERCEL_FUSED_DTYPES(producer, function, 2)
#define TIERCEL_FUSED_LONG(producer, function) \
  TIERCEL_FUSED_SHORT(producer, function), TIERCEL_FUSED_DTYPES(producer, function, 4)

const FusedQuantKernel kKernels[] = {
    TIERCEL_FUSED_SHORT(Norm, Norm), TIERCEL_FUSED_LONG(Silu, Silu<false>),
    TIERCEL_FUSED_LONG(Gelu, Gelu<false>), TIERCEL_FUSED_LONG(GeluTanh, GeluTanh<false>),
    TIERCEL_FUSED_LONG(Relu, Relu<false>)};

}  // namespace

const FusedQuantKernel* fused_quant_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
