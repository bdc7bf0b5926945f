// SPDX-License-Identifier: Apache-2.0
// Prepares what a chunk needs of its queries, keys and gates before a state goes through it: for
// each head of values the inverse of I + A, where A[i][j] = beta[i] (k[i] . k[j]) decay(j to i)
// below the diagonal, times beta by columns; and scale (q[i] . k[j]) decay(j to i) up to the
// diagonal. A block has a chunk and a head of keys.
#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kTokens = kDeltaChunk;
constexpr int kHalf = kTokens / 2;
constexpr int kPitch = kTokens + 4;    // floats between rows of the matrix
constexpr int kHalfPitch = kHalf + 4;  // and of a half
constexpr int kTiles = kTokens / 8;
constexpr float kLeastGate = -100.0f;  // no decay is stronger; differences of sums stay numbers

struct Numbers {
  float gate[kTokens];  // sums of the gates' logarithms, base 2
  float beta[kTokens];
  float norm_q[kTokens];
  float norm_k[kTokens];
};

// Inverts the unit lower triangular matrix whose part below the diagonal is given, 32x32, in place:
// a lane has a column.
__device__ __forceinline__ void invert_half(float* matrix) {
  const int lane = threadIdx.x % 32;
  float column[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    float sums[4] = {i == lane ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 row = *reinterpret_cast<const float4*>(&matrix[i * kPitch + j]);
      sums[0] = fmaf(-row.x, column[j], sums[0]);
      if (j + 1 < i) sums[1] = fmaf(-row.y, column[j + 1], sums[1]);
      if (j + 2 < i) sums[2] = fmaf(-row.z, column[j + 2], sums[2]);
      if (j + 3 < i) sums[3] = fmaf(-row.w, column[j + 3], sums[3]);
    }
    column[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kHalf; ++i) matrix[i * kPitch + lane] = column[i];
}

// c = sign a b, 32x32 each, by 128 threads.
template <int kPitchA, int kPitchB, int kPitchC>
__device__ __forceinline__ void multiply_halves(const float* a, const float* b, float* c,
                                                float sign) {
  const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 8;
  float sums[8] = {};
#pragma unroll 8
  for (int j = 0; j < kHalf; ++j) {
    const float left = a[row * kPitchA + j];
    const float4 low = *reinterpret_cast<const float4*>(&b[j * kPitchB + column]);
    const float4 high = *reinterpret_cast<const float4*>(&b[j * kPitchB + column + 4]);
    sums[0] = fmaf(left, low.x, sums[0]), sums[1] = fmaf(left, low.y, sums[1]);
    sums[2] = fmaf(left, low.z, sums[2]), sums[3] = fmaf(left, low.w, sums[3]);
    sums[4] = fmaf(left, high.x, sums[4]), sums[5] = fmaf(left, high.y, sums[5]);
    sums[6] = fmaf(left, high.z, sums[6]), sums[7] = fmaf(left, high.w, sums[7]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) c[row * kPitchC + column + i] = sign * sums[i];
}

// The norms of two threads' row of a tile; 0 for a row of zeros' product with anything.
template <int kKeySize>
__device__ __forceinline__ float row_norm(const char* tile) {
  const int row = threadIdx.x / 2;
  const char* at = tile + row * (kKeySize * 2 + kDeltaPad) + threadIdx.x % 2 * kKeySize;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kKeySize / 16; ++i) {
    uint32_t words[4];
    float values[8];
    load_vector(words, at + i * 16);
    unpack<BFloat16>(words, values);
#pragma unroll
    for (float value : values) sum = fmaf(value, value, sum);
  }
  sum += __shfl_xor_sync(kFullWarp, sum, 1);
  return rsqrtf(sum + kDeltaNormEps);
}

// Gates and betas of a head; tokens behind the end have no effect.
__device__ __forceinline__ void load_numbers(const DeltaRuleArgs& args, int64_t first, int rows,
                                             int head, Numbers& numbers) {
  const int thread = threadIdx.x;
  if (thread >= kTokens && thread < 2 * kTokens) {
    const int token = thread - kTokens;
    const int64_t place = (first + token) * args.v_heads + head;
    float beta = 0.0f;
    if (token < rows) {
      beta = args.beta_float ? load_element<Float32>(args.beta + place * 4)
                             : load_element<BFloat16>(args.beta + place * 2);
    }
    numbers.beta[token] = beta;
  } else if (thread < 32) {
    float gates[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * thread + i;
      gates[i] = 0.0f;
      if (token < rows) {
        const float gate = args.g[(first + token) * args.v_heads + head];
        gates[i] = kLog2E * (gate < kLeastGate ? kLeastGate : gate);
      }
    }
    float sum = gates[0] + gates[1];
    const float own = sum;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const float other = __shfl_up_sync(kFullWarp, sum, lanes);
      if (thread >= lanes) sum += other;
    }
    numbers.gate[2 * thread] = sum - own + gates[0];
    numbers.gate[2 * thread + 1] = sum;
  }
}

