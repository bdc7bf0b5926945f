// SPDX-License-Identifier: Apache-2.0
// Gradients of queries, keys, gates and betas of a chunk. A block has a chunk and a head of keys,
// and goes through the heads of values that share it, so that their gradients are added in order.
//
// From gated_delta_rule_passes come, of each head, the state S before the chunk and its gradient dS
// after it, W, U and Y; dO are the results' gradients. With D[i][j] = exp(G[i] - G[j]):
//   M = tril(dO U^T) D scale,  N = -strict tril(Y U^T) beta[i] D
//   dQ = scale exp(G) dO S^T + M K
//   dK = -beta exp(G) Y S^T + exp(G[63] - G) U dS^T + M^T Q + (N + N^T) K
//   dbeta = rows of Y . W - rows of (Y U^T) . (K K^T D)
// A gate's gradient is what its sum G[i] has: rows less columns of M . Q K^T + N . K K^T, and the
// terms with S and dS; then summed from the end of the chunk.
#include <cstdint>

#include "kernels/delta/chunks.cuh"
#include "kernels/delta/solve.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kTokens = kDeltaChunk;
constexpr int kThreads = kDeltaGradientThreads;
constexpr int kSlice = kDeltaSlice;                  // columns of values at a time
constexpr int kValuePitch = kSlice * 2 + kDeltaPad;  // bytes
constexpr int kValueTile = kTokens * kValuePitch;    // likewise
constexpr int kMatrixTiles = kTokens / 2 / 8;        // of a warp: half of 64 columns

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
struct Memory {
  static constexpr int kPitch = kKeySize * 2 + kDeltaPad;
  static constexpr int kTile = kTokens * kPitch;
  static constexpr int kStage = 3 * kValueTile + 2 * kTile;
  char* base;

  struct Stage {
    char *grad, *written, *grad_rest, *state, *grad_state;
  };

  __device__ __forceinline__ char* q() const { return base; }
  __device__ __forceinline__ char* k() const { return base + kTile; }
  __device__ __forceinline__ Stage stage(int count) const {
    char* const at = base + 2 * kTile + count % 2 * kStage;
    char* const state = at + 3 * kValueTile;
    return {at, at + kValueTile, at + 2 * kValueTile, state, state + kTile};
  }
  // M and N.
  __device__ __forceinline__ char* matrix(int index) const {
    return base + 2 * kTile + 2 * kStage + index * kValueTile;
  }
  __device__ __forceinline__ Numbers& numbers() const {
    return *reinterpret_cast<Numbers*>(matrix(2));
  }
};

// A slice of the values of a head.
template <int kKeySize>
__device__ __forceinline__ void copy_stage(const DeltaBackArgs& args,
                                           const typename Memory<kKeySize>::Stage& stage,
                                           const DeltaChunk& chunk, int64_t place, int head,
                                           int slice) {
  const int column = slice * kSlice, vectors = min(kSlice, args.value_size - column) / 8;
  const int64_t row_bytes = args.value_size * 2;
  const int64_t values = place * kTokens * row_bytes + column * 2;
  const int64_t states = (place * args.value_size + column) * kKeySize * 2;
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    const char* const from = i == 0 ? delta_row(args, args.grad, chunk.first, head) + column * 2
                                    : (i == 1 ? args.written : args.grad_rest) + values;
    copy_rows<kSlice * 2>(shared_address(stage.grad) + i * kValueTile, from,
                          i == 0 ? args.grad.token : row_bytes, i == 0 ? chunk.rows : kTokens,
                          threadIdx.x, kThreads, vectors);
  }
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    copy_rows<kKeySize * 2>(shared_address(stage.state) + i * Memory<kKeySize>::kTile,
                            (i == 0 ? args.states : args.grad_states) + states, kKeySize * 2,
                            vectors * 8, threadIdx.x, kThreads);
  }
}

// Two neighbours of a tile's row.
template <typename Format>
__device__ __forceinline__ float2 load_pair(const char* tile, int pitch, int row, int column) {
  float pair[2];
  Format::unpack(*reinterpret_cast<const uint32_t*>(tile + row * pitch + column * 2), pair);
  return {pair[0], pair[1]};
}

// sums += a b^T of tiles with rows along kDepth columns: 16 rows of a from `row` on, and rows of b
// from `column` on that are not beyond those.
template <typename Format, int kDepth>
__device__ __forceinline__ void multiply_lower(float (&sums)[kMatrixTiles][4], uint32_t a,
                                               uint32_t b, int pitch, int row, int column) {
#pragma unroll 2
  for (int depth = 0; depth < kDepth; depth += 16) {
    uint32_t left[4];
    load_matrices<false>(left, block_by_columns(a, pitch, row, depth));
#pragma unroll
    for (int pair = 0; pair < kMatrixTiles / 2; ++pair) {
      if (column + pair * 16 > row) continue;
      uint32_t right[4];
      load_matrices<false>(right, block_by_rows(b, pitch, column + pair * 16, depth));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        warp_multiply_add<Format>(sums[2 * pair + i], left[0], left[1], left[2], left[3],
                                  right[2 * i], right[2 * i + 1]);
      }
    }
  }
}

