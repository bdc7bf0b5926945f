// SPDX-License-Identifier: Apache-2.0
// Gradients of queries, keys, gates and betas of a chunk whose keys have a gate for each channel. A
// block has a chunk and a key head, and loops over the value heads that share it.
//
// gated_delta_rule_passes gives, for each head, the state S before the chunk and its gradient dS
// after it, W, U and Y; dO are the results' gradients. For channel c, with D[i][j] the decay
// exp(G[i][c] - G[j][c]):
//   M = scale tril(dO U^T),  N = -beta[i] strict tril(Y U^T)
//   dQ[i] = scale exp(G[i]) dO S^T + sum over j <= i of M[i][j] k[j] D[i][j]
//   dK[i] = -beta exp(G[i]) Y S^T + sum over j < i of N[i][j] k[j] D[i][j]
//         + exp(G[63] - G[i]) U dS^T + sum over j >= i of (M[j][i] q[j] + N[j][i] k[j]) D[j][i]
//   dbeta = rows of Y . W - rows of (Y U^T) . (the keys' products, which the first kernel left)
// The gradient of G[i] is q dQ plus k times the first line of dK minus the second. A gate's
// gradient is the sum of these from its own token on, plus exp(G[63]) S . dS, plus the terms of the
// keys that earlier tokens add to the state (those of later tokens cancel).
//
// No product of two decays fits a float in general, see delta_channels.cu. Blocks of 16 rows are
// multiplied with earlier ones, or columns with later ones, by tensor cores, both decayed to a
// token between them. Blocks of 16 x 16 on the diagonal are summed by a thread per channel, which
// multiplies by one gate after the other, as in Horner's rule, so that pairs need no exponential,
// and the terms of a row and a column in the gates cancel exactly.
#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/delta/gradients.cuh"
#include "kernels/delta/solve.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kRows = 16;  // of a block on the diagonal

template <int kKeySize>
struct Numbers {
  static constexpr int kParts = kThreads / kKeySize;       // threads of a channel
  static constexpr int kGroups = 2 * kThreads / kKeySize;  // of rows of a state
  float beta[kTokens];
  float norm_q[kTokens];
  float norm_k[kTokens];
  float halves[2][kTokens];
  float of_beta[2][kTokens];
  float products[kTokens];  // rows of Y . W
  // By channels: S . dS, of some rows and of all; what the sums of the gates have, of a part of the
  // tokens; and what is added to the state.
  float states[kGroups][kKeySize];
  float all_states[kKeySize];
  float later[kParts][kKeySize];
  float before[kParts][kKeySize];
};
static_assert(sizeof(Numbers<128>) <= kDeltaChannelNumbers * 4);
static_assert(sizeof(Numbers<64>) <= kDeltaChannelNumbers * 4);

template <int kKeySize>
struct Memory {
  using Tiles = DeltaGradientTiles<kKeySize>;
  static constexpr int kSumPitch = kKeySize + 4;   // floats
  static constexpr int kPartPitch = kKeySize + 8;  // likewise
  char* base;

  __device__ __forceinline__ char* q() const { return base; }
  __device__ __forceinline__ char* k() const { return base + Tiles::kTile; }
  __device__ __forceinline__ DeltaGradientStage stage() const {
    return Tiles::stage(base + 2 * Tiles::kTile);
  }
  // M and N.
  __device__ __forceinline__ char* matrix(int index) const {
    return base + 2 * Tiles::kTile + Tiles::kStage + index * kValueTile;
  }
  // The gates' sums, base 2; later their gradients.
  __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(matrix(2)); }
  __device__ __forceinline__ float* sum(int row, int column) const {
    return sums() + row * kSumPitch + column;
  }
  __device__ __forceinline__ float2 two_sums(int row, int column) const {
    return *reinterpret_cast<const float2*>(sum(row, column));
  }
  // First what the gates' sums have of all but the diagonal, and of the keys that are added to the
  // state; then the diagonal's parts of dQ and of dK.
  __device__ __forceinline__ float* part(int index, int row, int column) const {
    return sums() + kTokens * kSumPitch + index * kTokens * kPartPitch + row * kPartPitch + column;
  }
  __device__ __forceinline__ float2& two_parts(int index, int row, int column) const {
    return *reinterpret_cast<float2*>(part(index, row, column));
  }
  __device__ __forceinline__ Numbers<kKeySize>& numbers() const {
    return *reinterpret_cast<Numbers<kKeySize>*>(part(2, 0, 0));
  }
};

__device__ __forceinline__ float2 exp_of(float2 x) { return {exp2_approx(x.x), exp2_approx(x.y)}; }