// Zeros for tokens of no sequence.
__device__ __forceinline__ void clear_strays(const DeltaRuleArgs& args, int key_head) {
  const int group = args.v_heads / args.k_heads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int64_t begin = delta_start(args, 0), end = delta_start(args, args.count);
  const int64_t last = min(first + kTokens, args.tokens);
  if (first >= begin && last <= end) return;
  const int vectors = args.value_size / 8;
  const uint32_t none[4] = {0, 0, 0, 0};
  for (int64_t token = first; token < last; ++token) {
    if (token >= begin && token < end) continue;
    for (int i = threadIdx.x; i < group * vectors; i += kDeltaChunkThreads) {
      char* to = args.out.data + token * args.out.token +
                 (key_head * group + i / vectors) * args.out.head + i % vectors * 16;
      store_vector(to, none);
    }
  }
}

template <int kKeySize>
__global__ void __launch_bounds__(kDeltaChunkThreads, 3)
    gated_delta_rule_chunks(const __grid_constant__ DeltaRuleArgs args) {
  constexpr int kTilePitch = kKeySize * 2 + kDeltaPad;
  extern __shared__ __align__(16) char shared[];
  char* const q_tile = shared;
  char* const k_tile = q_tile + kTokens * kTilePitch;
  auto* const matrix = reinterpret_cast<float*>(k_tile + kTokens * kTilePitch);
  float* const half = matrix + kTokens * kPitch;
  Numbers& numbers = *reinterpret_cast<Numbers*>(half + kHalf * kHalfPitch);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key_head = blockIdx.y;
  grid_dependency_wait();
  grid_dependency_launch();
  if (args.starts != nullptr) clear_strays(args, key_head);
  if (args.count == 0) return;
  const DeltaSequence sequence = delta_sequence(args, delta_owner(args, blockIdx.x));
  const int64_t chunk = blockIdx.x - sequence.place;
  const int64_t first = sequence.begin + chunk * kTokens;
  if (chunk < 0 || first >= sequence.end) return;
  const int rows = static_cast<int>(min(int64_t{kTokens}, sequence.end - first));

  const uint32_t q_at = static_cast<uint32_t>(__cvta_generic_to_shared(q_tile));
  const uint32_t k_at = static_cast<uint32_t>(__cvta_generic_to_shared(k_tile));
  copy_rows<kKeySize * 2>(q_at, delta_row(args, args.q, first, key_head), args.q.token, rows,
                          threadIdx.x, kDeltaChunkThreads);
  copy_rows<kKeySize * 2>(k_at, delta_row(args, args.k, first, key_head), args.k.token, rows,
                          threadIdx.x, kDeltaChunkThreads);
  async_copy_commit();
  async_copy_wait<0>();
  __syncthreads();

  const float norm_q = args.l2norm ? row_norm<kKeySize>(q_tile) : 1.0f;
  const float norm_k = args.l2norm ? row_norm<kKeySize>(k_tile) : 1.0f;
  if (threadIdx.x % 2 == 0) {
    numbers.norm_q[threadIdx.x / 2] = norm_q * args.scale;
    numbers.norm_k[threadIdx.x / 2] = norm_k;
  }

  // A warp has 16 rows of both products, of which it needs the columns up to its last row.
  float kk[kTiles][4] = {}, qk[kTiles][4] = {};
#pragma unroll
  for (int depth = 0; depth < kKeySize; depth += 16) {
    uint32_t k_rows[4], q_rows[4];
    load_matrices<false>(k_rows, block_by_columns(k_at, kTilePitch, warp * 16, depth));
    load_matrices<false>(q_rows, block_by_columns(q_at, kTilePitch, warp * 16, depth));
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      if (pair > warp) continue;
      uint32_t b[4];
      load_matrices<false>(b, block_by_rows(k_at, kTilePitch, pair * 16, depth));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int tile = 2 * pair + i;
        warp_multiply_add<BFloat16>(kk[tile], k_rows[0], k_rows[1], k_rows[2], k_rows[3], b[2 * i],
                                    b[2 * i + 1]);
        warp_multiply_add<BFloat16>(qk[tile], q_rows[0], q_rows[1], q_rows[2], q_rows[3], b[2 * i],
                                    b[2 * i + 1]);
      }
    }
  }

  const int group = args.v_heads / args.k_heads;
