// SPDX-License-Identifier: Apache-2.0
// A step of the gated delta rule: a block has 32 columns of a head's state in registers, reads and
// writes them once, and goes through the tokens in between.
#include <cstdint>

#include "kernels/delta/delta_kernels.h"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr int kColumns = 4;                             // of a thread
constexpr int kLanes = kDeltaDecodeColumns / kColumns;  // that share a row
constexpr int kWarps = kDeltaDecodeThreads / 32;
constexpr int kGroups = kDeltaDecodeThreads / kLanes;  // of rows

template <int kWords>
__device__ __forceinline__ void unpack_halves(const uint32_t (&words)[kWords], bool float16,
                                              float (&values)[2 * kWords]) {
  if (float16) {
    unpack<Float16>(words, values);
  } else {
    unpack<BFloat16>(words, values);
  }
}

__device__ __forceinline__ void load_state(const char* address, Float32, float (&values)[4]) {
  uint32_t words[4];
  load_vector(words, address);
  unpack<Float32>(words, values);
}
__device__ __forceinline__ void load_state(const char* address, BFloat16, float (&values)[4]) {
  uint32_t words[2];
  load_vector(words, address);
  unpack<BFloat16>(words, values);
}
template <typename State>
__device__ __forceinline__ void store_state(char* address, const float (&values)[4]) {
  uint32_t words[State::kBytes];
  pack<State>(values, words);
  store_vector(address, words);
}

// Sums over the rows of a state, of the block's columns and of the keys and queries alone.
struct Sums {
  float of_k[kDeltaDecodeColumns];  // the state's product with the key
  float of_q[kDeltaDecodeColumns];
  float alone[4];  // q k, q q, k k
};

template <typename State, int kKeySize>
__global__ void __launch_bounds__(kDeltaDecodeThreads, 4)
    gated_delta_rule_decode(const __grid_constant__ DeltaDecodeArgs args) {
  constexpr int kRows = kKeySize / kGroups;  // of a thread
  __shared__ alignas(16) Sums shared[2][kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slices = args.value_size / kDeltaDecodeColumns;
  const int slice = blockIdx.x % slices;
  const int head = blockIdx.x / slices % args.v_heads;
  const int64_t sequence = blockIdx.x / slices / args.v_heads;
  const int in_block = lane % kLanes * kColumns;
  const int column = slice * kDeltaDecodeColumns + in_block;
  const int first_row = (lane / kLanes + warp * (32 / kLanes)) * kRows;
  const int key_head = head / (args.v_heads / args.k_heads);
  const int64_t offset =
      ((static_cast<int64_t>(head) * kKeySize + first_row) * args.value_size + column) *
      State::kBytes;
  const int64_t row_stride = static_cast<int64_t>(args.value_size) * State::kBytes;
  grid_dependency_wait();
  grid_dependency_launch();

  const auto place = [&](int index) -> char* {
    const int64_t slot =
        args.indices == nullptr ? sequence : args.indices[sequence * args.columns + index];
    if (slot < 0 || slot >= args.slots) return nullptr;
    return args.states + slot * args.slot_stride + offset;
  };
  int read_from = 0;
  if (args.columns > 1 && args.accepted != nullptr) {
    read_from = min(max(args.accepted[sequence] - 1, 0), args.columns - 1);
  }
  float state[kRows][kColumns];
  if (const char* from = place(read_from)) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_state(from + r * row_stride, State(), state[r]);
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (float& value : state[r]) value = 0.0f;
    }
  }

  const auto store = [&](int index) {
    char* to = place(index);
    if (to == nullptr) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) store_state<State>(to + r * row_stride, state[r]);
  };
  const auto at = [&](const DeltaHeads& heads, int token, int of_head, int element) {
    return heads.data + sequence * heads.batch + token * heads.token + of_head * heads.head +
           element * 2;
  };

