// SPDX-License-Identifier: Apache-2.0
// causal_conv1d and its update: each channel of a sequence convolved with a filter of up to four
// taps, optionally preceded by a state: the rows before the sequence.
//
// Bound by memory: x is read and the result written once. A thread has four channels and some
// consecutive rows, with the filter and the last rows in registers. It copies each of its rows once
// to shared memory, 16 rows ahead, and reads those before its first again, from the L2. The thread
// that has a sequence's first row also has all rows that see the state: it reads the state and
// replaces it, so no block waits.
#include <cstdint>

#include "kernels/conv/causal_conv1d_kernels.h"
#include "kernels/conv/rows.cuh"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"

namespace tiercel {
namespace {

constexpr int kChannels = kConvChannels;

// A thread's inputs of the rows before.
template <int kWords>
using Window = uint32_t[kConvWidth - 1][kWords];

// Copies a thread's channels of a row.
template <int kBytes>
__device__ __forceinline__ void async_copy(uint32_t shared, const void* global) {
  if constexpr (kBytes == 16) {
    async_copy_16(shared, global, true);
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global) : "memory");
  }
}

// The state of a sequence, or none.
__device__ __forceinline__ char* state_of(const ConvArgs& args, const ConvSequence& sequence,
                                          int64_t offset) {
  if (args.states == nullptr) return nullptr;
  const int64_t slot =
      args.state_indices == nullptr ? sequence.index : args.state_indices[sequence.index];
  if (slot < 0 || slot >= args.slots) return nullptr;
  return args.states + slot * args.slot_stride + offset;
}

// The inputs before `row`: those of the sequence, before it those of its state.
template <int kWords>
__device__ __forceinline__ void load_window(const ConvArgs& args, const ConvSequence& sequence,
                                            const char* state, int64_t row, int64_t offset,
                                            int64_t state_stride, Window<kWords>& before) {
#pragma unroll
  for (int j = 1; j < kConvWidth; ++j) {
    clear(before[j - 1]);
    if (j >= args.width) continue;
    const int64_t missing = sequence.begin - (row - j);  // rows before the sequence
    if (missing <= 0) {
      load_vector(before[j - 1], args.x + (row - j) * args.x_stride + offset);
    } else if (state != nullptr) {
      load_vector(before[j - 1], state + (args.width - 1 - missing) * state_stride);
    }
  }
}

// Replaces a state by the sequence's last inputs; `before` is what it was.
template <int kWords>
__device__ __forceinline__ void store_state(const ConvArgs& args, const ConvSequence& sequence,
                                            const Window<kWords>& before, int64_t offset,
                                            char* state, int64_t state_stride) {
  const int64_t length = sequence.end - sequence.begin;
#pragma unroll
  for (int j = 1; j < kConvWidth; ++j) {  // the j-th from the end
    if (j >= args.width) continue;
    uint32_t words[kWords];
    if (j <= length) {
      load_vector(words, args.x + (sequence.end - j) * args.x_stride + offset);
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[w] = 0;
#pragma unroll
        for (int i = 0; i < kConvWidth - 1; ++i) {
          if (i + 1 == j - length) words[w] = before[i][w];
        }
      }
    }
    store_vector(state + (args.width - 1 - j) * state_stride, words);
  }
}

// Moves a bound between threads behind a sequence's first inputs: the thread that has its first row
// has all that see the state, which that thread replaces.
__device__ __forceinline__ int64_t behind_state(const ConvArgs& args, int64_t row) {
  if (args.states == nullptr || row == 0 || row >= args.sequences.rows) return row;
  const ConvSequence sequence = find_sequence(args.sequences, row);
  if (sequence.index < 0 || row == sequence.begin) return row;
  return max(row, min(sequence.begin + args.width - 1, sequence.end));
}

// Rows that a thread takes in turn: the inputs before them, and where their results go. Two rows
// are summed together: their sums do not wait for each other, taps beyond the width and the
// activation are skipped for both at once, and an input is unpacked once.
template <typename Format>
struct Rows {
  static constexpr int kWords = kChannels * Format::kBytes / 4;
  float before[kConvWidth - 1][kChannels];
  char* out;

  __device__ __forceinline__ void begin(const Window<kWords>& given) {
#pragma unroll
    for (int j = 0; j < kConvWidth - 1; ++j) unpack<Format>(given[j], before[j]);
  }

