// SPDX-License-Identifier: Apache-2.0
// A step of the gated delta rule: a block has 32 columns of a head's state in registers, reads and
// writes them once, and processes the tokens in between.
//
// Such a block reads, waits, computes and writes in sequence, with only 16 KB, so too little is in
// flight. For one token of each of many sequences there is a persistent kernel: each block has
// several whole states of a head in shared memory, of which one is computed while others are in
// flight by bulk copies. Each is loaded with its token's inputs, because a load from the busy
// memory takes as long as all instructions for a state. Results have the same bits.
#include <cstdint>

#include "kernels/delta/delta_kernels.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/copy_arrival.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/tma.cuh"

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

// Sums over the rows of a state, of a slice's columns and of the keys and queries alone.
struct Sums {
  float of_k[kDeltaDecodeColumns];  // the state's product with the key
  float of_q[kDeltaDecodeColumns];
  float alone[4];  // q k, q q, k k
};

__device__ __forceinline__ char* at(const DeltaHeads& heads, int64_t sequence, int token, int head,
                                    int element) {
  return heads.data + sequence * heads.batch + token * heads.token + head * heads.head +
         element * 2;
}

// A thread's part of a slice: some rows, 4 columns.
template <int kKeySize>
struct Part {
  static constexpr int kRows = kKeySize / kGroups;
  int in_slice;  // the first column
  int column;
  int first_row;

  __device__ __forceinline__ explicit Part(int slice) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps;
    in_slice = lane % kLanes * kColumns;
    column = slice * kDeltaDecodeColumns + in_slice;
    first_row = (lane / kLanes + warp * (32 / kLanes)) * kRows;
  }
};

// A head's part of a token in shared memory.
struct alignas(16) Inputs {
  uint16_t q[kDeltaStreamSize], k[kDeltaStreamSize], v[kDeltaStreamSize];
  float gates[kDeltaStreamSize];  // of the head, or of each channel
  char* out;
  char* state;  // null: zeros that are not kept
  uint32_t beta;
};

__device__ __forceinline__ uint32_t load_beta(const DeltaDecodeArgs& args, int64_t number) {
  if (args.beta_float) return *reinterpret_cast<const uint32_t*>(args.beta + number * 4);
  return *reinterpret_cast<const uint16_t*>(args.beta + number * 2);
}

// A thread's part of a token, in the form in which it was loaded.
template <int kKeySize>
struct Token {
  static constexpr int kRows = Part<kKeySize>::kRows;
  uint32_t k[kRows / 2], q[kRows / 2], v[kColumns / 2], beta;
  float gates[kRows];

  // All loads before anything waits for one.
  __device__ __forceinline__ void load(const DeltaDecodeArgs& args, const Part<kKeySize>& part,
                                       int64_t sequence, int token, int head) {
    const int key_head = head / (args.v_heads / args.k_heads);
    const int64_t number = (sequence * args.tokens + token) * args.v_heads + head;
    load_vector(k, at(args.k, sequence, token, key_head, part.first_row));
    load_vector(q, at(args.q, sequence, token, key_head, part.first_row));
    load_vector(v, at(args.v, sequence, token, head, part.column));
    beta = load_beta(args, number);
    if (args.per_channel) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) gates[r] = args.g[number * kKeySize + part.first_row + r];
    } else {
      gates[0] = args.g[number];
    }
  }
  __device__ __forceinline__ void load(const Inputs& inputs, const Part<kKeySize>& part,
                                       bool per_channel) {
    load_vector(k, inputs.k + part.first_row);
    load_vector(q, inputs.q + part.first_row);
    load_vector(v, inputs.v + part.column);
    beta = inputs.beta;
    gates[0] = inputs.gates[0];
    if (per_channel) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) gates[r] = inputs.gates[part.first_row + r];
    }
  }
};

