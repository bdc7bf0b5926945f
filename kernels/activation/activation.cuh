// SPDX-License-Identifier: Apache-2.0
// Activations and gated activations, forward and backward: out = f(x), out = f(gate) * up.
//
// Bound by memory: each element is read once and written once (gated: two reads and one write
// forward, three reads and two writes backward, three with the forward's result again), so the
// lower bound is bytes / copy bandwidth, or the launch time of small problems. Rows are divided
// into 16-byte vectors, numbered across all rows. Each thread takes one vector; the plain forms,
// which read least, take two if there are many, so that enough bytes are in flight. No shared
// memory, no barrier. Contiguous matrices are passed as one long row, so a vector's row costs one
// multiplication. Rows that are not aligned for vectors, and the partial vector at a row's end, are
// processed element by element. Launched with programmatic dependent launch.
#ifndef KERNELS_ACTIVATION_ACTIVATION_CUH_
#define KERNELS_ACTIVATION_ACTIVATION_CUH_

#include <cstdint>

#include "kernels/activation/activation_kernels.h"
#include "kernels/activation/functions.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {

// The position of a vector.
template <int kPerVector>
struct VectorPlace {
  int64_t row;
  int64_t column;
  bool there;  // false behind the last vector
  bool whole;  // read and written by vector accesses

  __device__ __forceinline__ VectorPlace(const ActivationArgs& args, uint32_t vector) {
    // The estimate of the quotient is at most one too small: its error is below 1 + vector / 2^32.
    uint32_t quotient = __umulhi(vector, args.row_vectors_inv);
    uint32_t rest = vector - quotient * args.row_vectors;
    if (rest >= args.row_vectors) {
      ++quotient;
      rest -= args.row_vectors;
    }
    row = quotient;
    column = static_cast<int64_t>(rest) * kPerVector;
    there = vector < args.vectors;
    whole = there && args.aligned && column + kPerVector <= args.columns;
  }

  template <typename Format>
  __device__ __forceinline__ char* in(const ActivationRows& rows, int element = 0) const {
    return rows.data + row * rows.row_stride + (column + element) * Format::kBytes;
  }

  // The number of elements in a vector that is not whole.
  __device__ __forceinline__ int count(const ActivationArgs& args) const {
    if (!there) return 0;
    const int64_t rest = args.columns - column;
    return rest < kPerVector ? static_cast<int>(rest) : kPerVector;
  }
};

// The work of one thread: `kVectors` vectors, one block width apart.
template <typename Function, typename Format, typename OutFormat, bool kGated, int kVectors>
__device__ __forceinline__ void activate(const ActivationArgs& args) {
  constexpr int kPerVector = kActivationVectorBytes / Format::kBytes;
  constexpr int kOutWords = kPerVector * OutFormat::kBytes / 4;
  constexpr bool kScaled = OutFormat::kBytes == 1;
  const uint32_t first = blockIdx.x * blockDim.x * kVectors + threadIdx.x;
  const auto place_of = [&](uint32_t v) {
    return VectorPlace<kPerVector>(args, first + v * blockDim.x);
  };
  grid_dependency_wait();

  uint32_t x[kVectors][4], up[kVectors][4];
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    const VectorPlace<kPerVector> place = place_of(v);
    if (!place.whole) continue;
    load_stream(x[v], place.template in<Format>(args.x));
    if (kGated) load_stream(up[v], place.template in<Format>(args.up));
  }
  const float inverse = kScaled ? 1.0f / *args.scale : 1.0f;
  grid_dependency_launch();
  const auto compute = [&](float x, float up) {
    float value = Function::value(x);
    if (kGated) value *= up;
    return kScaled ? value * inverse : value;
  };
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    const VectorPlace<kPerVector> place = place_of(v);
    if (place.whole) {
      float values[kPerVector], factors[kPerVector];
      unpack<Format>(x[v], values);
      if (kGated) unpack<Format>(up[v], factors);
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) values[i] = compute(values[i], factors[i]);
      uint32_t out[kOutWords];
      pack<OutFormat>(values, out);
      store_vector(place.template in<OutFormat>(args.out), out);
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < place.count(args); ++i) {
      const float value = load_element<Format>(place.template in<Format>(args.x, i));
      const float factor =
          kGated ? load_element<Format>(place.template in<Format>(args.up, i)) : 1.0f;
      store_element<OutFormat>(place.template in<OutFormat>(args.out, i), compute(value, factor));
    }
  }
}

