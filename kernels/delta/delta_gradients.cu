// SPDX-License-Identifier: Apache-2.0
// Gradients of queries, keys, gates and betas of a chunk. A block has a chunk and a key head, and
// loops over the value heads that share it, so that their gradients are added in order.
//
// gated_delta_rule_passes gives, for each head, the state S before the chunk and its gradient dS
// after it, W, U and Y; dO are the results' gradients. With D[i][j] = exp(G[i] - G[j]):
//   M = tril(dO U^T) D scale,  N = -strict tril(Y U^T) beta[i] D
//   dQ = scale exp(G) dO S^T + M K
//   dK = -beta exp(G) Y S^T + exp(G[63] - G) U dS^T + M^T Q + (N + N^T) K
//   dbeta = rows of Y . W - rows of (Y U^T) . (K K^T D)
// The gradient of G[i] is rows minus columns of M . Q K^T + N . K K^T, plus the terms with S and
// dS; a gate's gradient is their sum from its token to the end of the chunk.
#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/delta/gradients.cuh"
#include "kernels/delta/solve.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

// Numbers of tokens, and sums of parts of their rows.
struct Numbers {
  float gate[kTokens];  // sums of the gates' logarithms, base 2
  float beta[kTokens];
  float norm_q[kTokens];
  float norm_k[kTokens];
  float of_gate[2][kTokens];   // of both halves of the columns: what the gate's sum has as a row
  float of_state[2][kTokens];  // what the token adds to the state, with the gradient of that
  float of_beta[2][kTokens];
  float of_columns[4][kTokens];  // of each 16 rows
  float products[kTokens];       // rows of Y . W
  float states[kThreads / 32];   // S . dS
};
static_assert(sizeof(Numbers) <= kDeltaGradientNumbers * 4);

template <int kKeySize>
struct Memory : DeltaGradientTiles<kKeySize> {
  using Tiles = DeltaGradientTiles<kKeySize>;
  char* base;

  __device__ __forceinline__ char* q() const { return base; }
  __device__ __forceinline__ char* k() const { return base + Tiles::kTile; }
  __device__ __forceinline__ DeltaGradientStage stage(int count) const {
    return Tiles::stage(base + 2 * Tiles::kTile + count % 2 * Tiles::kStage);
  }
  // M and N.
  __device__ __forceinline__ char* matrix(int index) const {
    return base + 2 * Tiles::kTile + 2 * Tiles::kStage + index * kValueTile;
  }
  __device__ __forceinline__ Numbers& numbers() const {
    return *reinterpret_cast<Numbers*>(matrix(2));
  }
};

// The gradients of the gates of a head's chunk, by a warp.
__device__ __forceinline__ void store_gates(const DeltaBackArgs& args, const DeltaChunk& chunk,
                                            int head, const Numbers& numbers) {
  const int lane = threadIdx.x % 32;
  float of_gate[2], of_state[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    float columns = 0.0f;
#pragma unroll
    for (int rows = 0; rows < 4; ++rows) columns += numbers.of_columns[rows][token];
    of_gate[i] = numbers.of_gate[0][token] + numbers.of_gate[1][token] - columns;
    of_state[i] = numbers.of_state[0][token] + numbers.of_state[1][token];
  }
  float states = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) states += numbers.states[i];
  states *= exp2_approx(numbers.gate[kTokens - 1]);
  // Sums of later lanes' tokens, and of earlier ones'. Nothing is subtracted again: after a strong
  // gate a lane's own terms are greater by many orders of magnitude than what has to remain.
  float later = of_gate[0] + of_gate[1], before = of_state[0] + of_state[1];
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const float other = __shfl_down_sync(kFullWarp, later, lanes);
    if (lane + lanes < 32) later += other;
    const float earlier = __shfl_up_sync(kFullWarp, before, lanes);
    if (lane >= lanes) before += earlier;
  }
  const float behind = __shfl_down_sync(kFullWarp, later, 1);
  const float ahead = __shfl_up_sync(kFullWarp, before, 1);
  later = (lane < 31 ? behind : 0.0f) + of_gate[1];
  before = lane > 0 ? ahead : 0.0f;
  const float gates[2] = {later + of_gate[0] + before + states,
                          later + before + of_state[0] + states};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    if (token < chunk.rows) args.dg[(chunk.first + token) * args.v_heads + head] = gates[i];
  }
}