// Goes through a token: stores its results at `out`, and changes the state. `sums` has room for a
// slice, and is another one for the next token: a fast warp writes that while others still read
// this one's. `synchronize` is a barrier of the slice's threads.
template <int kKeySize, typename Synchronize>
__device__ __forceinline__ void step(const DeltaDecodeArgs& args, const Part<kKeySize>& part,
                                     const Token<kKeySize>& token, Sums (&sums)[kWarps],
                                     float (&state)[Part<kKeySize>::kRows][kColumns], char* out,
                                     Synchronize synchronize) {
  constexpr int kRows = Part<kKeySize>::kRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps;
  float k[kRows], q[kRows], v[kColumns];
  unpack_halves(token.k, args.float16, k);
  unpack_halves(token.q, args.float16, q);
  unpack_halves(token.v, args.float16, v);
  float beta = __uint_as_float(token.beta);
  if (!args.beta_float) {
    beta = args.float16 ? Float16::from_bits(token.beta) : BFloat16::from_bits(token.beta);
  }
  float of_k[kColumns] = {}, of_q[kColumns] = {};
  float alone[3] = {};
  float decay = exp2_approx(kLog2E * token.gates[0]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (args.per_channel) decay = exp2_approx(kLog2E * token.gates[r]);
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
  if (lane < kLanes) {
    *reinterpret_cast<float4*>(&sums[warp].of_k[part.in_slice]) =
        make_float4(of_k[0], of_k[1], of_k[2], of_k[3]);
    *reinterpret_cast<float4*>(&sums[warp].of_q[part.in_slice]) =
        make_float4(of_q[0], of_q[1], of_q[2], of_q[3]);
    if (lane == 0) {
      *reinterpret_cast<float4*>(sums[warp].alone) =
          make_float4(alone[0], alone[1], alone[2], 0.0f);
    }
  }
  synchronize();
  float4 from_k = {}, from_q = {}, numbers = {};
  const auto add = [](float4& to, const float* from) {
    const float4 one = *reinterpret_cast<const float4*>(from);
    to.x += one.x, to.y += one.y, to.z += one.z, to.w += one.w;
  };
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    add(from_k, &sums[w].of_k[part.in_slice]);
    add(from_q, &sums[w].of_q[part.in_slice]);
    add(numbers, sums[w].alone);
  }
  const float norm_q = args.l2norm ? rsqrtf(numbers.y + kDeltaNormEps) : 1.0f;
  const float norm_k = args.l2norm ? rsqrtf(numbers.z + kDeltaNormEps) : 1.0f;
  const float seen[kColumns] = {from_k.x, from_k.y, from_k.z, from_k.w};
  const float asked[kColumns] = {from_q.x, from_q.y, from_q.z, from_q.w};
  float change[kColumns], result[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    // The part of the new value that the state lacks; the key's norm is a factor that follows.
    change[c] = norm_k * beta * fmaf(-norm_k, seen[c], v[c]);
    result[c] = args.scale * norm_q * fmaf(numbers.x, change[c], asked[c]);
  }
  if (threadIdx.x % kDeltaDecodeThreads < kLanes) {
    uint32_t words[kColumns / 2];
    if (args.float16) {
      pack<Float16>(result, words);
    } else {
      pack<BFloat16>(result, words);
    }
    store_vector(out, words);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) state[r][c] = fmaf(k[r], change[c], state[r][c]);
  }
}

template <typename State, int kKeySize>
__global__ void __launch_bounds__(kDeltaDecodeThreads, 4)
    gated_delta_rule_decode(const __grid_constant__ DeltaDecodeArgs args) {
  constexpr int kRows = Part<kKeySize>::kRows;
  __shared__ alignas(16) Sums shared[2][kWarps];
  const int slices = args.value_size / kDeltaDecodeColumns;
  const int slice = blockIdx.x % slices;
  const int head = blockIdx.x / slices % args.v_heads;
  const int64_t sequence = blockIdx.x / slices / args.v_heads;
  const Part<kKeySize> part(slice);
  const int64_t offset =
      ((static_cast<int64_t>(head) * kKeySize + part.first_row) * args.value_size + part.column) *
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
#pragma unroll 1
  for (int number = 0; number < args.tokens; ++number) {
    Token<kKeySize> token;
    token.load(args, part, sequence, number, head);
    step<kKeySize>(args, part, token, shared[number % 2], state,
                   at(args.out, sequence, number, head, part.column), [] { __syncthreads(); });
    if (args.columns > 1) store(number);
  }
  if (args.columns <= 1) store(0);
}

