// SPDX-License-Identifier: Apache-2.0
// Two passes over the chunks of a sequence, for gradients: forward for the states before each
// chunk, and back for the gradients of the states after it. They are independent: odd blocks go
// back. Both keep a state, or its gradient, in registers, as gated_delta_rule does. Segments of few
// long sequences run in parallel: the same kernel first computes the linear map of each segment,
// from the identity and from zeros, and stores nothing else.
//
// With T = (I + A)^-1, G the sums of the gates, P the queries' products with the keys, a chunk's
// forward is (see delta_chunks.cu)
//   W = V - exp(G) K S,  U = T beta W,  S = exp(G[63]) S + (exp(G[63] - G) K)^T U
// and its gradients, for those of results dO and of the state after it dS,
//   dU = P^T dO + exp(G[63] - G) K dS,  Y = T^T dU,  dV = beta Y,
//   dS = exp(G[63]) dS + (exp(G) Q)^T dO - (exp(G) K)^T beta Y.
// With a gate per channel exp(G) K, exp(G) Q and exp(G[63] - G) K are tiles of the workspace, and
// exp(G[63]) is a factor of each row of S. delta_gradients.cu and delta_channel_gradients.cu
// compute the other gradients from S, dS, W, U and Y. The formulas are the derivatives of those of
// Yang et al. (2024), arXiv:2412.06464; chunk_gated_delta_rule_bwd of flash-linear-attention
// divides the work in the same way.
#include <cstdint>
#include <type_traits>

#include "kernels/delta/chunks.cuh"
#include "kernels/delta/scan.cuh"
#include "kernels/delta/stages.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

constexpr int kTokens = kDeltaChunk;
constexpr int kPairs = kDeltaPairs;
constexpr int kBlock = kDeltaBlockBytes;
constexpr int kFactorVectors = kDeltaBackFactors / 4;
constexpr int kMultiply = 216, kLoad = 72;  // registers of a thread
static_assert(delta_registers_fit(kMultiply, kLoad));

template <int kKeySize, bool kChannels>
struct Memory : DeltaRing<delta_back_stages(kChannels), delta_back_stage(kKeySize, kChannels, 0)> {
  static constexpr int kTile = kTokens * kKeySize * 2;

  struct Stage {
    uint32_t k, q, added, solved, scores, factors, values;

    // Two tokens' factors, of row 0: K S, 1: Q S, 2: the keys that are added.
    __device__ __forceinline__ float2 factor(int row, int token) const {
      if (kChannels) return {1.0f, 1.0f};
      return load_two(factors + (row * kTokens + token) * 4);
    }
    // The factors of two rows of the state, of `tile`.
    __device__ __forceinline__ float2 decay(int tile, int along) const {
      return load_two(factors + (kChannels ? tile * 8 + along : 3 * kTokens) * 4);
    }
    __device__ __forceinline__ float2 beta(int token) const {
      return load_two(factors + (kDeltaFactors + token) * 4);
    }
  };

  __device__ __forceinline__ Stage stage(int64_t count) const {
    Stage stage;
    stage.k = this->at(count);
    stage.q = stage.k + kTile;
    stage.added = kChannels ? stage.q + kTile : stage.k;
    stage.solved = stage.q + (kChannels ? 2 : 1) * kTile;
    stage.scores = stage.solved + kDeltaMatrixBytes;
    stage.factors = stage.scores + kDeltaMatrixBytes;
    stage.values = stage.factors + kDeltaBackFactorBytes;
    return stage;
  }
};

// True in the launch that finds what segments do; kernels for other key sizes have no code for it.
template <int kKeySize>
__device__ __forceinline__ bool has_transitions(const DeltaBackArgs& args) {
  return kKeySize == kDeltaScanSize && args.transition;
}

// The part of a sequence, the head and the first slice of a block.
struct Work {
  DeltaSequence sequence;  // begins with the segment
  int64_t slot;
  int index;   // of the sequence
  int chunks;  // of the segment
  int head;
  int slice;
  bool first, last;  // segment of the sequence
  bool needed;