template <typename Format, int kKeySize>
__global__ void __launch_bounds__(kThreads, 1)
    gated_delta_rule_gradients(const __grid_constant__ DeltaBackArgs args) {
  using Shared = Memory<kKeySize>;
  constexpr int kPitch = Shared::kPitch;
  constexpr int kTiles = kKeySize / 2 / 8;  // of a warp: half of the columns
  extern __shared__ __align__(16) char shared[];
  Shared memory;
  memory.base = shared;
  Numbers& numbers = memory.numbers();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key_head = blockIdx.y, group = args.v_heads / args.k_heads;
  const int slices = (args.value_size + kSlice - 1) / kSlice;
  grid_dependency_wait();
  grid_dependency_launch();
  clear_gradients<Format, kKeySize>(args, key_head, 1);
  const DeltaChunk chunk = delta_chunk(args, blockIdx.x);
  if (chunk.rows == 0) return;

  const auto place_of = [&](int head) {
    return static_cast<int64_t>(blockIdx.x) * args.v_heads + head;
  };
  const auto copy = [&](int count) {
    const int head = key_head * group + count / slices;
    copy_stage<kKeySize>(args, memory.stage(count), chunk, place_of(head), head, count % slices);
  };
  load_keys<Format, kKeySize>(args, chunk, key_head, memory.q(), memory.k(), numbers.norm_q,
                              numbers.norm_k, [&] { copy(0); });
  const uint32_t q_at = shared_address(memory.q()), k_at = shared_address(memory.k());

  // A warp has 16 rows, and half of the columns.
  const int row = warp / 2 * 16, half = warp % 2;
  const int column = half * (kTokens / 2), key = half * (kKeySize / 2);
  const int own_row = row + lane / 4, along = lane % 4 * 2;
  float kk[kMatrixTiles][4] = {}, qk[kMatrixTiles][4] = {};
  multiply_lower<Format, kKeySize>(kk, k_at, k_at, kPitch, row, column);
  multiply_lower<Format, kKeySize>(qk, q_at, k_at, kPitch, row, column);
  float dq[kTiles][4] = {}, dk[kTiles][4] = {};

#pragma unroll 1
  for (int member = 0; member < group; ++member) {
    const int head = key_head * group + member;
    load_numbers<Format>(args, chunk.first, chunk.rows, head, numbers.gate, numbers.beta);
    float scores[kMatrixTiles][4] = {}, solved[kMatrixTiles][4] = {};  // dO U^T and Y U^T
    float of_gate[2] = {}, of_state[2] = {}, product = 0.0f, states = 0.0f;

#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
      const int count = member * slices + slice;
      if (count + 1 < group * slices) copy(count + 1);
      async_copy_commit();
      async_copy_wait<1>();
      __syncthreads();
      const auto stage = memory.stage(count);
      const uint32_t grad = shared_address(stage.grad), written = shared_address(stage.written);
      const uint32_t rest = shared_address(stage.grad_rest);
      multiply_lower<Format, kSlice>(scores, grad, written, kValuePitch, row, column);
      multiply_lower<Format, kSlice>(solved, rest, written, kValuePitch, row, column);

      // Products with the states: to dq of the results' gradients, to dk of Y and of U.
      const auto add_product = [&](uint32_t left, const char* right, const char* own,
                                   const float (&factors)[2], float (&to)[kTiles][4],
                                   float (&dots)[2]) {
        float sums[kTiles][4] = {};
        multiply_rows<Format, false>(sums, left, kValuePitch, row, shared_address(right), kPitch,
                                     key, 0, kSlice);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 pair =
                load_pair<Format>(own, kPitch, own_row + 8 * i, key + tile * 8 + along);
            const float a = factors[i] * sums[tile][2 * i];
            const float b = factors[i] * sums[tile][2 * i + 1];
            dots[i] = fmaf(pair.x, a, fmaf(pair.y, b, dots[i]));
            to[tile][2 * i] += a;
            to[tile][2 * i + 1] += b;
          }
        }
      };
      float gates[2], decays[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        gates[i] = numbers.gate[own_row + 8 * i];
        decays[i] = args.scale * exp2_approx(gates[i]);
      }
      add_product(grad, stage.state, memory.q(), decays, dq, of_gate);
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        float dots[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          decays[i] = part == 0 ? -numbers.beta[own_row + 8 * i] * exp2_approx(gates[i])
                                : exp2_approx(numbers.gate[kTokens - 1] - gates[i]);
        }
        add_product(part == 0 ? rest : written, part == 0 ? stage.state : stage.grad_state,
                    memory.k(), decays, dk, dots);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          of_gate[i] += part == 0 ? dots[i] : 0.0f;
          of_state[i] += part == 0 ? 0.0f : dots[i];
        }
      }

      // S . dS, and rows of Y . W, a quarter of a row a thread.
