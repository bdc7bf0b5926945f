// SPDX-License-Identifier: Apache-2.0
// softmax for rows of thousands of scores: blocks (or clusters) that stay and take row after row.
//
// With a block a row, nothing is loaded while it computes. Here the next rows are on their way to
// shared memory by bulk copies all the time, `stages` of them a block, whatever the threads do; a
// row goes from its stage to registers once, and the stage is filled again as soon as the first
// reduction's barrier says that all have read it.
#ifndef KERNELS_SOFTMAX_SOFTMAX_RING_CUH_
#define KERNELS_SOFTMAX_SOFTMAX_RING_CUH_

#include "kernels/softmax/bulk_ring.cuh"
#include "kernels/softmax/softmax.cuh"

namespace tiercel {

// A block's part of the rows: `count` vectors from `first` on, of every `step`-th row.
struct RingPart {
  uint32_t first, count;
  int64_t row, step;

  __device__ __forceinline__ explicit RingPart(const SoftmaxArgs& args, uint32_t row_vectors) {
    const uint32_t rank = args.blocks > 1 ? cluster_rank() : 0;
    first = rank * args.vectors_per_block;
    count = min(args.vectors_per_block, row_vectors - first);
    row = blockIdx.x / args.blocks;
    step = gridDim.x / args.blocks;
  }
  __device__ __forceinline__ char* at(const SoftmaxRows& rows, int64_t row) const {
    return rows.data + row * rows.row_stride + static_cast<int64_t>(first) * kSoftmaxVectorBytes;
  }
};

// Runs `body(words of the thread's vectors of each matrix, loaded, row)` for each row.
template <int kMatrices, int kVectors, typename Body>
__device__ __forceinline__ void for_each_row(const SoftmaxArgs& args, const RingPart& part,
                                             const SoftmaxRows* (&matrices)[kMatrices],
                                             uint32_t pad, Body body) {
  extern __shared__ __align__(128) char ring_stages[];
  __shared__ uint64_t full[kSoftmaxStages];
  const uint32_t matrix_bytes = args.vectors_per_block * kSoftmaxVectorBytes;
  const BulkRing ring{full, ring_stages, kMatrices * matrix_bytes, args.stages};
  ring.start();
  grid_dependency_wait();
  const auto load = [&](uint32_t turn, int64_t row) {
    ring.announce(turn, kMatrices * part.count * kSoftmaxVectorBytes);
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      ring.load(turn, m * matrix_bytes, part.at(*matrices[m], row),
                part.count * kSoftmaxVectorBytes);
    }
  };
  if (threadIdx.x == 0) {
    for (uint32_t s = 0; s < args.stages && part.row + s * part.step < args.rows; ++s) {
      load(s, part.row + s * part.step);
    }
  }
  uint32_t turn = 0;
#pragma unroll 1
  for (int64_t row = part.row; row < args.rows; row += part.step, ++turn) {
    ring.wait(turn);
    uint32_t words[kMatrices][kVectors][4];
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t vector = threadIdx.x + v * blockDim.x;
        if (vector < part.count) {
          load_vector(words[m][v], ring.stage(turn) + m * matrix_bytes + vector * kSoftmaxVectorBytes);
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) words[m][v][w] = pad;
        }
      }
    }
    body(words, row, turn, [&] {
      const int64_t next = row + args.stages * part.step;
      if (threadIdx.x == 0 && next < args.rows) load(turn + args.stages, next);
    });
  }
}

template <typename Format, int kVectors>
__device__ __forceinline__ void store_part(const float (&values)[kVectors][16 / Format::kBytes],
                                           char* to, uint32_t count) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t vector = threadIdx.x + v * blockDim.x;
    uint32_t words[4];
    pack<Format>(values[v], words);
    if (vector < count) store_vector(to + vector * kSoftmaxVectorBytes, words);
  }
}

template <typename Format>
__device__ __forceinline__ uint32_t word_of(float value) {
  return Format::kBytes == 4 ? Format::to_bits(value) : Format::to_bits(value) * 0x10001u;
}

template <typename Format, int kVectors>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    softmax_forward_ring(const __grid_constant__ SoftmaxArgs args) {
  constexpr int kPerVector = kSoftmaxVectorBytes / Format::kBytes;
  const BlockGroup group(args.blocks);
  const RingPart part(args, args.columns / kPerVector);
  const uint32_t flip = sign_flip<Format>(args.scale);
  const SoftmaxRows* matrices[1] = {&args.x};
  bool met = false;
  for_each_row<1, kVectors>(
      args, part, matrices, word_of<Format>(args.pad),
      [&](uint32_t (&words)[1][kVectors][4], int64_t row, uint32_t, auto loaded) {
        float x[kVectors][kPerVector];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int w = 0; w < 4; ++w) words[0][v][w] ^= flip;
          unpack<Format>(words[0][v], x[v]);
        }
        if (!met) group.meet();
        met = true;
        softmax_of<Format::kBytes == 4>(x, group, fabsf(args.scale), args.log, loaded);
        store_part<Format>(x, part.at(args.out, row), part.count);
      });
  if (!met) group.meet();  // a cluster without rows
  grid_dependency_launch();
}

template <typename Format, int kVectors>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    softmax_backward_ring(const __grid_constant__ SoftmaxArgs args) {
  constexpr int kPerVector = kSoftmaxVectorBytes / Format::kBytes;
  const BlockGroup group(args.blocks);
  const RingPart part(args, args.columns / kPerVector);
  const SoftmaxRows* matrices[2] = {&args.x, &args.grad};
  bool met = false;
  for_each_row<2, kVectors>(
      args, part, matrices, 0u,
      [&](uint32_t (&words)[2][kVectors][4], int64_t row, uint32_t turn, auto loaded) {
        float sums[4] = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          add_products<Format, kPerVector>(sums, words[0][v], words[1][v], args.log);
        }
        if (!met) group.meet();
        met = true;
        const float total = group.reduce(sum_of(sums), SumOf(), turn & 1);
        loaded();
        float y[kVectors][kPerVector];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          float grad[kPerVector];
          unpack<Format>(words[0][v], y[v]);
          unpack<Format>(words[1][v], grad);
          gradients<Format::kBytes == 4>(y[v], grad, total, args, ~0u);
        }
        store_part<Format>(y, part.at(args.out, row), part.count);
      });
  if (!met) group.meet();
  grid_dependency_launch();
}

}  // namespace tiercel

#endif  // KERNELS_SOFTMAX_SOFTMAX_RING_CUH_