  __device__ __forceinline__ Work(const DeltaBackArgs& args, int key_size, int groups, bool back) {
    const int value_slices = (args.value_size + kDeltaSlice - 1) / kDeltaSlice;
    const int slices = value_slices + (args.transition ? key_size / kDeltaSlice : 0);
    const int parts = (slices + groups - 1) / groups;
    const int number = static_cast<int>(blockIdx.x) / 2;
    slice = number % parts * groups;
    head = number / parts % args.v_heads;
    slot = number / parts / args.v_heads;
    const DeltaSegment segment = delta_segment(args, slot);
    index = segment.index;
    sequence = delta_sequence(args, index);
    sequence.begin += segment.first * kTokens;
    sequence.place += segment.first;
    chunks = static_cast<int>(segment.last - segment.first);
    first = segment.first == 0, last = segment.last == segment.all;
    needed = segment.real;
    if (args.transition) {
      // Nothing begins with what the last segment leaves, or goes back beyond the first one.
      const bool factors = !back && slice + groups > value_slices;
      const bool terms = slice < value_slices && !(back ? first : last);
      needed = needed && !(first && last) && (factors || terms);
    }
  }
  // The head's place among those of the sequence, or of the segment.
  __device__ __forceinline__ int64_t owner(const DeltaBackArgs& args, bool of_sequence) const {
    return (of_sequence ? index : slot) * args.v_heads + head;
  }
  // The chunk's and head's place in the workspace.
  __device__ __forceinline__ int64_t place(const DeltaBackArgs& args, int chunk) const {
    return (sequence.place + chunk) * args.v_heads + head;
  }
  __device__ __forceinline__ int rows(int chunk) const {
    return static_cast<int>(
        min(int64_t{kTokens}, sequence.end - sequence.begin - int64_t{chunk} * kTokens));
  }
};

// The keys, the inverse, the factors and the values; or, back, queries, scores and the gradients of
// results too.
template <int kKeySize, bool kChannels, bool kBack>
__device__ __forceinline__ void copy_stage(const DeltaBackArgs& args,
                                           const typename Memory<kKeySize, kChannels>::Stage& stage,
                                           const Work& work, int chunk, int groups) {
  constexpr int kVectors = kKeySize / 8;
  const int64_t first = work.sequence.begin + int64_t{chunk} * kTokens;
  const int rows = work.rows(chunk);
  const int64_t place = work.place(args, chunk);
  const char* const matrices = args.matrices + place * 2 * kDeltaMatrixBytes;
  if constexpr (kChannels) {
    constexpr int kTile = Memory<kKeySize, kChannels>::kTile;
    const char* const tiles = args.tiles + place * 3 * kTile;
    copy_tile<kVectors>(stage.k, tiles, kKeySize * 2, kTokens, kVectors);
    if (kBack) copy_tile<kVectors>(stage.q, tiles + kTile, kKeySize * 2, kTokens, kVectors);
    copy_tile<kVectors>(stage.added, tiles + 2 * kTile, kKeySize * 2, kTokens, kVectors);
  } else {
    const int key_head = work.head / (args.v_heads / args.k_heads);
    copy_tile<kVectors>(stage.k, delta_row(args, args.k, first, key_head), args.k.token, rows,
                        kVectors);
    if (kBack) {
      copy_tile<kVectors>(stage.q, delta_row(args, args.q, first, key_head), args.q.token, rows,
                          kVectors);
    }
  }
  const DeltaHeads& source = kBack ? args.grad : args.v;
  const char* const values = delta_row(args, source, first, work.head);
  for (int group = 0; group < groups; ++group) {
    const int column = (work.slice + group) * kDeltaSlice;
    const bool real = column < args.value_size;
    copy_tile<8>(stage.values + group * kBlock, real ? values + column * 2 : values, source.token,
                 real ? rows : 0, (args.value_size - column) / 8);
  }
  copy_tile<8, true>(stage.solved, matrices, 128, kTokens, 8);
  if (kBack) copy_tile<8, true>(stage.scores, matrices + kDeltaMatrixBytes, 128, kTokens, 8);
  const float* const factors = args.factors + place * kDeltaBackFactors;
  const int thread = threadIdx.x % kDeltaLoaders;
  if (thread < kFactorVectors) {
    async_copy_16(stage.factors + thread * 16, factors + 4 * thread, true);
  }
}

