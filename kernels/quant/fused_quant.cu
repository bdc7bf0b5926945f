// SPDX-License-Identifier: Apache-2.0
// rms_norm_quant, layer_norm_quant and act_and_mul_quant: values that leave the kernel as e4m3 with
// their scales.
//
// Bound by memory, or by latency with few rows: at [8192, 4096] in bfloat16 a norm reads 64 MiB and
// writes 32 MiB, 24 us at 4.2 TB/s. A block has one row, in registers from the load to the store.
// Scales of an RMS norm cost no second reduction: its factor is the same for the whole row and
// positive, so that the largest |x * weight|, found together with the sum of squares, times this
// factor is the largest magnitude, bit for bit. A layer norm subtracts the mean first, so that a
// scale per row takes a second reduction. With a scale per group of 128 the maximum is that of 16
// lanes.
#include <cstdint>
#include <type_traits>

#include "kernels/activation/functions.cuh"
#include "kernels/norm/moments.cuh"
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

struct RmsNorm {};
struct LayerNorm {};

// The larger magnitude in one instruction; a NaN stays one.
__device__ __forceinline__ float larger(float so_far, float value) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(so_far), "f"(fabsf(value)));
  return result;
}

// The block's sum and its largest of magnitudes, whose bits order like unsigned integers. The block
// has whole warps.
__device__ __forceinline__ void reduce_block(float* sum, float* largest, bool wants_largest) {
  __shared__ uint2 scratch[32];
  *sum = lanes_reduce<32>(*sum, Sum());
  uint32_t bits = __float_as_uint(*largest);
  if (wants_largest) bits = warp_max(bits);
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps > 1) {
    if (lane == 0) scratch[threadIdx.x / 32] = make_uint2(__float_as_uint(*sum), bits);
    __syncthreads();
    const uint2 part = lane < warps ? scratch[lane] : make_uint2(0, 0);
    *sum = lanes_reduce<32>(__uint_as_float(part.x), Sum());
    if (wants_largest) bits = warp_max(part.y);
  }
  *largest = __uint_as_float(bits);
}

// Joins the warps' entries into the row's moments, as SingleBlockReduce::join does for blocks of up
// to 16 warps.
__device__ __forceinline__ RowMoments join_block(float4 entry, float inverse_columns) {
  __shared__ float4 scratch[32];
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) scratch[threadIdx.x / 32] = entry;
  __syncthreads();
  const float4 first = scratch[0];
  const float4 part = lane < warps ? scratch[lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float about = first.y + first.w;
  const float distance = Moments::distance(part, about), product = part.z * distance;
  const Moments all = {about, lanes_reduce<32>(product, Sum()),
                       lanes_reduce<32>(fmaf(product, distance, part.x), Sum())};
  return all.of_row(inverse_columns);
}

// Eight values of a norm's weight or bias: of `words`, or float32 in memory.
template <typename Format>
__device__ __forceinline__ void read_parameter(float (&values)[kVector], const uint32_t (&words)[4],
                                               const char* wide, int index, bool valid) {
  if (wide == nullptr) return unpack<Format>(words, values);
  uint32_t loaded[kVector] = {};
  if (valid) {
    load_vector(reinterpret_cast<uint32_t (&)[4]>(loaded[0]), wide + index * 32);
    load_vector(reinterpret_cast<uint32_t (&)[4]>(loaded[4]), wide + index * 32 + 16);
  }
  unpack<Float32>(loaded, values);
}

struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return larger(a, b); }
};