// 16 elements of a row of a tile.
template <typename Format>
__device__ __forceinline__ void load_row(const char* at, float (&values)[kRows]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t words[4];
    float part[8];
    load_vector(words, at + i * 16);
    unpack<Format>(words, part);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[8 * i + j] = part[j];
  }
}

// A channel of a block on the diagonal, from token `first` on: its parts of dQ and dK, and what the
// gates have, to the sums. `later` is what the sums of later tokens have, `before` what tokens
// before the block add to the state.
template <typename Format, int kKeySize>
__device__ __forceinline__ void go_along_diagonal(const Memory<kKeySize>& memory, int first,
                                                  int channel, float& later, float before) {
  constexpr int kPitch = Memory<kKeySize>::Tiles::kPitch;
  float q[kRows], k[kRows], decays[kRows], of_keys[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int place = (first + i) * kPitch + channel * 2;
    q[i] = load_element<Format>(memory.q() + place);
    k[i] = load_element<Format>(memory.k() + place);
    decays[i] = *memory.sum(first + i, channel);
    of_keys[i] = 0.0f;
  }
#pragma unroll
  for (int i = kRows - 1; i > 0; --i) decays[i] = exp2_approx(decays[i] - decays[i - 1]);
  // The terms that tokens of the block add to the state, before each token.
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    *memory.sum(first + i, channel) = before;
    before += *memory.part(1, first + i, channel);
  }
#pragma unroll
  for (int i = kRows - 1; i >= 0; --i) {
    float m[kRows], n[kRows];
    const int place = (first + i) * kValuePitch + first * 2;
    load_row<Format>(memory.matrix(0) + place, m);
    load_row<Format>(memory.matrix(1) + place, n);
    float of_q = 0.0f, of_k = 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) {
      if (j > 0) of_q *= decays[j], of_k *= decays[j];
      of_q = fmaf(m[j], k[j], of_q), of_k = fmaf(n[j], k[j], of_k);
    }
    if (i > 0) of_q *= decays[i], of_k *= decays[i];
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      if (i + 1 < kRows) of_keys[j] *= decays[(i + 1) % kRows];
      if (j < i) of_keys[j] = fmaf(m[j], q[i], fmaf(n[j], k[i], of_keys[j]));
    }
    later += *memory.part(0, first + i, channel) + fmaf(q[i], of_q, k[i] * (of_k - of_keys[i]));
    *memory.sum(first + i, channel) += later;
    // A token's product with itself has no gate.
    *memory.part(0, first + i, channel) = fmaf(m[i], k[i], of_q);
    *memory.part(1, first + i, channel) = fmaf(m[i], q[i], of_k + of_keys[i]);
  }
}