// A warpgroup's 64 columns of a state or of its gradient, of which a thread has some elements.
template <typename Format, int kKeySize>
struct State {
  static constexpr int kTiles = kKeySize / 8;
  static constexpr int kDepths = kKeySize / 16;
  DeltaThread thread;
  int column;  // the warpgroup's first
  bool real;   // the warp has columns of values, whose sizes are multiples of 16
  bool kept;   // and stores what it makes of each chunk
  float values[4 * kTiles];
  uint32_t rounded[kDepths][4];

  // `from` [K, V], or zeros; or the identity's columns from `diagonal` on, if that is not negative.
  __device__ __forceinline__ void load(const float* from, int value_size, int diagonal) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const bool one = diagonal >= 0 && thread.row(i / 4, i % 4) == diagonal + thread.column(i % 4);
      values[i] = one ? 1.0f : 0.0f;
    }
    if (from != nullptr && real) {
      from += thread.along * value_size + column + thread.column(0);
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        values[i] = from[i % 2 * value_size + i / 2 % 2 * 8];
        if (i % 4 == 3) from += 8 * value_size;
      }
    }
    round();
  }
  // To columns from `first` on.
  __device__ __forceinline__ void store(float* to, int pitch, int first) const {
    to += thread.along * pitch + first + thread.column(0);
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      to[i % 2 * pitch + i / 2 % 2 * 8] = values[i];
      if (i % 4 == 3) to += 8 * pitch;
    }
  }
  __device__ __forceinline__ void round() {
#pragma unroll
    for (int i = 0; i < 4 * kDepths; ++i) {
      rounded[i / 4][i % 4] = pack_pair<Format>(values[2 * i], values[2 * i + 1]);
    }
  }
  // The rounded elements, to [V, K], by way of the warp's columns of a tile.
  __device__ __forceinline__ void store_rounded(uint32_t tile, char* to) const {
    if (!kept) return;
    store_operand_by_tile(tile, thread.warp, to + (column + thread.warp * 16) * kKeySize * 2,
                          rounded);
  }
  // By one factor, or one of each row.
  template <bool kChannels, typename Stage>
  __device__ __forceinline__ void decay(const Stage& stage) {
    const float2 all = kChannels ? float2{} : stage.decay(0, 0);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float2 factors = kChannels ? stage.decay(tile, thread.along) : float2{all.x, all.x};
      values[4 * tile] *= factors.x, values[4 * tile + 1] *= factors.y;
      values[4 * tile + 2] *= factors.x, values[4 * tile + 3] *= factors.y;
    }
  }
};

// Products of a warpgroup: sums = (add ? sums : 0) + a times the tile at b, of which rows lie along
// the sum over keys, or over tokens; if kTurned, its columns are those of the result.
template <typename Format, bool kTurned, int kDepths, int kCount>
__device__ __forceinline__ void multiply(float (&sums)[kCount], const uint32_t (&a)[kDepths][4],
                                         uint32_t b, bool add) {
  constexpr bool kBFloat16 = std::is_same_v<Format, BFloat16>;
#pragma unroll
  for (int depth = 0; depth < kDepths; ++depth) {
    const uint64_t tile = kTurned ? turned_descriptor(b + depth * 16 * 128, kBlock)
                                  : rows_descriptor(b + depth / 4 * kBlock + depth % 4 * 32);
    wgmma_from_registers<kBFloat16, kTurned>(sums, a[depth], tile, add || depth > 0);
  }
  wgmma_commit();
}