// A block per row. `Producer` is RmsNorm, LayerNorm, or the function of a gated activation.
template <typename Producer, typename Format, int kVectors>
__global__ void __launch_bounds__(kFusedQuantMostThreads)
    fused_quant(const __grid_constant__ FusedQuantArgs args) {
  constexpr bool kRms = std::is_same_v<Producer, RmsNorm>;
  constexpr bool kLayer = std::is_same_v<Producer, LayerNorm>;
  constexpr bool kNorm = kRms || kLayer;
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
  uint32_t weights[kNorm ? kVectors : 1][4] = {}, biases[kLayer ? kVectors : 1][4] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * blockDim.x + threadIdx.x;
    if (index >= args.vectors) continue;
    load_vector(words[v], x + index * 16);
    if (!kNorm) load_vector(others[v], factors + index * 16);
    if (residual != nullptr) load_vector(others[v], residual + index * 16);
    // Before a store, behind which no load may move; float32 would take too many registers.
    if (kNorm && args.weight != nullptr && !args.wide_weight) {
      load_vector(weights[v], args.weight + index * 16);
    }
    if (kLayer && args.bias != nullptr && !args.wide_bias) {
      load_vector(biases[v], args.bias + index * 16);
    }
  }
  const auto add_residual = [&](int v, int index) {
    if constexpr (kNorm) {
      if (residual == nullptr) return;
#pragma unroll
      for (int w = 0; w < 4; ++w) words[v][w] = Format::add_pairs(words[v][w], others[v][w]);
      if (index < args.vectors) store_vector(residual + index * 16, words[v]);
    }
  };
  float about = 0.0f, rstd = 1.0f, shift = 0.0f;  // of a layer norm, as Normaliser has them
  if constexpr (kLayer) {
    Distances<> distances;
    int elements = 0;  // this thread's
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * blockDim.x + threadIdx.x;
      if (index >= args.vectors) continue;
      add_residual(v, index);
      float each[kVector];
      unpack<Format>(words[v], each);
      if (v == 0) distances.measure_from(each[0]);
      distances.add(each);
      elements += kVector;
    }
    const Moments moments = distances.of_warp(Count(elements));
    const RowMoments of_row =
        join_block(moments.entry(Count::of_warp(elements)), args.inverse_columns);
    rstd = rsqrtf(fmaf(of_row.square, args.inverse_columns, args.eps));
    about = of_row.about;
    shift = -of_row.apart * rstd;
  }
  float values[kVectors][kVector];
  float sum = 0.0f;
  float largest[kVectors];  // of each vector
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * blockDim.x + threadIdx.x;
    largest[v] = 0.0f;
    if constexpr (kRms) {
      add_residual(v, index);
      unpack<Format>(words[v], values[v]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum = fmaf(values[v][i], values[v][i], sum);
      if (args.weight != nullptr) {
        float each[kVector];
        const char* const wide = args.wide_weight ? args.weight : nullptr;
        read_parameter<Format>(each, weights[v], wide, index, index < args.vectors);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[v][i] *= each[i];
      }
    } else if constexpr (kLayer) {
      const bool valid = index < args.vectors;
      float each[kVector], more[kVector];
      unpack<Format>(words[v], values[v]);
      read_parameter<Format>(each, weights[v], args.wide_weight ? args.weight : nullptr, index,
                             valid);
      read_parameter<Format>(more, biases[v], args.wide_bias ? args.bias : nullptr, index, valid);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float normal = fmaf(values[v][i] - about, rstd, shift);
        const float value = fmaf(normal, args.weight == nullptr ? 1.0f : each[i], more[i]);
        values[v][i] = valid ? value : 0.0f;
      }
    } else {
      float gates[kVector], ups[kVector];
      unpack<Format>(words[v], gates);
      unpack<Format>(others[v], ups);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[v][i] = Producer::value(gates[i]) * ups[i];
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest[v] = larger(largest[v], values[v][i]);
  }

  float of_row = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    of_row = larger(of_row, largest[v]);
    if (args.granularity == Fp8Granularity::kGroup) {
      largest[v] = lanes_reduce<kGroupLanes>(largest[v], Larger());
    }
  }
  const bool by_row = args.granularity == Fp8Granularity::kRow;
  if (kRms || by_row) reduce_block(&sum, &of_row, by_row);
  float factor = 1.0f;
  if constexpr (kRms) factor = rsqrtf(fmaf(sum, args.inverse_columns, args.eps));
  float scale = 1.0f;
  if (by_row) {
    scale = e4m3_scale(__float_as_uint(fabsf(of_row * factor)));
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
    if (kNorm && args.normed != nullptr) {
      float exact[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) exact[i] = values[v][i] * factor;
      uint32_t rounded[4];
      pack<Format>(exact, rounded);
      store_vector(args.normed + at * 2, rounded);
    }
    if (args.granularity == Fp8Granularity::kGroup) {
      scale = e4m3_scale(__float_as_uint(fabsf(largest[v] * factor)));
      inverse = __frcp_rn(scale);
      if (index % kGroupLanes == 0) args.scale[row * args.groups + index / kGroupLanes] = scale;
    }
    // One product in place of two, unless it overflows: in a row of zeros, say.
    const float total = factor * inverse;
    const bool fits = total < __int_as_float(0x7f800000);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[v][i] = fits ? values[v][i] * total : values[v][i] * factor * inverse;
    }
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
    TIERCEL_FUSED_SHORT(RmsNorm, RmsNorm),         TIERCEL_FUSED_SHORT(LayerNorm, LayerNorm),
    TIERCEL_FUSED_LONG(Silu, Silu<false>),         TIERCEL_FUSED_LONG(Gelu, Gelu<false>),
    TIERCEL_FUSED_LONG(GeluTanh, GeluTanh<false>), TIERCEL_FUSED_LONG(Relu, Relu<false>)};

}  // namespace

const FusedQuantKernel* fused_quant_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