// sums += a b, along the rows `first` to `last` of b: 16 rows of a from `row` on or, if kTurned,
// columns of a; and columns of b from `column` on.
template <typename Format, bool kTurned, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&sums)[kTiles][4], uint32_t a, int pitch_a,
                                              int row, uint32_t b, int pitch_b, int column,
                                              int first, int last) {
#pragma unroll 1
  for (int depth = first; depth < last; depth += 16) {
    uint32_t left[4];
    if (kTurned) {
      load_matrices<true>(left, block_by_rows(a, pitch_a, depth, row));
    } else {
      load_matrices<false>(left, block_by_columns(a, pitch_a, row, depth));
    }
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      uint32_t right[4];
      load_matrices<true>(right, block_by_columns(b, pitch_b, depth, column + pair * 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        warp_multiply_add<Format>(sums[2 * pair + i], left[0], left[1], left[2], left[3],
                                  right[2 * i], right[2 * i + 1]);
      }
    }
  }
}

// Gates and betas of tokens without a sequence have no gradient.
template <typename Format>
__device__ __forceinline__ void store_beta(const DeltaBackArgs& args, int64_t place, float value) {
  if (args.beta_float) {
    reinterpret_cast<float*>(args.dbeta)[place] = value;
  } else {
    store_element<Format>(args.dbeta + place * 2, value);
  }
}

template <typename Format>
__device__ __forceinline__ void clear_numbers(const DeltaBackArgs& args, int first_head,
                                              int heads) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int64_t begin = delta_start(args, 0), end = delta_start(args, args.count);
  for (int i = threadIdx.x; i < kTokens * heads; i += kThreads) {
    const int64_t token = first + i / heads;
    if (token >= args.tokens || (token >= begin && token < end)) continue;
    const int64_t place = token * args.v_heads + first_head + i % heads;
    args.dg[place] = 0.0f;
    store_beta<Format>(args, place, 0.0f);
  }
}

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
  // Sums of this lane's tokens and later ones, and of tokens before them.
  float later = of_gate[0] + of_gate[1], before = of_state[0] + of_state[1];
  const float own = before;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const float other = __shfl_down_sync(kFullWarp, later, lanes);
    if (lane + lanes < 32) later += other;
    const float earlier = __shfl_up_sync(kFullWarp, before, lanes);
    if (lane >= lanes) before += earlier;
  }
  before -= own;
  const float gates[2] = {later + before + states,
                          later - of_gate[0] + before + of_state[0] + states};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    if (token < chunk.rows) args.dg[(chunk.first + token) * args.v_heads + head] = gates[i];
  }
}

// Divides the rows of a tile by their lengths, a half of a row a thread.
template <typename Format, int kKeySize>
__device__ __forceinline__ void normalize_row(char* tile, int thread, float norm) {
  char* at = tile + thread / 2 * (kKeySize * 2 + kDeltaPad) + thread % 2 * kKeySize;
#pragma unroll
  for (int i = 0; i < kKeySize / 16; ++i) {
    uint32_t words[4];
    float values[8];
    load_vector(words, at + i * 16);
    unpack<Format>(words, values);
#pragma unroll
    for (float& value : values) value *= norm;
    pack<Format>(values, words);
    store_vector(at + i * 16, words);
  }
}