#pragma unroll
      for (int i = threadIdx.x; i < kSlice * kKeySize / 8; i += kThreads) {
        const int at = i / (kKeySize / 8) * kPitch + i % (kKeySize / 8) * 16;
        uint32_t a[4], b[4];
        float x[8], y[8];
        load_vector(a, stage.state + at);
        load_vector(b, stage.grad_state + at);
        unpack<Format>(a, x);
        unpack<Format>(b, y);
#pragma unroll
        for (int j = 0; j < 8; ++j) states = fmaf(x[j], y[j], states);
      }
      product += multiply_rest<Format>(args, stage.grad_rest, place_of(head), slice);
      __syncthreads();
    }

    // M and N, and sums of their products with Q K^T and K K^T by rows and by columns.
    float of_beta[2] = {};
#pragma unroll
    for (int tile = 0; tile < kMatrixTiles; ++tile) {
      const int at = column + tile * 8 + along;
      float columns[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = own_row + 8 * i;
        float m[2], n[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int e = 2 * i + j;
          const float decay =
              at + j > token ? 0.0f : exp2_approx(numbers.gate[token] - numbers.gate[at + j]);
          const float below = at + j == token ? 0.0f : decay * solved[tile][e];
          m[j] = scores[tile][e] * decay * args.scale;
          n[j] = -numbers.beta[token] * below;
          // The diagonal has no gate.
          const float both = at + j == token ? 0.0f : fmaf(m[j], qk[tile][e], n[j] * kk[tile][e]);
          of_gate[i] += both;
          columns[j] += both;
          of_beta[i] = fmaf(-below, kk[tile][e], of_beta[i]);
        }
        const int place = token * kValuePitch + at * 2;
        *reinterpret_cast<uint32_t*>(memory.matrix(0) + place) = pack_pair<Format>(m[0], m[1]);
        *reinterpret_cast<uint32_t*>(memory.matrix(1) + place) = pack_pair<Format>(n[0], n[1]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          columns[j] += __shfl_xor_sync(kFullWarp, columns[j], lanes);
        }
        if (lane < 4) numbers.of_columns[warp / 2][at + j] = columns[j];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of_gate[i] = lanes_reduce<4>(of_gate[i], Sum());
      of_state[i] = lanes_reduce<4>(of_state[i], Sum());
      of_beta[i] = lanes_reduce<4>(of_beta[i], Sum());
      if (lane % 4 == 0) {
        numbers.of_gate[half][own_row + 8 * i] = of_gate[i];
        numbers.of_state[half][own_row + 8 * i] = of_state[i];
        numbers.of_beta[half][own_row + 8 * i] = of_beta[i];
      }
    }
    product = lanes_reduce<4>(product, Sum());
    states = lanes_reduce<32>(states, Sum());
    if (lane % 4 == 0) numbers.products[threadIdx.x / 4] = product;
    if (lane == 0) numbers.states[warp] = states;
    __syncthreads();

    if (warp == 0) {
      store_gates(args, chunk, head, numbers);
    } else if (warp == 1 || warp == 2) {
      const int token = threadIdx.x - 32;
      if (token < chunk.rows) {
        store_beta<Format>(
            args, (chunk.first + token) * args.v_heads + head,
            numbers.products[token] + numbers.of_beta[0][token] + numbers.of_beta[1][token]);
      }
    }
    const uint32_t m = shared_address(memory.matrix(0)), n = shared_address(memory.matrix(1));
    multiply_rows<Format, false>(dq, m, kValuePitch, row, k_at, kPitch, key, 0, row + 16);
    multiply_rows<Format, true>(dk, m, kValuePitch, row, q_at, kPitch, key, row, kTokens);
    multiply_rows<Format, false>(dk, n, kValuePitch, row, k_at, kPitch, key, 0, row + 16);
    multiply_rows<Format, true>(dk, n, kValuePitch, row, k_at, kPitch, key, row, kTokens);
    __syncthreads();
  }

  store_keys<Format, kKeySize>(args, args.dq, chunk, key_head, memory.q(), numbers.norm_q,
                               numbers.of_gate, dq);
  store_keys<Format, kKeySize>(args, args.dk, chunk, key_head, memory.k(), numbers.norm_k,
                               numbers.of_state, dk);
}

#define TIERCEL_GRADIENTS(dtype, size)                                            \
  {DeltaPart::kGradients, size, DType::k##dtype, false,                           \
   Kernel("gated_delta_rule_gradients<" #dtype ", K=" #size ">",                  \
          reinterpret_cast<const void*>(gated_delta_rule_gradients<dtype, size>), \
          delta_gradients_smem(size))}

const DeltaRuleKernel kKernels[] = {
    TIERCEL_GRADIENTS(BFloat16, 64),
    TIERCEL_GRADIENTS(BFloat16, 128),
    TIERCEL_GRADIENTS(Float16, 64),
    TIERCEL_GRADIENTS(Float16, 128),
};

}  // namespace

const DeltaRuleKernel* delta_gradients_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
