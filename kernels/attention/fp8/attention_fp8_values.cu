// SPDX-License-Identifier: Apache-2.0
// The kernel before FP8 attention: transposes v, so that each column's keys are contiguous, as the
// tensor cores take 8-bit right operands; and computes the factors of scores and values.
//
// In attention, a thread (q among four neighbours) has the probabilities of keys 8h + 2q and
// 8h + 2q + 1, for h = 0 and 1, and packs them into one register: so key 8h + 2q + e is at position
// 4q + 2h + e of its 16.
//
// Lower bound: v read and written once.
#include "kernels/attention/fp8/kernels.h"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

constexpr int kKeys = kAttentionFp8Keys;
constexpr int kThreads = kAttentionFp8Threads;
constexpr int kGroup = kAttentionFp8Group;
constexpr int kGroups = kKeys / kGroup;
constexpr int kMaxWords = 128 / 4;  // per key

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

// A head of a sequence.
struct Values {
  const char* v;     // the first key
  char* transposed;  // the first dimension's
  int64_t before;    // tiles of other sequences, in a row
  int keys;
  int tiles;
};

// The keys from `first` on, through `tile`.
__device__ __forceinline__ void transpose_keys(const AttentionFp8ValuesArgs& args,
                                               const Values& values, int first, uint32_t* tile) {
  const int words = args.d / 4, chunks = args.d / 16, left = values.keys - first;
  for (int i = threadIdx.x; i < kKeys * chunks; i += kThreads) {
    const int key = i / chunks, chunk = i % chunks;
    uint32_t piece[4] = {};
    if (key < left) load_vector(piece, values.v + (first + key) * args.key_stride + chunk * 16);
    store_vector(tile + key * words + key / kGroup * 4 + chunk * 4, piece);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kGroups * words; i += kThreads) {
    const int group = i % kGroups, word = i / kGroups;
    const int key = first + group * kGroup, its_tile = key / args.tile_n;
    if (its_tile >= values.tiles) continue;
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
    char* to = values.transposed + word * 4 * args.row_bytes +
               (values.before + its_tile) * args.tile_columns + key % args.tile_n;
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      const uint32_t piece[4] = {columns[0][column], columns[1][column], columns[2][column],
                                 columns[3][column]};
      store_vector(to + column * args.row_bytes, piece);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    attention_fp8_values(const __grid_constant__ AttentionFp8ValuesArgs args) {
  grid_dependency_wait();
  grid_dependency_launch();
  // Groups are 4 words apart, so that the reads above use all banks.
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
  int start = 0, keys = args.keys;
  if (packed) {  // cut to the tensor, as rows_between in packed.py does it
    const int* at = args.starts + entry * args.start_step;
    start = min(max(at[0], 0), args.keys);
    keys = max(min(at[args.start_step], args.keys), start) - start;
  }
  Values values;
  values.v = args.v + entry * args.batch_stride + head * args.head_stride + start * args.key_stride;
  values.transposed = args.transposed + (packed ? head : pair) * args.d * args.row_bytes;
  values.before = packed ? start / args.tile_n + entry : 0;
  values.keys = keys;
  // A sequence without keys has a tile of zeros: it is multiplied.
  values.tiles = max(1, (keys + args.tile_n - 1) / args.tile_n);
#pragma unroll 1  // repeats only if a sequence is longer than announced
  for (int first = block * kKeys; first < values.tiles * args.tile_n;
       first += args.blocks * kKeys) {
    transpose_keys(args, values, first, tile);
    __syncthreads();
  }
}

const Kernel kKernel("attention_fp8_values", reinterpret_cast<const void*>(attention_fp8_values));

}  // namespace

const Kernel& attention_fp8_values_kernel() { return kKernel; }

}  // namespace tiercel
