// SPDX-License-Identifier: Apache-2.0
// The gradients of causal_conv1d.
//
// Bound by memory: x and grad are read and dx is written once. A thread has four channels and many
// consecutive rows. It recomputes the sums before the activation, keeps the gradients of the last
// rows of x in registers until they are complete, and accumulates the filter's gradients of its
// rows there. These go to a buffer of partial sums, which is then summed in a fixed order.
#include <cstdint>

#include "kernels/conv/causal_conv1d_kernels.h"
#include "kernels/conv/rows.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

constexpr int kChannels = kConvChannels;

// The gradient of the sum before the activation.
__device__ __forceinline__ void through_silu(const float (&sum)[kChannels],
                                             float (&grad)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const float s = sigmoid(sum[c]);
    grad[c] *= s * fmaf(sum[c], 1.0f - s, 1.0f);
  }
}

template <typename Format>
__global__ void __launch_bounds__(kConvBackwardThreads, 4)
    causal_conv1d_backward(const __grid_constant__ ConvBackwardArgs args) {
  constexpr int kWords = kChannels * Format::kBytes / 4;
  constexpr int kAhead = 8 / Format::kBytes;  // rows that a thread has in flight
  const int vectors = args.columns / kChannels;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kConvBackwardThreads + threadIdx.x;
  const int64_t part = place / vectors;
  const int column = static_cast<int>(place - part * vectors) * kChannels;
  const int64_t offset = static_cast<int64_t>(column) * Format::kBytes;
  int64_t row = part * args.rows_per_thread;
  const int64_t last = min(row + args.rows_per_thread, args.sequences.rows);
  grid_dependency_wait();
  grid_dependency_launch();
  if (part >= args.parts) return;
  ConvFilter<Format, kChannels> filter;
  filter.load(args.weight, args.bias, column, args.width, args.vectors);
  float of_taps[kConvWidth][kChannels] = {};
  float of_bias[kChannels] = {};
  while (row < last) {
    const ConvSequence sequence = find_sequence(args.sequences, row);
    const int64_t first = row, stop = min(last, sequence.end);
    row = stop;
    if (sequence.index < 0) {
      uint32_t none[kWords];
      clear(none);
      for (int64_t r = first; r < stop; ++r) {
        store_vector(args.dx + r * args.dx_stride + offset, none);
      }
      continue;
    }
    uint32_t before[kConvWidth - 1][kWords];
#pragma unroll
    for (int j = 1; j < kConvWidth; ++j) {
      clear(before[j - 1]);
      if (j < args.width && first - j >= sequence.begin) {
        load_vector(before[j - 1], args.x + (first - j) * args.x_stride + offset);
      }
    }
    // dx[j] belongs to the j-th row before; it is whole once three more rows are done.
    float dx[kConvWidth][kChannels] = {};
    const int64_t end = stop + kConvWidth - 1;
    for (int64_t at = first; at < end; at += kAhead) {
      uint32_t x[kAhead][kWords], given[kAhead][kWords];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        clear(x[i]);
        clear(given[i]);
        if (at + i < min(end, sequence.end)) {
          load_vector(x[i], args.x + (at + i) * args.x_stride + offset);
          load_vector(given[i], args.grad + (at + i) * args.grad_stride + offset);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t r = at + i;
        if (r >= end) break;
        float grad[kChannels];
        unpack<Format>(given[i], grad);
        if (args.silu && r < sequence.end) {
          float sum[kChannels];
          filter.apply(x[i], before, args.width, sum);
          through_silu(sum, grad);
        }
#pragma unroll
        for (int j = 0; j < kConvWidth; ++j) {
          if (j >= args.width) continue;
#pragma unroll
          for (int c = 0; c < kChannels; ++c) dx[j][c] = fmaf(filter.taps[j][c], grad[c], dx[j][c]);
        }
        if (r < stop) {
          float values[kChannels];
#pragma unroll
          for (int j = 0; j < kConvWidth; ++j) {
            if (j >= args.width) continue;
            unpack<Format>(j == 0 ? x[i] : before[j - 1], values);
#pragma unroll
            for (int c = 0; c < kChannels; ++c) {
              of_taps[j][c] = fmaf(grad[c], values[c], of_taps[j][c]);
            }
          }
#pragma unroll
          for (int c = 0; c < kChannels; ++c) of_bias[c] += grad[c];
        }
        const int64_t whole = r - (kConvWidth - 1);
        if (whole >= first) {
          uint32_t words[kWords];
          pack<Format>(dx[kConvWidth - 1], words);
          store_vector(args.dx + whole * args.dx_stride + offset, words);
        }
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
#pragma unroll
          for (int j = kConvWidth - 1; j > 0; --j) dx[j][c] = dx[j - 1][c];
          dx[0][c] = 0.0f;
        }
        shift_window(before, x[i]);
      }
    }
  }
  float* sums = args.sums + part * (args.width + 1) * args.columns + column;
#pragma unroll
  for (int j = 0; j < kConvWidth; ++j) {
    if (j >= args.width) continue;
    float* to = sums + static_cast<int64_t>(args.width - 1 - j) * args.columns;
    *reinterpret_cast<float4*>(to) =
        make_float4(of_taps[j][0], of_taps[j][1], of_taps[j][2], of_taps[j][3]);
  }
  *reinterpret_cast<float4*>(sums + static_cast<int64_t>(args.width) * args.columns) =
      make_float4(of_bias[0], of_bias[1], of_bias[2], of_bias[3]);
}

#define TIERCEL_CONV(type)                                     \
  {DType::k##type, Kernel("causal_conv1d_backward<" #type ">", \
                          reinterpret_cast<const void*>(causal_conv1d_backward<type>))}

const ConvKernel kKernels[] = {TIERCEL_CONV(Float32), TIERCEL_CONV(BFloat16),
                               TIERCEL_CONV(Float16)};

}  // namespace

const ConvKernel* causal_conv1d_backward_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
