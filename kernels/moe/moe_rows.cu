// SPDX-License-Identifier: Apache-2.0
// Rows of tokens and rows of their experts: each kernel moves each byte once, 16 at a time.
//
// With M = T * k rows, in elements: moe_spread reads T * H and writes M * H; moe_collect reads M *
// H and writes T * H; moe_gate reads 2 * M * I and writes M * I, its gradient reads 3 * M * I and
// writes as many. A row has kilobytes, so their order does not matter to memory. A warp has an
// element in moe_gate: its gradient of the weight is a sum over the row, in a fixed order.
#include <cstdint>

#include "kernels/activation/functions.cuh"
#include "kernels/moe/moe_rows_kernels.h"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kVector = 16;  // bytes

// A thread per element and per expert.
__global__ void __launch_bounds__(kMoeRowThreads)
    moe_places(const __grid_constant__ MoePlacesArgs args) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  grid_dependency_wait();
  grid_dependency_launch();
  if (thread < args.elements) {
    const uint32_t element = args.sorted_ids[thread];
    const bool real = element < args.elements && args.expert_ids[thread] < args.experts;
    if (real) args.places[element] = thread;
  }
  if (thread > args.experts) return;
  uint32_t low = 0, high = args.elements;  // the first row of this expert or a later one
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (args.expert_ids[middle] < thread) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  args.offsets[thread] = low;
}

// A thread per vector of a token. Block: x columns, y tokens; grid: x tokens, y columns.
__global__ void __launch_bounds__(kMoeRowThreads)
    moe_spread(const __grid_constant__ MoeSpreadArgs args) {
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  grid_dependency_wait();
  grid_dependency_launch();
  if (token >= args.tokens || column >= args.columns) return;
  uint32_t words[4];
  load_vector(words, args.x + token * args.row_stride + static_cast<int64_t>(column) * kVector);
#pragma unroll 4
  for (int j = 0; j < args.k; ++j) {
    const uint32_t place = args.places[token * args.k + j];
    if (place >= args.elements) continue;
    store_vector(args.out + (static_cast<int64_t>(place) * args.columns + column) * kVector, words);
  }
}

// A thread per vector of a token, too; the vectors of kUnrolled experts are in flight at once.
template <typename Format>
__global__ void __launch_bounds__(kMoeRowThreads, 4)
    moe_collect(const __grid_constant__ MoeCollectArgs args) {
  constexpr int kUnrolled = 8, kValues = 8;
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  grid_dependency_wait();
  grid_dependency_launch();
  if (token >= args.tokens || column >= args.columns) return;
  float sum[kValues] = {};
  for (int first = 0; first < args.k; first += kUnrolled) {
    uint32_t words[kUnrolled][4] = {};
    float weight[kUnrolled] = {};
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      if (first + i >= args.k) continue;
      const int64_t element = token * args.k + first + i;
      const uint32_t place = args.places[element];
      if (place >= args.elements) continue;
      weight[i] = args.weights != nullptr ? args.weights[element] : 1.0f;
      load_vector(words[i],
                  args.x + (static_cast<int64_t>(place) * args.columns + column) * kVector);
    }
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      float values[kValues];
      unpack<Format>(words[i], values);
#pragma unroll
      for (int j = 0; j < kValues; ++j) sum[j] = fmaf(values[j], weight[i], sum[j]);
    }
  }
  uint32_t words[4];
  pack<Format>(sum, words);
  store_vector(args.out + (token * args.columns + column) * kVector, words);
}

// act(a, b) = function(a) * (b + kShift), by the activations' names in MoeActivation.
struct SiluGate : Silu<false> {
  static constexpr float kShift = 0.0f;
};
struct GeluGate : Gelu<false> {
  static constexpr float kShift = 0.0f;
};
struct ReluGate : Relu<false> {
  static constexpr float kShift = 0.0f;
};
struct GeluResidualGate : Gelu<false> {
  static constexpr float kShift = 1.0f;
};