// A token of each of many sequences: a block goes from state to state, of 128 columns. One more
// warp keeps copies of states and tokens to shared memory under way, and another those back.
template <typename State>
struct Stream {
  static constexpr int kStages = delta_stream_stages(State::kBytes);
  static constexpr int kState = kDeltaStreamSize * kDeltaStreamSize * State::kBytes;
  static constexpr int kWarpCount = (kDeltaStreamThreads - 64) / 32;
  char states[kStages][kState];
  Inputs inputs[kStages];
  Sums sums[kDeltaStreamSize / kDeltaDecodeColumns][2][kWarps];
  uint64_t full[kStages];
  uint64_t changed[kStages];
  uint64_t free[kStages];
};
static_assert(sizeof(Stream<Float32>) <= delta_stream_smem(4));
static_assert(sizeof(Stream<BFloat16>) <= delta_stream_smem(2));

// Copies shared memory to global memory; `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_store(char* to, const char* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

// Ends a group of stores.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all groups but the latest kPending have read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// By a warp: starts copies of a head's part of a token.
__device__ __forceinline__ void copy_inputs(const DeltaDecodeArgs& args, const Inputs& inputs,
                                            int sequence, int head) {
  constexpr int kVectors = kDeltaStreamSize * 2 / 16;
  static_assert(2 * kVectors == 32);
  const int lane = threadIdx.x % 32, vector = lane % kVectors;
  const int key_head = head / (args.v_heads / args.k_heads);
  const int64_t number = int64_t{sequence} * args.v_heads + head;
  const auto copy = [&](const uint16_t* to, const DeltaHeads& from, int from_head) {
    async_copy_16(shared_address(to) + vector * 16, at(from, sequence, 0, from_head, vector * 8),
                  true);
  };
  if (lane < kVectors) {
    copy(inputs.k, args.k, key_head);
    copy(inputs.v, args.v, head);
  } else {
    copy(inputs.q, args.q, key_head);
  }
  const uint32_t gates = shared_address(inputs.gates);
  if (args.per_channel) {
#pragma unroll
    for (int i = lane; i < kDeltaStreamSize; i += 32) {
      async_copy_4(gates + i * 4, args.g + number * kDeltaStreamSize + i, true);
    }
  } else if (lane == kVectors) {
    async_copy_4(gates, args.g + number, true);
  }
}

// The states that a block goes through.
struct Units {
  int first, step, count;

  __device__ __forceinline__ explicit Units(const DeltaDecodeArgs& args)
      : first(static_cast<int>(blockIdx.x)), step(static_cast<int>(gridDim.x)) {
    count = (args.sequences * args.v_heads - first + step - 1) / step;
  }
};

// A stage of shared memory, and the parity of how often it was used before.
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// By a warp: loads states and tokens in turn.
template <typename State>
__device__ __forceinline__ void load_states(const DeltaDecodeArgs& args, Stream<State>& stream) {
  constexpr int kStages = Stream<State>::kStages, kState = Stream<State>::kState;
  const bool first_lane = threadIdx.x % 32 == 0;
  const Units units(args);
  // Slots and betas are loaded a state ahead of their use.
  int slot = 0;
  uint32_t beta = 0;
  const auto look = [&](int number) {
    if (number >= units.count) return;
    const int unit = units.first + number * units.step, sequence = unit / args.v_heads;
    slot = args.indices == nullptr ? sequence : args.indices[sequence];
    beta = load_beta(args, unit);
  };
  look(0);
  Turn<kStages> turn;
#pragma unroll 1
  for (int number = 0; number < units.count; ++number) {
    const int unit = units.first + number * units.step, sequence = unit / args.v_heads;
    const int head = unit - sequence * args.v_heads;
    Inputs& inputs = stream.inputs[turn.stage];
    uint64_t* const full = &stream.full[turn.stage];
    if (number >= kStages) mbarrier_wait(&stream.free[turn.stage], turn.parity ^ 1);
    if (first_lane) {
      char* from = nullptr;
      if (slot >= 0 && slot < args.slots) {
        from = args.states + slot * args.slot_stride + int64_t{head} * kState;
      }
      inputs.state = from;
      inputs.out = at(args.out, sequence, 0, head, 0);
      inputs.beta = beta;
      if (from == nullptr) {
        mbarrier_arrive(full);
      } else {
        mbarrier_expect(full, kState);
        bulk_load(stream.states[turn.stage], from, kState, full);
      }
    }
    __syncwarp();
    copy_inputs(args, inputs, sequence, head);
    arrive_with_copies(full);
    look(number + 1);
    turn.next();
  }
}