template <typename Format, int kKeySize, bool kChannels>
__device__ __forceinline__ void go_forward(const DeltaBackArgs& args,
                                           const Memory<kKeySize, kChannels>& memory,
                                           const Work& work, State<Format, kKeySize>& state,
                                           int group) {
  const int64_t size = int64_t{kKeySize} * args.value_size;
  const bool transition = has_transitions<kKeySize>(args);
  const int diagonal =
      transition ? state.column - (args.value_size + kDeltaSlice - 1) / kDeltaSlice * kDeltaSlice
                 : -1;
  {
    const float* from = transition   ? nullptr
                        : work.first ? args.initial_state
                                     : args.segment_states;
    if (from != nullptr) from += work.owner(args, work.first) * size;
    state.load(from, args.value_size, diagonal);
  }
  const int row_bytes = args.value_size * 2;
  const int first_column = state.column + state.thread.warp * 16;
  const int kept = state.kept ? kTokens : 0;  // rows
  float sums[2 * kPairs * 4];
#pragma unroll
  for (int i = 0; i < 2 * kPairs * 4; ++i) sums[i] = 0.0f;
#pragma unroll 1
  for (int count = 0; count < work.chunks; ++count) {
    const auto stage = memory.stage(count);
    const int64_t place = work.place(args, count);
    mbarrier_wait(memory.full(count), memory.parity(count));
    wgmma_settle(sums);
    wgmma_fence();
    multiply<Format, false>(sums, state.rounded, stage.k, false);
    uint32_t values[kPairs][4], scaled[kPairs][4];
    load_values(values, stage.values + group * kBlock, state.thread.warp);
    // The values are in registers: results are stored by way of their place.
    const uint32_t turned = stage.values + group * kBlock;
    state.store_rounded(turned, args.states + place * size * 2);
    wgmma_wait<0>();
    wgmma_settle(sums);

    // The values less what the keys find, and times beta.
#pragma unroll
    for (int tile = 0; tile < 2 * kPairs; ++tile) {
      const int token = tile * 8 + state.thread.along;
      const float2 of_k = stage.factor(0, token), beta = stage.beta(token);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t& word = values[tile / 2][tile % 2 * 2 + i];
        float value[2];
        Format::unpack(word, value);
        value[0] = fmaf(-of_k.x, sums[4 * tile + 2 * i], value[0]);
        value[1] = fmaf(-of_k.y, sums[4 * tile + 2 * i + 1], value[1]);
        word = Format::pack(value);
        scaled[tile / 2][tile % 2 * 2 + i] =
            pack_pair<Format>(beta.x * value[0], beta.y * value[1]);
      }
    }
    wgmma_settle(sums);
    wgmma_fence();
    multiply<Format, false>(sums, scaled, stage.solved, false);
    store_rows_by_tile(turned, state.thread.warp,
                       args.rest + place * kTokens * row_bytes + first_column * 2, row_bytes, kept,
                       values);
    state.template decay<kChannels>(stage);
    wgmma_wait<0>();
    wgmma_settle(sums);

    // The tokens' writes to the state.
    uint32_t written[kPairs][4], decayed[kPairs][4];
#pragma unroll
    for (int tile = 0; tile < 2 * kPairs; ++tile) {
      const float2 rest = stage.factor(2, tile * 8 + state.thread.along);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float a = sums[4 * tile + 2 * i], b = sums[4 * tile + 2 * i + 1];
        written[tile / 2][tile % 2 * 2 + i] = pack_pair<Format>(a, b);
        decayed[tile / 2][tile % 2 * 2 + i] = pack_pair<Format>(a * rest.x, b * rest.y);
      }
    }
    wgmma_settle(state.values);
    wgmma_fence();
    multiply<Format, true>(state.values, decayed, stage.added, true);
    store_rows_by_tile(turned, state.thread.warp,
                       args.written + place * kTokens * row_bytes + first_column * 2, row_bytes,
                       kept, written);
    wgmma_wait<0>();
    wgmma_settle(state.values);
    arrive(memory.empty(count));
    state.round();
  }
  if (!transition || (!state.real && (diagonal < 0 || diagonal >= kKeySize))) return;
  const int pitch = args.value_size + kKeySize;
  state.store(args.transitions + work.owner(args, false) * kKeySize * pitch, pitch,
              diagonal < 0 ? state.column : args.value_size + diagonal);
}