template <typename Gate, typename Format, bool kBackward>
__global__ void __launch_bounds__(kMoeGateWarps * 32, 4)
    moe_gate(const __grid_constant__ MoeGateArgs args) {
  const uint32_t element = blockIdx.x * kMoeGateWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  grid_dependency_wait();
  grid_dependency_launch();
  if (element >= args.elements) return;
  const uint32_t place = args.places[element];
  if (place >= args.elements) {
    if (kBackward && lane == 0) args.grad_weights[element] = 0.0f;
    return;
  }
  const int64_t row = static_cast<int64_t>(place) * args.columns * kVector;
  const char* const pre = args.pre + 2 * row;
  const int64_t half = static_cast<int64_t>(args.columns) * kVector;
  const float weight = kBackward ? args.weights[element] : 1.0f;
  float dot = 0.0f;
#pragma unroll 1
  for (int column = lane; column < args.columns; column += 32) {
    const int64_t at = static_cast<int64_t>(column) * kVector;
    char* const inner = args.inner + row + at;
    uint32_t a_words[4], b_words[4], words[4];
    load_stream(a_words, pre + at);
    load_stream(b_words, pre + half + at);
    if (kBackward) load_stream(words, inner);
#pragma unroll
    for (int w = 0; w < 4; ++w) {  // two values at a time take few registers
      float a[2], b[2], grad[2];
      Format::unpack(a_words[w], a);
      Format::unpack(b_words[w], b);
      if (kBackward) Format::unpack(words[w], grad);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float factor = b[i] + Gate::kShift;
        if constexpr (kBackward) {
          float value;
          const float slope = Gate::slope(a[i], &value);
          const float product = value * factor, weighted = grad[i] * weight;
          dot = fmaf(grad[i], product, dot);
          grad[i] = product * weight;
          a[i] = weighted * factor * slope;
          b[i] = weighted * value;
        } else {
          a[i] = Gate::value(a[i]) * factor;
        }
      }
      a_words[w] = Format::pack(a);
      if (kBackward) {
        b_words[w] = Format::pack(b);
        words[w] = Format::pack(grad);
      }
    }
    if constexpr (kBackward) {
      char* const grad_pre = args.grad_pre + 2 * row + at;
      store_vector(grad_pre, a_words);
      store_vector(grad_pre + half, b_words);
      store_vector(inner, words);
    } else {
      store_vector(inner, a_words);
    }
  }
  if constexpr (kBackward) {
    dot = lanes_reduce<32>(dot, Sum());
    if (lane == 0) args.grad_weights[element] = dot;
  }
}

#define TIERCEL_COLLECT(format) \
  {DType::k##format,            \
   Kernel("moe_collect<" #format ">", reinterpret_cast<const void*>(moe_collect<format>))}

#define TIERCEL_GATE(activation, format, backward)                          \
  {MoeActivation::k##activation, DType::k##format, backward,                \
   Kernel("moe_gate<" #activation ", " #format ", backward=" #backward ">", \
          reinterpret_cast<const void*>(moe_gate<activation##Gate, format, backward>))}
#define TIERCEL_GATES(activation)                                                      \
  TIERCEL_GATE(activation, BFloat16, false), TIERCEL_GATE(activation, BFloat16, true), \
      TIERCEL_GATE(activation, Float16, false), TIERCEL_GATE(activation, Float16, true)

const MoeCollectKernel kCollect[] = {TIERCEL_COLLECT(BFloat16), TIERCEL_COLLECT(Float16)};
const MoeGateKernel kGates[] = {TIERCEL_GATES(Silu), TIERCEL_GATES(Gelu), TIERCEL_GATES(Relu),
                                TIERCEL_GATES(GeluResidual)};

}  // namespace

const Kernel kMoePlaces("moe_places", reinterpret_cast<const void*>(moe_places));
const Kernel kMoeSpread("moe_spread", reinterpret_cast<const void*>(moe_spread));

const MoeCollectKernel* moe_collect_kernels(int* count) {
  *count = sizeof(kCollect) / sizeof(kCollect[0]);
  return kCollect;
}

const MoeGateKernel* moe_gate_kernels(int* count) {
  *count = sizeof(kGates) / sizeof(kGates[0]);
  return kGates;
}

}  // namespace tiercel