// By a thread: stores states in turn, as soon as each is changed, while the one before may still be
// leaving. It is not the one that loads: loads would wait for stores to leave shared memory, and
// stores for the addresses of loads.
template <typename State>
__device__ __forceinline__ void store_states(const DeltaDecodeArgs& args, Stream<State>& stream) {
  constexpr int kStages = Stream<State>::kStages, kState = Stream<State>::kState;
  const Units units(args);
  Turn<kStages> turn;
  int before = 0;
#pragma unroll 1
  for (int number = 0; number < units.count; ++number) {
    mbarrier_wait(&stream.changed[turn.stage], turn.parity);
    char* const to = stream.inputs[turn.stage].state;
    if (to != nullptr) bulk_store(to, stream.states[turn.stage], kState);
    bulk_commit();
    bulk_wait_read<1>();
    if (number > 0) mbarrier_arrive(&stream.free[before]);
    before = turn.stage;
    turn.next();
  }
  bulk_wait_read<0>();
}

template <typename State>
__global__ void __launch_bounds__(kDeltaStreamThreads, 1)
    gated_delta_rule_decode_stream(const __grid_constant__ DeltaDecodeArgs args) {
  constexpr int kKeySize = kDeltaStreamSize, kRows = Part<kKeySize>::kRows;
  constexpr int kStages = Stream<State>::kStages;
  constexpr int kRowBytes = kDeltaStreamSize * State::kBytes;
  extern __shared__ __align__(128) char shared[];
  Stream<State>& stream = *reinterpret_cast<Stream<State>*>(shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&stream.full[stage], 1 + 32);  // of the state, and of each lane that copies
      mbarrier_init(&stream.changed[stage], Stream<State>::kWarpCount);
      mbarrier_init(&stream.free[stage], 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  grid_dependency_launch();
  if (threadIdx.x / 32 == Stream<State>::kWarpCount) {
    load_states(args, stream);
    return;
  }
  if (threadIdx.x / 32 > Stream<State>::kWarpCount) {
    if (threadIdx.x % 32 == 0) store_states(args, stream);
    return;
  }

  const int slice = threadIdx.x / kDeltaDecodeThreads;
  const Part<kKeySize> part(slice);
  const Units units(args);
  Turn<kStages> turn;
#pragma unroll 1
  for (int number = 0; number < units.count; ++number) {
    mbarrier_wait(&stream.full[turn.stage], turn.parity);
    const Inputs& inputs = stream.inputs[turn.stage];
    char* const place =
        stream.states[turn.stage] + part.first_row * kRowBytes + part.column * State::kBytes;
    float state[kRows][kColumns] = {};
    if (inputs.state != nullptr) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) load_state(place + r * kRowBytes, State(), state[r]);
    }
    Token<kKeySize> token;
    token.load(inputs, part, args.per_channel);
    step<kKeySize>(
        args, part, token, stream.sums[slice][number % 2], state, inputs.out + part.column * 2,
        [&] {
          asm volatile("bar.sync %0, %1;" ::"r"(1 + slice), "n"(kDeltaDecodeThreads) : "memory");
        });
#pragma unroll
    for (int r = 0; r < kRows; ++r) store_state<State>(place + r * kRowBytes, state[r]);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&stream.changed[turn.stage]);
    turn.next();
  }
}

#define TIERCEL_DECODE(state, size)                           \
  {DType::k##state, size, false,                              \
   Kernel("gated_delta_rule_decode<" #state ", K=" #size ">", \
          reinterpret_cast<const void*>(gated_delta_rule_decode<state, size>))}
#define TIERCEL_STREAM(state)                                                   \
  {DType::k##state, kDeltaStreamSize, true,                                     \
   Kernel("gated_delta_rule_decode_stream<" #state ">",                         \
          reinterpret_cast<const void*>(gated_delta_rule_decode_stream<state>), \
          delta_stream_smem(state::kBytes))}

const DeltaDecodeKernel kKernels[] = {TIERCEL_DECODE(Float32, 64),  TIERCEL_DECODE(Float32, 128),
                                      TIERCEL_DECODE(BFloat16, 64), TIERCEL_DECODE(BFloat16, 128),
                                      TIERCEL_STREAM(Float32),      TIERCEL_STREAM(BFloat16)};

}  // namespace

const DeltaDecodeKernel* delta_decode_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
