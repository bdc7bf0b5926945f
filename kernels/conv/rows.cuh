// SPDX-License-Identifier: Apache-2.0
// The sequence that a row belongs to, and what both directions of the convolution compute.
#ifndef KERNELS_CONV_ROWS_CUH_
#define KERNELS_CONV_ROWS_CUH_

#include <cstdint>

#include "kernels/conv/causal_conv1d_kernels.h"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"

namespace tiercel {

struct ConvSequence {
  int index;  // -1: the rows are in no sequence
  int64_t begin;
  int64_t end;  // above the row that was looked for
};

// The starts may hold anything: begin <= row < end holds always, and both are rows.
__device__ __forceinline__ ConvSequence find_sequence(const ConvSequences& sequences, int64_t row) {
  if (sequences.starts == nullptr) {
    const int64_t index = row / sequences.length;
    return {static_cast<int>(index), index * sequences.length, (index + 1) * sequences.length};
  }
  int low = -1, high = sequences.count + 1;
  int64_t begin = 0, end = sequences.rows;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    const int64_t start = sequences.starts[middle * sequences.start_step];
    if (start <= row) {
      low = middle, begin = start;
    } else {
      high = middle, end = start;
    }
  }
  return {low == sequences.count ? -1 : low, begin < 0 ? 0 : begin,
          end > sequences.rows ? sequences.rows : end};
}

// Bytes of kWords words at a time.
template <int kWords>
__device__ __forceinline__ void clear(uint32_t (&words)[kWords]) {
#pragma unroll
  for (uint32_t& word : words) word = 0;
}

// The filters of neighbouring channels: taps[j] is multiplied by the input j rows before.
template <typename Format, int kChannels>
struct ConvFilter {
  float taps[kConvWidth][kChannels];
  float bias[kChannels];

  // Four taps of all channels lie on 16 bytes, as do the channels' biases, if `vectors` is true.
  __device__ __forceinline__ void load(const char* weight, const char* given_bias, int column,
                                       int width, bool vectors) {
    weight += static_cast<int64_t>(column) * width * Format::kBytes;
    if (vectors && width == kConvWidth) {
      uint32_t words[kChannels * Format::kBytes];
#pragma unroll
      for (int i = 0; i < kChannels * Format::kBytes; i += 4) {
        uint32_t vector[4];
        load_vector(vector, weight + i * 4);
#pragma unroll
        for (int w = 0; w < 4; ++w) words[i + w] = vector[w];
      }
      float values[kChannels * kConvWidth];
      unpack<Format>(words, values);
#pragma unroll
      for (int i = 0; i < kChannels * kConvWidth; ++i) {
        taps[kConvWidth - 1 - i % kConvWidth][i / kConvWidth] = values[i];
      }
    } else {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
#pragma unroll
        for (int j = 0; j < kConvWidth; ++j) {
          const int place = c * width + width - 1 - j;
          taps[j][c] = j < width ? load_element<Format>(weight + place * Format::kBytes) : 0.0f;
        }
      }
    }
#pragma unroll
    for (float& value : bias) value = 0.0f;
    if (given_bias == nullptr) return;
    given_bias += column * Format::kBytes;
    if (vectors) {
      uint32_t words[kChannels * Format::kBytes / 4];
      load_vector(words, given_bias);
      unpack<Format>(words, bias);
      return;
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      bias[c] = load_element<Format>(given_bias + c * Format::kBytes);
    }
  }

  // Taps beyond the width are left out, for what they would see may be NaN.
  template <int kWords>
  __device__ __forceinline__ void apply(const uint32_t (&newest)[kWords],
                                        const uint32_t (&before)[kConvWidth - 1][kWords], int width,
                                        float (&sum)[kChannels]) const {
    float values[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) sum[c] = bias[c];
#pragma unroll
    for (int j = kConvWidth - 1; j > 0; --j) {
      if (j >= width) continue;
      unpack<Format>(before[j - 1], values);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sum[c] = fmaf(taps[j][c], values[c], sum[c]);
    }
    unpack<Format>(newest, values);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) sum[c] = fmaf(taps[0][c], values[c], sum[c]);
  }
};

// before[j] is the input j + 1 rows before the next one.
template <int kWords>
__device__ __forceinline__ void shift_window(uint32_t (&before)[kConvWidth - 1][kWords],
                                             const uint32_t (&newest)[kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
#pragma unroll
    for (int j = kConvWidth - 2; j > 0; --j) before[j][w] = before[j - 1][w];
    before[0][w] = newest[w];
  }
}

__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + exp2_approx(-kLog2E * x));
}

}  // namespace tiercel

#endif  // KERNELS_CONV_ROWS_CUH_