#pragma unroll 1
  for (int member = 0; member < group; ++member) {
    const int head = key_head * group + member;
    const int64_t place = static_cast<int64_t>(blockIdx.x) * args.v_heads + head;
    char* const solved = args.matrices + place * 2 * kDeltaMatrixBytes;
    char* const scores = solved + kDeltaMatrixBytes;
    load_numbers(args, first, rows, head, numbers);
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile / 2 > warp) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = warp * 16 + lane / 4 + 8 * i, column = tile * 8 + lane % 4 * 2;
        const float of_k = numbers.beta[row] * numbers.norm_k[row];
        const float of_q = numbers.norm_q[row];
        float below[2], up_to[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float gates = numbers.gate[row] - numbers.gate[column + j];
          const float factor =
              column + j > row ? 0.0f : exp2_approx(gates) * numbers.norm_k[column + j];
          below[j] = column + j == row ? 0.0f : of_k * factor * kk[tile][2 * i + j];
          up_to[j] = of_q * factor * qk[tile][2 * i + j];
        }
        *reinterpret_cast<float2*>(&matrix[row * kPitch + column]) =
            make_float2(below[0], below[1]);
        *reinterpret_cast<uint32_t*>(scores + (row * kTokens + column) * 2) =
            pack_pair(up_to[0], up_to[1]);
      }
    }
    __syncthreads();
    if (warp < 2) invert_half(matrix + warp * kHalf * (kPitch + 1));
    __syncthreads();
    float* const lower = matrix + kHalf * kPitch;
    multiply_halves<kPitch, kPitch, kHalfPitch>(lower, matrix, half, 1.0f);
    __syncthreads();
    multiply_halves<kPitch, kHalfPitch, kPitch>(lower + kHalf, half, lower, -1.0f);
    __syncthreads();
    {
      const int row = threadIdx.x / 2;
#pragma unroll 1
      for (int column = threadIdx.x % 2 * 8; column < (row / 16 + 1) * 16; column += 16) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = column + 2 * i;
          // Above the diagonal a half is zero; between the halves nothing is read.
          const float2 pair = *reinterpret_cast<const float2*>(&matrix[row * kPitch + at]);
          words[i] = pack_pair(pair.x * numbers.beta[at], pair.y * numbers.beta[at + 1]);
        }
        store_vector(solved + (row * kTokens + column) * 2, words);
      }
    }
    if (threadIdx.x < kTokens) {
      float* const factors = args.factors + place * kDeltaFactors;
      const int token = threadIdx.x;
      const float gate = numbers.gate[token], last = numbers.gate[kTokens - 1];
      const float decay = exp2_approx(gate);
      factors[token] = decay * numbers.norm_k[token];
      factors[kTokens + token] = decay * numbers.norm_q[token];
      factors[2 * kTokens + token] = exp2_approx(last - gate) * numbers.norm_k[token];
      if (token < 4) factors[3 * kTokens + token] = exp2_approx(last);
    }
    __syncthreads();
  }
}

#define TIERCEL_CHUNKS(size)                      \
  {size,                                          \
   Kernel("gated_delta_rule_chunks<K=" #size ">", \
          reinterpret_cast<const void*>(gated_delta_rule_chunks<size>), delta_chunks_smem(size))}

const DeltaRuleKernel kKernels[] = {TIERCEL_CHUNKS(64), TIERCEL_CHUNKS(128)};

}  // namespace

const DeltaRuleKernel* delta_chunks_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
