// SPDX-License-Identifier: Apache-2.0
// Before FP8 attention: v with each column's keys behind each other, as the tensor cores take 8-bit
// right operands, and the factors of scores and values.
//
// A thread that has the probabilities of keys 8h + 2q and 8h + 2q + 1 for h = 0 and 1 (its place q
// among four neighbours) wants them as four bytes of one register: so key 8h + 2q + e stands at
// 4q + 2h + e of its 16.
//
// Floor: v read and written once.
#include "kernels/attention/attention_fp8_kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

constexpr int kKeys = kAttentionFp8Keys;
constexpr int kThreads = kAttentionFp8Threads;
constexpr int kGroup = kAttentionFp8Group;
constexpr int kGroups = kKeys / kGroup;
constexpr int kMaxWords = 128 / 4;  // of a key

__device__ __forceinline__ float scale_of(const AttentionFp8Scale& scale, int64_t entry, int head) {
  if (scale.data == nullptr) return 1.0f;
  return scale.data[entry * scale.batch_stride + head * scale.head_stride];
}

// Byte i of word j becomes byte j of word i.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t a = __byte_perm(words[0], words[1], 0x5140);
  const uint32_t b = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t c = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t d = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(a, b, 0x5410);
  words[1] = __byte_perm(a, b, 0x7632);
  words[2] = __byte_perm(c, d, 0x5410);
  words[3] = __byte_perm(c, d, 0x7632);
}

__global__ void __launch_bounds__(kThreads)
    attention_fp8_values(const __grid_constant__ AttentionFp8ValuesArgs args) {
  grid_dependency_wait();
  grid_dependency_launch();
  // Groups stand 4 words apart, so that the reads below meet all banks.
  __shared__ alignas(16) uint32_t tile[kKeys * kMaxWords + kGroups * 4];
  const int64_t pair = blockIdx.x / args.blocks;
  const int block = blockIdx.x % args.blocks;
  const int64_t entry = pair / args.heads;
  const int head = static_cast<int>(pair % args.heads);
  if (block == 0 && threadIdx.x == 0) {
    args.factors[2 * pair] =
        scale_of(args.q_scale, entry, head) * scale_of(args.k_scale, entry, head);
    args.factors[2 * pair + 1] = scale_of(args.v_scale, entry, head);
  }
  const bool packed = args.starts != nullptr;
  const int start = packed ? args.starts[entry] : 0;
  const int keys = packed ? args.starts[entry + 1] - start : args.keys;
  // A sequence without keys has a tile of zeros: it is multiplied.
  const int tiles = max(1, (keys + args.tile_n - 1) / args.tile_n);
  const int64_t before = packed ? start / args.tile_n + entry : 0;
  const int words = args.d / 4, chunks = args.d / 16;
  const int first = block * kKeys, left = keys - first;
  if (first >= tiles * args.tile_n) return;
  const char* v = args.v + entry * args.batch_stride + head * args.head_stride;
  v += start * args.key_stride;
  for (int i = threadIdx.x; i < kKeys * chunks; i += kThreads) {
    const int key = i / chunks, chunk = i % chunks;
    uint32_t piece[4] = {};
    if (key < left) load_vector(piece, v + (first + key) * args.key_stride + chunk * 16);
    store_vector(tile + key * words + key / kGroup * 4 + chunk * 4, piece);
  }
  __syncthreads();
  const int64_t row = (packed ? head : pair) * args.d;
  for (int i = threadIdx.x; i < kGroups * words; i += kThreads) {
    const int group = i % kGroups, word = i / kGroups;
    const int key = first + group * kGroup, its_tile = key / args.tile_n;
    if (its_tile >= tiles) continue;
    const uint32_t* from = tile + group * (kGroup * words + 4) + word;
    uint32_t columns[4][4];  // of each four keys
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        columns[q][at] = from[(at / 2 * 8 + 2 * q + at % 2) * words];
      }
      transpose_bytes(columns[q]);
    }
    char* to = args.transposed + (row + word * 4) * args.row_bytes +
               (before + its_tile) * args.tile_columns + key % args.tile_n;
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      const uint32_t piece[4] = {columns[0][column], columns[1][column], columns[2][column],
                                 columns[3][column]};
      store_vector(to + column * args.row_bytes, piece);
    }
  }
}

const Kernel kKernel("attention_fp8_values", reinterpret_cast<const void*>(attention_fp8_values));

}  // namespace

const Kernel& attention_fp8_values_kernel() { return kKernel; }

}  // namespace tiercel