template <typename Format, int kKeySize>
__global__ void __launch_bounds__(kThreads, 1)
    gated_delta_rule_channel_gradients(const __grid_constant__ DeltaBackArgs args) {
  using Shared = Memory<kKeySize>;
  constexpr int kPitch = Shared::Tiles::kPitch;
  constexpr int kTiles = kKeySize / 2 / 8;  // of a warp: half of the columns
  constexpr int kParts = Numbers<kKeySize>::kParts, kGroups = Numbers<kKeySize>::kGroups;
  constexpr int kOwn = kTokens / kParts;  // tokens of a thread
  extern __shared__ __align__(16) char shared[];
  const Shared memory{shared};
  Numbers<kKeySize>& numbers = memory.numbers();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int key_head = blockIdx.y, group = args.v_heads / args.k_heads;
  const int slices = (args.value_size + kSlice - 1) / kSlice;
  grid_dependency_wait();
  grid_dependency_launch();
  clear_gradients<Format, kKeySize>(args, key_head, kKeySize);
  const DeltaChunk chunk = delta_chunk(args, blockIdx.x);
  if (chunk.rows == 0) return;

  const auto place_of = [&](int head) {
    return static_cast<int64_t>(blockIdx.x) * args.v_heads + head;
  };
  const DeltaGradientStage stage = memory.stage();
  const auto copy = [&](int count) {
    const int head = key_head * group + count / slices;
    copy_stage<kKeySize>(args, stage, chunk, place_of(head), head, count % slices);
  };
  load_keys<Format, kKeySize>(args, chunk, key_head, memory.q(), memory.k(), numbers.norm_q,
                              numbers.norm_k, [&] { copy(0); });

  // A warp has 16 rows, and half of the columns.
  const int row = warp / 2 * 16, half = warp % 2;
  const int column = half * (kTokens / 2), key = half * (kKeySize / 2);
  const int across = lane / 4, own_row = row + across, along = lane % 4 * 2;
  const uint32_t q_at = shared_address(memory.q()), k_at = shared_address(memory.k());
  float dq[kTiles][4] = {}, dk[kTiles][4] = {};

#pragma unroll 1
  for (int member = 0; member < group; ++member) {
    const int head = key_head * group + member;
    const int64_t place = place_of(head);
    sum_gates<kKeySize>(args, chunk, head, memory.sums());
    if (thread >= kThreads - kTokens) {
      const int token = thread - (kThreads - kTokens);
      numbers.beta[token] =
          load_beta<Format>(args, (chunk.first + token) * args.v_heads + head, token < chunk.rows);
    }
    {
      float scores[kMatrixTiles][4] = {}, solved[kMatrixTiles][4] = {};  // dO U^T and Y U^T
      float product = 0.0f, states[2] = {};
#pragma unroll 1
      for (int slice = 0; slice < slices; ++slice) {
        async_copy_wait<0>();
        __syncthreads();
        const uint32_t grad = shared_address(stage.grad), written = shared_address(stage.written);
        const uint32_t rest = shared_address(stage.grad_rest);
        multiply_lower<Format, kSlice, 1>(scores, grad, written, kValuePitch, row, column);
        multiply_lower<Format, kSlice, 1>(solved, rest, written, kValuePitch, row, column);
        // Products with the states: to dq of the results' gradients, to dk of Y and of U.
        const auto add_product = [&](int which, uint32_t left, const char* right, const char* own,
                                     float (&to)[kTiles][4]) {
          float sums[kTiles][4] = {};
          multiply_rows<Format, false>(sums, left, kValuePitch, row, shared_address(right), kPitch,
                                       key, 0, kSlice);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int token = own_row + 8 * i, at = key + tile * 8 + along;
              float2 gates = memory.two_sums(token, at);
              if (which == 2) {
                const float2 last = memory.two_sums(kTokens - 1, at);
                gates = {last.x - gates.x, last.y - gates.y};
              }
              const float2 decay = exp_of(gates);
              const float factor = which == 0   ? args.scale
                                   : which == 1 ? -numbers.beta[token]
                                                : 1.0f;
              const float a = factor * decay.x * sums[tile][2 * i];
              const float b = factor * decay.y * sums[tile][2 * i + 1];
              to[tile][2 * i] += a, to[tile][2 * i + 1] += b;
              const float2 pair = load_pair<Format>(own, kPitch, token, at);
              float2& sum = memory.two_parts(which == 2, token, at);
              const bool first = which != 1 && slice == 0;
              sum.x = fmaf(pair.x, a, first ? 0.0f : sum.x);
              sum.y = fmaf(pair.y, b, first ? 0.0f : sum.y);
            }
          }
        };
        add_product(0, grad, stage.state, memory.q(), dq);
        add_product(1, rest, stage.state, memory.k(), dk);
        add_product(2, written, stage.grad_state, memory.k(), dk);
        product += multiply_rest<Format>(args, stage.grad_rest, place, slice);
        const int pair = thread % (kKeySize / 2) * 2, first = thread / (kKeySize / 2);
#pragma unroll 4
        for (int i = first; i < kSlice; i += kGroups) {
          const float2 a = load_pair<Format>(stage.state, kPitch, i, pair);
          const float2 b = load_pair<Format>(stage.grad_state, kPitch, i, pair);
          states[0] = fmaf(a.x, b.x, states[0]), states[1] = fmaf(a.y, b.y, states[1]);
        }
        __syncthreads();
        const int next = member * slices + slice + 1;
        if (next < group * slices) copy(next);
        async_copy_commit();
      }

      // M and N, and the betas' part that is a sum over rows of Y U^T.
      const char* const products = args.products + place * kDeltaMatrixBytes;
      float of_beta[2] = {};
#pragma unroll
      for (int tile = 0; tile < kMatrixTiles; ++tile) {
        const int at = column + tile * 8 + along;
        if (at - along > row + 8) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int token = own_row + 8 * i;
          const float2 kk = load_pair<Format>(products, kTokens * 2, token, at);
          float m[2], n[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int e = 2 * i + j;
            const float below = at + j < token ? solved[tile][e] : 0.0f;
            m[j] = at + j <= token ? args.scale * scores[tile][e] : 0.0f;
            n[j] = -numbers.beta[token] * below;
            if (at + j < token) of_beta[i] = fmaf(-below, j == 0 ? kk.x : kk.y, of_beta[i]);
          }
          const int to = token * kValuePitch + at * 2;
          *reinterpret_cast<uint32_t*>(memory.matrix(0) + to) = pack_pair<Format>(m[0], m[1]);
          *reinterpret_cast<uint32_t*>(memory.matrix(1) + to) = pack_pair<Format>(n[0], n[1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        of_beta[i] = lanes_reduce<4>(of_beta[i], Sum());
        if (lane % 4 == 0) numbers.of_beta[half][own_row + 8 * i] = of_beta[i];
      }
      product = lanes_reduce<4>(product, Sum());
      if (lane % 4 == 0) numbers.products[thread / 4] = product;
      const int pair = thread % (kKeySize / 2) * 2;
      numbers.states[thread / (kKeySize / 2)][pair] = states[0];
      numbers.states[thread / (kKeySize / 2)][pair + 1] = states[1];
    }
    __syncthreads();

    // Blocks below the diagonal: with earlier tokens, decayed to the first of the rows.
    const uint32_t m = shared_address(memory.matrix(0)), n = shared_address(memory.matrix(1));
    // Two tokens of a channel, of a word of a right operand, with their decays to `reference`.
    const auto decayed = [&](uint32_t word, float2 factors) {
      float pair[2];
      Format::unpack(word, pair);
      return pack_pair<Format>(pair[0] * factors.x, pair[1] * factors.y);
    };
    if (row > 0) {
      float of_q[kTiles][4] = {}, of_k[kTiles][4] = {};
#pragma unroll 1
      for (int depth = 0; depth < row; depth += 16) {
        uint32_t left_m[4], left_n[4];
        load_matrices<false>(left_m, block_by_columns(m, kValuePitch, row, depth));
        load_matrices<false>(left_n, block_by_columns(n, kValuePitch, row, depth));
#pragma unroll
        for (int pair = 0; pair < kTiles / 2; ++pair) {
          uint32_t right[4];
          load_matrices<true>(right, block_by_columns(k_at, kPitch, depth, key + pair * 16));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = key + pair * 16 + i / 2 * 8 + across;
            const int token = depth + along + i % 2 * 8;
            const float to = *memory.sum(row, at);
            right[i] = decayed(
                right[i], exp_of({to - *memory.sum(token, at), to - *memory.sum(token + 1, at)}));
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            warp_multiply_add<Format>(of_q[2 * pair + i], left_m[0], left_m[1], left_m[2],
                                      left_m[3], right[2 * i], right[2 * i + 1]);
            warp_multiply_add<Format>(of_k[2 * pair + i], left_n[0], left_n[1], left_n[2],
                                      left_n[3], right[2 * i], right[2 * i + 1]);
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int at = key + tile * 8 + along;
        const float2 from = memory.two_sums(row, at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int token = own_row + 8 * i;
          const float2 sum = memory.two_sums(token, at);
          const float2 decay = exp_of({sum.x - from.x, sum.y - from.y});
          const float2 q = load_pair<Format>(memory.q(), kPitch, token, at);
          const float2 k = load_pair<Format>(memory.k(), kPitch, token, at);
          const float2 to_q = {decay.x * of_q[tile][2 * i], decay.y * of_q[tile][2 * i + 1]};
          const float2 to_k = {decay.x * of_k[tile][2 * i], decay.y * of_k[tile][2 * i + 1]};
          dq[tile][2 * i] += to_q.x, dq[tile][2 * i + 1] += to_q.y;
          dk[tile][2 * i] += to_k.x, dk[tile][2 * i + 1] += to_k.y;
          float2& of_gates = memory.two_parts(0, token, at);
          of_gates.x += fmaf(q.x, to_q.x, k.x * to_k.x);
          of_gates.y += fmaf(q.y, to_q.y, k.y * to_k.y);
        }
      }
    }
    // With later tokens, decayed from the first behind the rows.
    const int behind = row + 16;
    if (behind < kTokens) {
      float of_k[kTiles][4] = {};
#pragma unroll 1
      for (int depth = behind; depth < kTokens; depth += 16) {
        uint32_t left_m[4], left_n[4];
        load_matrices<true>(left_m, block_by_rows(m, kValuePitch, depth, row));
        load_matrices<true>(left_n, block_by_rows(n, kValuePitch, depth, row));
#pragma unroll
        for (int pair = 0; pair < kTiles / 2; ++pair) {
          uint32_t right_q[4], right_k[4];
          load_matrices<true>(right_q, block_by_columns(q_at, kPitch, depth, key + pair * 16));
          load_matrices<true>(right_k, block_by_columns(k_at, kPitch, depth, key + pair * 16));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = key + pair * 16 + i / 2 * 8 + across;
            const int token = depth + along + i % 2 * 8;
            const float from = *memory.sum(behind, at);
            const float2 factors =
                exp_of({*memory.sum(token, at) - from, *memory.sum(token + 1, at) - from});
            right_q[i] = decayed(right_q[i], factors);
            right_k[i] = decayed(right_k[i], factors);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            warp_multiply_add<Format>(of_k[2 * pair + i], left_m[0], left_m[1], left_m[2],
                                      left_m[3], right_q[2 * i], right_q[2 * i + 1]);
            warp_multiply_add<Format>(of_k[2 * pair + i], left_n[0], left_n[1], left_n[2],
                                      left_n[3], right_k[2 * i], right_k[2 * i + 1]);
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int at = key + tile * 8 + along;
        const float2 to = memory.two_sums(behind, at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int token = own_row + 8 * i;
          const float2 sum = memory.two_sums(token, at);
          const float2 decay = exp_of({to.x - sum.x, to.y - sum.y});
          const float2 k = load_pair<Format>(memory.k(), kPitch, token, at);
          const float2 to_k = {decay.x * of_k[tile][2 * i], decay.y * of_k[tile][2 * i + 1]};
          dk[tile][2 * i] += to_k.x, dk[tile][2 * i + 1] += to_k.y;
          float2& of_gates = memory.two_parts(0, token, at);
          of_gates.x -= k.x * to_k.x;
          of_gates.y -= k.y * to_k.y;
        }
      }
    }
    __syncthreads();

    // Blocks on the diagonal, and sums over tokens, by channels.
    const int channel = thread % kKeySize, part = thread / kKeySize;
    {
      if (part == kParts - 1) {
        float all = 0.0f;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) all += numbers.states[i][channel];
        numbers.all_states[channel] = all * exp2_approx(*memory.sum(kTokens - 1, channel));
      }
      float before = 0.0f, in_last = 0.0f, later = 0.0f;
#pragma unroll 1
      for (int i = 0; i < kOwn; ++i) {
        const float one = *memory.part(1, part * kOwn + i, channel);
        if (i < kOwn - kRows)
          before += one;
        else
          in_last += one;
      }
      numbers.before[part][channel] = before + in_last;
#pragma unroll 1
      for (int first = kOwn - kRows; first >= 0; first -= kRows) {
        go_along_diagonal<Format, kKeySize>(memory, part * kOwn + first, channel, later,
                                            first == 0 ? 0.0f : before);
      }
      numbers.later[part][channel] = later;
    }
    __syncthreads();

    float others = numbers.all_states[channel];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      others += i < part ? numbers.before[i][channel] : i > part ? numbers.later[i][channel] : 0.0f;
    }
#pragma unroll 4
    for (int i = 0; i < kOwn; ++i) {
      const int token = part * kOwn + i;
      if (token >= chunk.rows) break;
      args.dg[((chunk.first + token) * args.v_heads + head) * kKeySize + channel] =
          *memory.sum(token, channel) + others;
    }
    if (thread < chunk.rows) {
      store_beta<Format>(
          args, (chunk.first + thread) * args.v_heads + head,
          numbers.products[thread] + numbers.of_beta[0][thread] + numbers.of_beta[1][thread]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = own_row + 8 * i, at = key + tile * 8 + along;
        const float2 to_q = memory.two_parts(0, token, at), to_k = memory.two_parts(1, token, at);
        dq[tile][2 * i] += to_q.x, dq[tile][2 * i + 1] += to_q.y;
        dk[tile][2 * i] += to_k.x, dk[tile][2 * i + 1] += to_k.y;
      }
    }
    __syncthreads();
  }
  store_keys<Format, kKeySize>(args, args.dq, chunk, key_head, memory.q(), numbers.norm_q,
                               numbers.halves, dq);
  __syncthreads();
  store_keys<Format, kKeySize>(args, args.dk, chunk, key_head, memory.k(), numbers.norm_k,
                               numbers.halves, dk);
}

#define TIERCEL_GRADIENTS(dtype, size)                                                    \
  {DeltaPart::kGradients, size, DType::k##dtype, true,                                    \
   Kernel("gated_delta_rule_channel_gradients<" #dtype ", K=" #size ">",                  \
          reinterpret_cast<const void*>(gated_delta_rule_channel_gradients<dtype, size>), \
          delta_channel_gradients_smem(size))}

const DeltaRuleKernel kKernels[] = {
    TIERCEL_GRADIENTS(BFloat16, 64),
    TIERCEL_GRADIENTS(BFloat16, 128),
    TIERCEL_GRADIENTS(Float16, 64),
    TIERCEL_GRADIENTS(Float16, 128),
};

}  // namespace

const DeltaRuleKernel* delta_channel_gradients_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