template <typename Format, int kKeySize, bool kChannels>
__device__ __forceinline__ void go_back(const DeltaBackArgs& args,
                                        const Memory<kKeySize, kChannels>& memory, const Work& work,
                                        State<Format, kKeySize>& state, int group) {
  const int64_t size = int64_t{kKeySize} * args.value_size;
  const bool transition = has_transitions<kKeySize>(args);
  {
    // A segment starts from the gradients of its final state, with which the next segment begins.
    const float* from = transition ? nullptr : args.grad_final;
    if (!transition && !work.last) from = args.segment_grads + args.v_heads * size;
    if (from != nullptr) from += work.owner(args, work.last) * size;
    state.load(from, args.value_size, -1);
  }
  const int row_bytes = args.value_size * 2;
  const int first_column = state.column + state.thread.warp * 16;
  float sums[2 * kPairs * 4], scored[2 * kPairs * 4];
#pragma unroll
  for (int i = 0; i < 2 * kPairs * 4; ++i) sums[i] = scored[i] = 0.0f;
#pragma unroll 1
  for (int count = 0; count < work.chunks; ++count) {
    const auto stage = memory.stage(count);
    const int chunk = work.chunks - 1 - count;
    const int64_t place = work.place(args, chunk);
    mbarrier_wait(memory.full(count), memory.parity(count));
    uint32_t grad[kPairs][4];
    load_values(grad, stage.values + group * kBlock, state.thread.warp);
    wgmma_settle(sums);
    wgmma_settle(scored);
    wgmma_fence();
    multiply<Format, false>(sums, state.rounded, stage.added, false);
    multiply<Format, true>(scored, grad, stage.scores, false);
    const uint32_t turned = stage.values + group * kBlock;  // the place of what is in registers
    state.store_rounded(turned, args.grad_states + place * size * 2);
    wgmma_wait<0>();
    wgmma_settle(sums);
    wgmma_settle(scored);

    // Gradients of what tokens write; and the results' gradients as they enter the state's.
    uint32_t of_written[kPairs][4];
#pragma unroll
    for (int tile = 0; tile < 2 * kPairs; ++tile) {
      const int token = tile * 8 + state.thread.along;
      const float2 rest = stage.factor(2, token), of_q = stage.factor(1, token);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * tile + 2 * i;
        of_written[tile / 2][tile % 2 * 2 + i] = pack_pair<Format>(
            fmaf(rest.x, sums[at], scored[at]), fmaf(rest.y, sums[at + 1], scored[at + 1]));
        uint32_t& word = grad[tile / 2][tile % 2 * 2 + i];
        float value[2];
        Format::unpack(word, value);
        word = pack_pair<Format>(of_q.x * value[0], of_q.y * value[1]);
      }
    }
    state.template decay<kChannels>(stage);
    wgmma_settle(sums);
    wgmma_settle(state.values);
    wgmma_fence();
    multiply<Format, true>(sums, of_written, stage.solved, false);
    multiply<Format, true>(state.values, grad, stage.q, true);
    wgmma_wait<1>();
    wgmma_settle(sums);

    // Gradients of the values less what the keys find.
    uint32_t of_rest[kPairs][4], of_values[kPairs][4], of_keys[kPairs][4];
#pragma unroll
    for (int tile = 0; tile < 2 * kPairs; ++tile) {
      const int token = tile * 8 + state.thread.along;
      const float2 of_k = stage.factor(0, token), beta = stage.beta(token);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float a = sums[4 * tile + 2 * i], b = sums[4 * tile + 2 * i + 1];
        const float of_a = beta.x * a, of_b = beta.y * b;
        of_rest[tile / 2][tile % 2 * 2 + i] = pack_pair<Format>(a, b);
        of_values[tile / 2][tile % 2 * 2 + i] = pack_pair<Format>(of_a, of_b);
        of_keys[tile / 2][tile % 2 * 2 + i] = pack_pair<Format>(-of_k.x * of_a, -of_k.y * of_b);
      }
    }
    wgmma_fence();
    multiply<Format, true>(state.values, of_keys, stage.k, true);
    store_rows_by_tile(turned, state.thread.warp,
                       args.grad_rest + place * kTokens * row_bytes + first_column * 2, row_bytes,
                       state.kept ? kTokens : 0, of_rest);
    char* const to =
        const_cast<char*>(
            delta_row(args, args.dv, work.sequence.begin + int64_t{chunk} * kTokens, work.head)) +
        first_column * 2;
    store_rows_by_tile(turned, state.thread.warp, to, args.dv.token,
                       state.kept ? work.rows(chunk) : 0, of_values);
    wgmma_wait<0>();
    wgmma_settle(state.values);
    arrive(memory.empty(count));
    state.round();
  }
  float* to = transition ? args.segment_grads : work.first ? args.grad_initial : nullptr;
  if (to == nullptr || !state.real) return;
  to += work.owner(args, !transition) * size;
  state.store(to, args.value_size, state.column);
}