#pragma unroll 1
  for (int token = 0; token < args.tokens; ++token) {
    const int64_t number = (sequence * args.tokens + token) * args.v_heads + head;
    // All loads before anything waits for one.
    uint32_t k_words[kRows / 2], q_words[kRows / 2], v_words[kColumns / 2], beta_word;
    float gates[kRows];
    load_vector(k_words, at(args.k, token, key_head, first_row));
    load_vector(q_words, at(args.q, token, key_head, first_row));
    load_vector(v_words, at(args.v, token, head, column));
    if (args.beta_float) {
      beta_word = *reinterpret_cast<const uint32_t*>(args.beta + number * 4);
    } else {
      beta_word = *reinterpret_cast<const uint16_t*>(args.beta + number * 2);
    }
    if (args.per_channel) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) gates[r] = args.g[number * kKeySize + first_row + r];
    } else {
      gates[0] = args.g[number];
    }
    float k[kRows], q[kRows], v[kColumns];
    unpack_halves(k_words, args.float16, k);
    unpack_halves(q_words, args.float16, q);
    unpack_halves(v_words, args.float16, v);
    float beta = __uint_as_float(beta_word);
    if (!args.beta_float) {
      beta = args.float16 ? Float16::from_bits(beta_word) : BFloat16::from_bits(beta_word);
    }
    float of_k[kColumns] = {}, of_q[kColumns] = {};
    float alone[3] = {};
    float decay = exp2_approx(kLog2E * gates[0]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (args.per_channel) decay = exp2_approx(kLog2E * gates[r]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        state[r][c] *= decay;
        of_k[c] = fmaf(k[r], state[r][c], of_k[c]);
        of_q[c] = fmaf(q[r], state[r][c], of_q[c]);
      }
      alone[0] = fmaf(q[r], k[r], alone[0]);
      alone[1] = fmaf(q[r], q[r], alone[1]);
      alone[2] = fmaf(k[r], k[r], alone[2]);
    }
    const auto over_lanes = [](float& value) {
#pragma unroll
      for (int lanes = kLanes; lanes < 32; lanes *= 2) {
        value += __shfl_xor_sync(kFullWarp, value, lanes);
      }
    };
#pragma unroll
    for (int c = 0; c < kColumns; ++c) over_lanes(of_k[c]), over_lanes(of_q[c]);
#pragma unroll
    for (float& value : alone) over_lanes(value);
    // Two copies in turn: a fast warp writes the next token's while others still read this one's.
    Sums(&sums)[kWarps] = shared[token % 2];
    if (lane < kLanes) {
      *reinterpret_cast<float4*>(&sums[warp].of_k[in_block]) =
          make_float4(of_k[0], of_k[1], of_k[2], of_k[3]);
      *reinterpret_cast<float4*>(&sums[warp].of_q[in_block]) =
          make_float4(of_q[0], of_q[1], of_q[2], of_q[3]);
      if (lane == 0) {
        *reinterpret_cast<float4*>(sums[warp].alone) =
            make_float4(alone[0], alone[1], alone[2], 0.0f);
      }
    }
    __syncthreads();
    float4 from_k = {}, from_q = {}, numbers = {};
    const auto add = [](float4& to, const float* from) {
      const float4 one = *reinterpret_cast<const float4*>(from);
      to.x += one.x, to.y += one.y, to.z += one.z, to.w += one.w;
    };
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      add(from_k, &sums[w].of_k[in_block]);
      add(from_q, &sums[w].of_q[in_block]);
      add(numbers, sums[w].alone);
    }
    const float norm_q = args.l2norm ? rsqrtf(numbers.y + kDeltaNormEps) : 1.0f;
    const float norm_k = args.l2norm ? rsqrtf(numbers.z + kDeltaNormEps) : 1.0f;
    const float seen[kColumns] = {from_k.x, from_k.y, from_k.z, from_k.w};
    const float asked[kColumns] = {from_q.x, from_q.y, from_q.z, from_q.w};
    float result[kColumns], change[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      // The part of the new value that the state lacks; the key's norm is a factor that follows.
      change[c] = norm_k * beta * fmaf(-norm_k, seen[c], v[c]);
      result[c] = args.scale * norm_q * fmaf(numbers.x, change[c], asked[c]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) state[r][c] = fmaf(k[r], change[c], state[r][c]);
    }
    if (threadIdx.x < kLanes) {
      uint32_t words[kColumns / 2];
      if (args.float16) {
        pack<Float16>(result, words);
      } else {
        pack<BFloat16>(result, words);
      }
      store_vector(at(args.out, token, head, column), words);
    }
    if (args.columns > 1) store(token);
  }
  if (args.columns <= 1) store(0);
}

#define TIERCEL_DECODE(state, size)                           \
  {DType::k##state, size,                                     \
   Kernel("gated_delta_rule_decode<" #state ", K=" #size ">", \
          reinterpret_cast<const void*>(gated_delta_rule_decode<state, size>))}

const DeltaDecodeKernel kKernels[] = {TIERCEL_DECODE(Float32, 64), TIERCEL_DECODE(Float32, 128),
                                      TIERCEL_DECODE(BFloat16, 64), TIERCEL_DECODE(BFloat16, 128)};

}  // namespace

const DeltaDecodeKernel* delta_decode_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