  // The next kRows rows or, without kWhole, `rows` of these.
  template <int kRows, bool kWhole>
  __device__ __forceinline__ void take(const ConvArgs& args,
                                       const ConvFilter<Format, kChannels>& filter,
                                       const uint32_t (&words)[kRows][kWords], int rows) {
#pragma unroll
    for (int i = 0; i < kRows; i += 2) {
      if (!kWhole && i >= rows) break;
      float now[2][kChannels], sum[2][kChannels];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unpack<Format>(words[i + r], now[r]);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) sum[r][c] = filter.bias[c];
      }
#pragma unroll
      for (int j = kConvWidth - 1; j >= 0; --j) {
        if (j >= 2 && j >= args.width) continue;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          sum[0][c] = fmaf(filter.taps[j][c], j > 0 ? before[j - 1][c] : now[0][c], sum[0][c]);
          sum[1][c] = fmaf(filter.taps[j][c], j > 1 ? before[j - 2][c] : now[1 - j][c], sum[1][c]);
        }
      }
      if (args.silu) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (float& value : sum[r]) value *= sigmoid(value);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t result[kWords];
        pack<Format>(sum[r], result);
        if (kWhole || i + r < rows) store_vector(out, result);
        out += args.out_stride;
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        before[2][c] = before[0][c], before[1][c] = now[0][c], before[0][c] = now[1][c];
      }
    }
  }
};

template <typename Format>
__global__ void __launch_bounds__(kConvThreads, kConvBlocks)
    causal_conv1d(const __grid_constant__ ConvArgs args) {
  constexpr int kWords = Rows<Format>::kWords;
  constexpr int kBytes = kWords * 4;
  constexpr int kStep = 16 / kBytes * 2;  // rows that are copied, and then taken, together
  constexpr int kAhead = kConvAheadBytes / kBytes;
  constexpr int kPitch = kConvThreads * kBytes;
  // Each thread copies its own inputs, so that no thread waits for another.
  __shared__ __align__(16) char ring[kAhead * kPitch];
  char* const own = ring + threadIdx.x * kBytes;
  const int vectors = args.columns / kChannels;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kConvThreads + threadIdx.x;
  const int64_t part = place / vectors;
  const int column = static_cast<int>(place - part * vectors) * kChannels;
  const int64_t offset = static_cast<int64_t>(column) * Format::kBytes;
  const int64_t state_stride = static_cast<int64_t>(args.columns) * Format::kBytes;
  int64_t row = part * args.rows_per_thread;
  int64_t last = min(row + args.rows_per_thread, args.sequences.rows);
  grid_dependency_wait();
  grid_dependency_launch();
  row = behind_state(args, row);
  last = behind_state(args, last);
  if (row >= last) return;
  ConvFilter<Format, kChannels> filter;
  bool loaded = false;
  while (row < last) {
    const ConvSequence sequence = find_sequence(args.sequences, row);
    const int64_t stop = min(last, sequence.end);
    Rows<Format> turn;
    turn.out = args.out + row * args.out_stride + offset;
    if (sequence.index < 0) {
      uint32_t none[kWords];
      clear(none);
      for (; row < stop; ++row, turn.out += args.out_stride) store_vector(turn.out, none);
      continue;
    }
    int rows = static_cast<int>(stop - row);
    const char* x = args.x + row * args.x_stride + offset;
    uint32_t words[kStep][kWords];
    // The inputs are requested before anything is waited for, and the filter while the state is
    // under way. Few rows, those of a decode step, go to registers at once.
    int later = rows;  // rows that are not requested
    const auto request = [&](int slot) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if (i < later) {
          async_copy<kBytes>(shared_address(own + (slot + i) * kPitch), x);
          x += args.x_stride;
        }
      }
      later -= kStep;
      async_copy_commit();
    };
    const bool few = rows < kStep;
    if (few) {
#pragma unroll
      for (int i = 0; i < kStep - 1; ++i) {
        if (i < rows) load_vector(words[i], x + i * args.x_stride);
      }
    } else {
#pragma unroll
      for (int slot = 0; slot < kAhead; slot += kStep) request(slot);
    }
    char* kept = state_of(args, sequence, offset);
    const bool counts = args.has_state == nullptr || args.has_state[sequence.index];
    Window<kWords> before;
    load_window(args, sequence, counts ? kept : nullptr, row, offset, state_stride, before);
    if (!loaded) filter.load(args.weight, args.bias, column, args.width, args.vectors);
    loaded = true;
    // Only this thread reads the channels' state at the first row, and it is done.
    if (kept != nullptr && row == sequence.begin) {
      store_state(args, sequence, before, offset, kept, state_stride);
    }
    turn.begin(before);
    if (!few) {
      int slot = 0;
#pragma unroll 1
      while (true) {
        async_copy_wait<kAhead / kStep - 1>();
#pragma unroll
        for (int i = 0; i < kStep; ++i) load_vector(words[i], own + (slot + i) * kPitch);
        if (rows < kStep) break;
        turn.template take<kStep, true>(args, filter, words, kStep);
        rows -= kStep;
        request(slot);
        slot = (slot + kStep) % kAhead;
      }
    }
    turn.template take<kStep, false>(args, filter, words, rows);
    row = stop;
  }
}

#define TIERCEL_CONV(type) \
  {DType::k##type,         \
   Kernel("causal_conv1d<" #type ">", reinterpret_cast<const void*>(causal_conv1d<type>))}

const ConvKernel kKernels[] = {TIERCEL_CONV(Float32), TIERCEL_CONV(BFloat16),
                               TIERCEL_CONV(Float16)};

}  // namespace

const ConvKernel* causal_conv1d_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