template <typename Format, int kKeySize, bool kChannels>
__global__ void __launch_bounds__(kDeltaRuleThreads, 1)
    gated_delta_rule_passes(const __grid_constant__ DeltaBackArgs args) {
  extern __shared__ __align__(1024) char shared[];
  Memory<kKeySize, kChannels> memory;
  const int group = memory.set_up(shared);
  const int groups = memory.groups;
  grid_dependency_wait();
  grid_dependency_launch();

  // Roles have few registers in common, or some would be spilled: each finds its work itself.
  const bool back = blockIdx.x % 2 == 0;
  if (group == groups) {
    set_registers<kLoad, false>();
    const Work work(args, kKeySize, groups, back);
    if (!work.needed) return;
    if (back) {
      load_stages(memory, work.chunks, [&](int count) {
        copy_stage<kKeySize, kChannels, true>(args, memory.stage(count), work,
                                              work.chunks - 1 - count, groups);
      });
    } else {
      load_stages(memory, work.chunks, [&](int count) {
        copy_stage<kKeySize, kChannels, false>(args, memory.stage(count), work, count, groups);
      });
    }
  } else {
    set_registers<kMultiply, true>();
    const Work work(args, kKeySize, groups, back);
    if (!work.needed) return;
    State<Format, kKeySize> state;
    state.column = (work.slice + group) * kDeltaSlice;
    state.real = state.column + state.thread.warp * 16 < args.value_size;
    state.kept = state.real && !args.transition;
    if (back) {
      go_back<Format, kKeySize, kChannels>(args, memory, work, state, group);
    } else {
      go_forward<Format, kKeySize, kChannels>(args, memory, work, state, group);
    }
  }
}

// By every second block, for the states that segments begin with, or their gradients.
__global__ void __launch_bounds__(kDeltaScanThreads)
    gated_delta_rule_back_scan(const __grid_constant__ DeltaBackArgs args) {
  extern __shared__ __align__(1024) char shared[];
  DeltaScanMemory& memory = *reinterpret_cast<DeltaScanMemory*>(shared);
  grid_dependency_wait();
  grid_dependency_launch();
  const int block = static_cast<int>(blockIdx.x) / 2;
  if (blockIdx.x % 2 == 0) {
    scan_segments<true>(args, block, memory, args.grad_final, args.segment_grads);
  } else {
    scan_segments<false>(args, block, memory, args.initial_state, nullptr);
  }
}

#define TIERCEL_PASSES(dtype, size, channels)                                            \
  {DeltaPart::kBackPasses, size, DType::k##dtype, channels,                              \
   Kernel((channels) ? "gated_delta_rule_passes<" #dtype ", K=" #size ", channels>"      \
                     : "gated_delta_rule_passes<" #dtype ", K=" #size ">",               \
          reinterpret_cast<const void*>(gated_delta_rule_passes<dtype, size, channels>), \
          delta_back_smem(size, channels, kDeltaGroups))}

const DeltaRuleKernel kKernels[] = {
    TIERCEL_PASSES(BFloat16, 64, false),
    TIERCEL_PASSES(BFloat16, 64, true),
    TIERCEL_PASSES(BFloat16, 128, false),
    TIERCEL_PASSES(BFloat16, 128, true),
    TIERCEL_PASSES(Float16, 64, false),
    TIERCEL_PASSES(Float16, 64, true),
    TIERCEL_PASSES(Float16, 128, false),
    TIERCEL_PASSES(Float16, 128, true),
    {DeltaPart::kBackScan, 0, DType::kFloat32, false,
     Kernel("gated_delta_rule_back_scan", reinterpret_cast<const void*>(gated_delta_rule_back_scan),
            kDeltaScanSmem)},
};

}  // namespace

const DeltaRuleKernel* delta_back_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