template <typename Function, typename Format, typename OutFormat, bool kGated>
__global__ void __launch_bounds__(kActivationForwardThreads, 2048 / kActivationForwardThreads)
    activation_forward(const __grid_constant__ ActivationArgs args) {
  constexpr int kVectors = activation_forward_vectors(kGated);
  if (kVectors > 1 && args.vectors_per_thread == 1) {  // few vectors: shortest latency
    activate<Function, Format, OutFormat, kGated, 1>(args);
  } else {
    activate<Function, Format, OutFormat, kGated, kVectors>(args);
  }
}

template <typename Function, typename Format, bool kGated>
__global__ void __launch_bounds__(kActivationBackwardThreads, 2048 / kActivationBackwardThreads)
    activation_backward(const __grid_constant__ ActivationArgs args) {
  constexpr int kPerVector = kActivationVectorBytes / Format::kBytes;
  const VectorPlace<kPerVector> place(args, blockIdx.x * blockDim.x + threadIdx.x);
  grid_dependency_wait();

  uint32_t grad[4], x[4], up[4];
  if (place.whole) {
    load_stream(grad, place.template in<Format>(args.grad));
    load_stream(x, place.template in<Format>(args.x));
    if (kGated) load_stream(up, place.template in<Format>(args.up));
  }
  grid_dependency_launch();
  // The result has a pass of its own: 32 registers just suffice for the gradients alone.
  const bool again = kGated && args.result.data != nullptr;
  if (again && place.whole) {
    float values[kPerVector], factors[kPerVector];
    unpack<Format>(x, values);
    unpack<Format>(up, factors);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) values[i] = Function::value(values[i]) * factors[i];
    uint32_t result[4];
    pack<Format>(values, result);
    store_vector(place.template in<Format>(args.result), result);
  }
  // Replaces x and up by their gradients.
  const auto compute = [&](float grad, float* x, float* up) {
    float value;
    const float slope = Function::slope(*x, &value);
    *x = kGated ? grad * *up * slope : grad * slope;
    if (kGated) *up = grad * value;
  };
  if (place.whole) {
    float grads[kPerVector], values[kPerVector], factors[kPerVector];
    unpack<Format>(grad, grads);
    unpack<Format>(x, values);
    if (kGated) unpack<Format>(up, factors);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) compute(grads[i], &values[i], &factors[i]);
    pack<Format>(values, x);
    store_vector(place.template in<Format>(args.out), x);
    if (kGated) {
      pack<Format>(factors, up);
      store_vector(place.template in<Format>(args.up_grad), up);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < place.count(args); ++i) {
    const float grad_i = load_element<Format>(place.template in<Format>(args.grad, i));
    float value = load_element<Format>(place.template in<Format>(args.x, i));
    float factor = kGated ? load_element<Format>(place.template in<Format>(args.up, i)) : 1.0f;
    if (again) {
      const float result = Function::value(value) * factor;
      store_element<Format>(place.template in<Format>(args.result, i), result);
    }
    compute(grad_i, &value, &factor);
    store_element<Format>(place.template in<Format>(args.out, i), value);
    if (kGated) store_element<Format>(place.template in<Format>(args.up_grad, i), factor);
  }
}

}  // namespace tiercel

#endif  // KERNELS_ACTIVATION_ACTIVATION_CUH_