template <typename Format, int kKeySize>
__global__ void __launch_bounds__(kThreads, 1)
    gated_delta_rule_gradients(const __grid_constant__ DeltaBackArgs args) {
  using Shared = Memory<kKeySize>;
  constexpr int kPitch = Shared::kPitch;
  constexpr int kTiles = kKeySize / 2 / 8;  // of a warp: half of the columns
  extern __shared__ __align__(16) char shared[];
  const Shared memory{shared};
  Numbers& numbers = memory.numbers();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key_head = blockIdx.y, group = args.v_heads / args.k_heads;
  const int slices = (args.value_size + kSlice - 1) / kSlice;
  grid_dependency_wait();
  grid_dependency_launch();
  if (args.starts != nullptr) {
#pragma unroll 1
    for (int i = 0; i < 3; ++i) {
      const bool of_v = i == 2;
      clear_strays<kThreads>(args,
                             i == 0 ? args.dq
                             : of_v ? args.dv
                                    : args.dk,
                             of_v ? key_head * group : key_head, of_v ? group : 1,
                             of_v ? args.value_size : kKeySize);
    }
    clear_numbers<Format>(args, key_head * group, group);
  }
  const DeltaChunk chunk = delta_chunk(args, blockIdx.x);
  if (chunk.rows == 0) return;

  const auto copy = [&](int count) {
    const int head = key_head * group + count / slices;
    const int64_t place = static_cast<int64_t>(blockIdx.x) * args.v_heads + head;
    copy_stage<kKeySize>(args, memory.stage(count), chunk, place, head, count % slices);
  };
  const uint32_t q_at = shared_address(memory.q()), k_at = shared_address(memory.k());
  copy_rows<kKeySize * 2>(q_at, delta_row(args, args.q, chunk.first, key_head), args.q.token,
                          chunk.rows, threadIdx.x, kThreads);
  copy_rows<kKeySize * 2>(k_at, delta_row(args, args.k, chunk.first, key_head), args.k.token,
                          chunk.rows, threadIdx.x, kThreads);
  async_copy_commit();
  copy(0);
  async_copy_commit();
  async_copy_wait<1>();
  __syncthreads();
  {
    const int thread = threadIdx.x % kDeltaChunkThreads;
    const bool of_k = threadIdx.x >= kDeltaChunkThreads;
    char* const tile = of_k ? memory.k() : memory.q();
    float norm = 1.0f;
    if (args.l2norm) {
      norm = row_norm<Format, kKeySize>(tile, thread);
      normalize_row<Format, kKeySize>(tile, thread, norm);
    }
    if (thread % 2 == 0) (of_k ? numbers.norm_k : numbers.norm_q)[thread / 2] = norm;
  }
  __syncthreads();

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
      const int token = threadIdx.x / 4, first = threadIdx.x % 4 * 16;
      if (slice * kSlice + first < args.value_size) {
        const int64_t place = static_cast<int64_t>(blockIdx.x) * args.v_heads + head;
        const char* const from =
            args.rest + ((place * kTokens + token) * args.value_size + slice * kSlice + first) * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4], b[4];
          float x[8], y[8];
          load_vector(a, from + i * 16);
          load_vector(b, stage.grad_rest + token * kValuePitch + first * 2 + i * 16);
          unpack<Format>(a, x);
          unpack<Format>(b, y);
#pragma unroll
          for (int j = 0; j < 8; ++j) product = fmaf(x[j], y[j], product);
        }
      }
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

  // With q = x / |x| the gradient of x is (dq - q (q . dq)) / |x|.
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    auto& grad = part == 0 ? dq : dk;
    const char* const tile_at = part == 0 ? memory.q() : memory.k();
    float (&halves)[2][kTokens] = part == 0 ? numbers.of_gate : numbers.of_state;
    if (args.l2norm) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float dot = 0.0f;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const float2 own =
              load_pair<Format>(tile_at, kPitch, own_row + 8 * i, key + tile * 8 + along);
          dot = fmaf(own.x, grad[tile][2 * i], fmaf(own.y, grad[tile][2 * i + 1], dot));
        }
        dot = lanes_reduce<4>(dot, Sum());
        if (lane % 4 == 0) halves[half][own_row + 8 * i] = dot;
      }
      __syncthreads();
    }
    const DeltaHeads& of = part == 0 ? args.dq : args.dk;
    char* const to = const_cast<char*>(delta_row(args, of, chunk.first, key_head)) + key * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = own_row + 8 * i;
      if (token >= chunk.rows) continue;
      const float dot = args.l2norm ? halves[0][token] + halves[1][token] : 0.0f;
      const float norm = (part == 0 ? numbers.norm_q : numbers.norm_k)[token];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float2 own = load_pair<Format>(tile_at, kPitch, token, key + tile * 8 + along);
        *reinterpret_cast<uint32_t*>(to + token * of.token + (tile * 8 + along) * 2) =
            pack_pair<Format>(norm * fmaf(-own.x, dot, grad[tile][2 * i]),
                              norm * fmaf(-own.y, dot, grad[tile][2 * i + 1]));
      }
    }
  }
}

#define TIERCEL_GRADIENTS(dtype, size)                                            \
  {DeltaPart::kGradients, size, DType::k##dtype, false,                           \
   Kernel("gated_delta_rule_gradients<" #dtype ", K=" #size ">",                  \
          reinterpret_cast<const void*>(gated_delta_rule_gradients<dtype, size>), \
          delta_gradients_smem(size))}

const DeltaRuleKernel kKernels[] = {
    TIERCEL_GRADIENTS(BFloat16, 128),
    TIERCEL_GRADIENTS(Float16, 128),
};

}  // namespace

const DeltaRuleKernel* delta_gradients_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
