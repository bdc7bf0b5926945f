// SPDX-License-Identifier: Apache-2.0
// Applies the chunks of a sequence, or of a segment, to a state. A warpgroup has 64 columns of a
// head's state in registers, transposed: [64, K]. All products keep that form, so that the result
// of one is the left operand of the next without moving. One more warpgroup loads.
//
// With kTransition the kernel computes a segment's linear map of states: what it adds, from zeros,
// and what it multiplies by, from the identity without values. If a segment's last chunks decay any
// state to nothing, only these are processed, and the latter is zero.
#include <cstdint>
#include <type_traits>

#include "kernels/delta/chunks.cuh"
#include "kernels/delta/scan.cuh"
#include "kernels/delta/stages.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace tiercel {
namespace {

constexpr int kTokens = kDeltaChunk;
constexpr int kPairs = kDeltaPairs;
constexpr int kBlock = kDeltaBlockBytes;
constexpr int kFactorVectors = kDeltaFactors / 4;
constexpr int kMultiply = 224, kLoad = 56;  // registers of a thread
constexpr float kLost = -40.0f;             // the logarithm, base 2, of what counts as nothing
static_assert(delta_registers_fit(kMultiply, kLoad));

template <int kKeySize, bool kChannels>
struct Memory : DeltaRing<delta_rule_stages(kChannels, kDeltaGroups),
                          delta_rule_stage(kKeySize, kChannels, 0), kChannels> {
  static constexpr int kTile = kTokens * kKeySize * 2;

  struct Stage {
    uint32_t k, q, added, solved, scores, factors, v;
  };

  __device__ __forceinline__ Stage stage(int64_t count) const {
    Stage stage;
    stage.k = this->at(count);
    stage.q = stage.k + kTile;
    stage.added = kChannels ? stage.q + kTile : stage.k;
    stage.solved = stage.q + (kChannels ? 2 : 1) * kTile;
    stage.scores = stage.solved + kDeltaMatrixBytes;
    stage.factors = stage.scores + kDeltaMatrixBytes;
    stage.v = stage.factors + 1024;
    return stage;
  }
};

// The operand `bytes` further, of the same layout. Tiles lie below 2^18, so that no sum carries.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, int bytes) {
  return descriptor + (bytes >> 4);
}

// The slice, segment and sequence of a block.
struct Work {
  DeltaSequence sequence;
  DeltaSegment segment;
  int64_t slot;
  int head;
  int slice;  // the block's first

  // The row of the segment's first token; the others follow at distances of a token.
  __device__ __forceinline__ char* rows(const DeltaRuleArgs& args, const DeltaHeads& heads,
                                        int of_head) const {
    const int64_t begin = sequence.begin + segment.first * kTokens;
    return const_cast<char*>(delta_row(args, heads, begin, of_head));
  }
};

// The threads that load copy from these: rows of the segment's first token.
struct Sources {
  const char *k, *q, *v;

  __device__ __forceinline__ Sources(const DeltaRuleArgs& args, const Work& work) {
    const int key_head = work.head / (args.v_heads / args.k_heads);
    k = work.rows(args, args.k, key_head), q = work.rows(args, args.q, key_head);
    v = work.rows(args, args.v, work.head);
  }
};

template <int kKeySize, bool kChannels, bool kTransition>
__device__ __forceinline__ void copy_stage(const DeltaRuleArgs& args,
                                           const Memory<kKeySize, kChannels>& memory,
                                           const Work& work, const Sources& sources,
                                           int64_t count) {
  constexpr int kVectors = kKeySize / 8;
  constexpr int kTile = Memory<kKeySize, kChannels>::kTile;
  const auto stage = memory.stage(count);
  const int64_t chunk = work.segment.first + count;
  const int64_t first = work.sequence.begin + chunk * kTokens;
  const int rows = static_cast<int>(min(int64_t{kTokens}, work.sequence.end - first));
  const int64_t place = (work.sequence.place + chunk) * args.v_heads + work.head;
  const char* const matrices = args.matrices + place * 2 * kDeltaMatrixBytes;
  const int thread = threadIdx.x % kDeltaLoaders;
  if constexpr (kChannels) {
    // The first kernel leaves these in the layout that wgmma reads.
    if (thread == 0) {
      const char* const tiles = args.tiles + place * 3 * kTile;
      auto* const full = static_cast<uint64_t*>(__cvta_shared_to_generic(memory.full(count)));
      mbarrier_expect(full, (kTransition ? 2 : 3) * kTile);
      bulk_load(__cvta_shared_to_generic(stage.k), tiles, (kTransition ? 1 : 3) * kTile, full);
      if (kTransition) {
        bulk_load(__cvta_shared_to_generic(stage.added), tiles + 2 * kTile, kTile, full);
      }
    }
  } else {
    copy_tile<kVectors>(stage.k, sources.k + count * kTokens * args.k.token, args.k.token, rows,
                        kVectors);
    if (!kTransition) {
      copy_tile<kVectors>(stage.q, sources.q + count * kTokens * args.q.token, args.q.token, rows,
                          kVectors);
    }
  }
  const char* const v = sources.v + count * kTokens * args.v.token;
  for (int group = 0; group < memory.groups; ++group) {
    const int column = (work.slice + group) * kDeltaSlice;
    const bool real = column < args.value_size;
    copy_tile<8>(stage.v + group * kBlock, real ? v + column * 2 : v, args.v.token, real ? rows : 0,
                 (args.value_size - column) / 8);
  }
  copy_tile<8, true>(stage.solved, matrices, 128, kTokens, 8);
  if (!kTransition) copy_tile<8, true>(stage.scores, matrices + kDeltaMatrixBytes, 128, kTokens, 8);
  const float* const factors = args.factors + place * kDeltaFactors;
  if (thread < kFactorVectors) {
    async_copy_16(stage.factors + thread * 16, factors + 4 * thread, true);
  }
}

// Knows which chunks the first kernel has prepared, if it runs beside this one. Each warp that
// loads has one, and asks for 32 chunks at a time.
struct Prepared {
  const int* flags;  // of the segment's chunks, or null
  int64_t chunks;
  int64_t known;

  __device__ __forceinline__ void wait_for(int64_t count) {
    if (flags == nullptr) return;
    while (count >= known) {
      const int64_t one = known + threadIdx.x % 32;
      const bool done = one < chunks && delta_published(flags + one) != 0;
      const int missing = __ffs(~__ballot_sync(kFullWarp, done));
      known += missing == 0 ? 32 : missing - 1;
    }
  }
};

template <typename Format, int kKeySize, bool kChannels, bool kTransition>
__device__ __forceinline__ void go_through(const DeltaRuleArgs& args,
                                           const Memory<kKeySize, kChannels>& memory,
                                           const Work& work, int group) {
  constexpr bool kBFloat16 = std::is_same_v<Format, BFloat16>;
  constexpr int kTiles = kKeySize / 8;
  constexpr int kDepths = kKeySize / 16;
  const DeltaThread place;
  const int value_slices = (args.value_size + kDeltaSlice - 1) / kDeltaSlice;
  const int slice = work.slice + group;
  const bool identity = kTransition && slice >= value_slices;
  const int column = slice * kDeltaSlice;
  // Sizes of values are multiples of 16, so that a warp has all of its columns or none.
  const bool real = identity ? slice < value_slices + kKeySize / kDeltaSlice
                             : column + place.warp * 16 < args.value_size;

  float state[4 * kTiles];
  {
    const float* from = nullptr;
    const int64_t size = static_cast<int64_t>(kKeySize) * args.value_size;
    if (!kTransition) {
      from = work.segment.first > 0 ? args.segment_states + work.slot * args.v_heads * size
             : args.initial_state == nullptr
                 ? nullptr
                 : args.initial_state + int64_t{work.segment.index} * args.v_heads * size;
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int row = place.row(i / 4, i % 4), at = column + place.column(i % 4);
      state[i] = from != nullptr && real
                     ? from[work.head * size + int64_t{row} * args.value_size + at]
                     : 0.0f;
      if (identity && row == at - value_slices * kDeltaSlice) state[i] = 1.0f;
    }
  }
  uint32_t rounded[kDepths][4];
  const auto round_state = [&] {
#pragma unroll
    for (int i = 0; i < 4 * kDepths; ++i) {
      rounded[i / 4][i % 4] = pack_pair<Format>(state[2 * i], state[2 * i + 1]);
    }
  };
  round_state();

  float found[2 * kPairs * 4], out[2 * kPairs * 4];
#pragma unroll
  for (int i = 0; i < 2 * kPairs * 4; ++i) found[i] = out[i] = 0.0f;
  uint32_t results[kPairs][4] = {};
  const int64_t chunks = work.segment.last - work.segment.first;
  char* to = nullptr;
  if (!kTransition && chunks > 0) {
    to = work.rows(args, args.out, work.head) + (column + place.warp * 16) * 2;
  }
  const auto multiply_queries = [&](uint64_t queries, int part) {
#pragma unroll
    for (int i = 0; i < kDepths / 2; ++i) {
      const int depth = part * kDepths / 2 + i;
      wgmma_from_registers<kBFloat16, false>(
          out, rounded[depth], further(queries, depth / 4 * kBlock + depth % 4 * 32), depth > 0);
    }
    wgmma_commit();
  };

  // Five products, three of which depend on each other and on the chunk before. The others fill the
  // gaps in which tensor cores would wait for the work between these: the queries' in two halves,
  // the scores' behind the state's. Results are stored during the next chunk.
  if (chunks > 0) mbarrier_wait(memory.full(0), memory.parity(0));
#pragma unroll 1
  for (int64_t count = 0; count < chunks; ++count) {
    const auto stage = memory.stage(count);
    const uint64_t keys = rows_descriptor(stage.k), queries = rows_descriptor(stage.q);
    const uint64_t solved = rows_descriptor(stage.solved), scores = rows_descriptor(stage.scores);
    const uint64_t added = turned_descriptor(stage.added, kBlock);

    // The state's products with keys and queries.
    wgmma_settle(found);
    wgmma_settle(out);
    wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
      wgmma_from_registers<kBFloat16, false>(
          found, rounded[depth], further(keys, depth / 4 * kBlock + depth % 4 * 32), depth > 0);
    }
    wgmma_commit();
    if constexpr (!kTransition) multiply_queries(queries, 0);
    uint32_t values[kPairs][4];
    load_values(values, stage.v + group * kBlock, place.warp);
    if (!kTransition && count > 0) {
      // The values are in registers: their place is free.
      store_rows_by_tile(stage.v + group * kBlock, place.warp, to, args.out.token,
                         real ? kTokens : 0, results);
      to += kTokens * args.out.token;
    }

    // The values less what the keys find.
    wgmma_wait<kTransition ? 0 : 1>();
    wgmma_settle(found);
#pragma unroll
    for (int tile = 0; tile < 2 * kPairs; ++tile) {
      float2 of_k = {1.0f, 1.0f};
      if (!kChannels) of_k = load_two(stage.factors + (tile * 8 + place.along) * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t& word = values[tile / 2][tile % 2 * 2 + i];
        float value[2];
        Format::unpack(word, value);
        word = pack_pair<Format>(fmaf(-of_k.x, found[4 * tile + 2 * i], value[0]),
                                 fmaf(-of_k.y, found[4 * tile + 2 * i + 1], value[1]));
      }
    }

    // The value that each token writes, after those before it in the chunk have written.
    wgmma_settle(found);
    wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < kPairs; ++depth) {
      wgmma_from_registers<kBFloat16, false>(found, values[depth], further(solved, depth * 32),
                                             depth > 0);
    }
    wgmma_commit();
    if constexpr (!kTransition) multiply_queries(queries, 1);
    // Earlier, between the first two products, the compiler would wait for both.
    if constexpr (kChannels) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float2 decay = load_two(stage.factors + (tile * 8 + place.along) * 4);
        state[4 * tile] *= decay.x, state[4 * tile + 1] *= decay.y;
        state[4 * tile + 2] *= decay.x, state[4 * tile + 3] *= decay.y;
      }
    } else {
      const float decay = load_two(stage.factors + 3 * kTokens * 4).x;
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) state[i] *= decay;
    }
    wgmma_wait<kTransition ? 0 : 1>();
    wgmma_settle(found);
    uint32_t written[kPairs][4], decayed[kPairs][4];
#pragma unroll
    for (int tile = 0; tile < 2 * kPairs; ++tile) {
      float2 rest = {1.0f, 1.0f};
      if (!kChannels) rest = load_two(stage.factors + (2 * kTokens + tile * 8 + place.along) * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float a = found[4 * tile + 2 * i], b = found[4 * tile + 2 * i + 1];
        written[tile / 2][tile % 2 * 2 + i] = pack_pair<Format>(a, b);
        if (!kChannels) {
          decayed[tile / 2][tile % 2 * 2 + i] = pack_pair<Format>(a * rest.x, b * rest.y);
        }
      }
    }

    wgmma_settle(state);
    wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < kPairs; ++depth) {
      wgmma_from_registers<kBFloat16, true>(state, kChannels ? written[depth] : decayed[depth],
                                            further(added, depth * 16 * 128), true);
    }
    wgmma_commit();
    if constexpr (!kTransition) {
      if constexpr (!kChannels) {
        wgmma_wait<1>();
        wgmma_settle(out);
#pragma unroll
        for (int tile = 0; tile < 2 * kPairs; ++tile) {
          const float2 of_q = load_two(stage.factors + (kTokens + tile * 8 + place.along) * 4);
          out[4 * tile] *= of_q.x, out[4 * tile + 1] *= of_q.y;
          out[4 * tile + 2] *= of_q.x, out[4 * tile + 3] *= of_q.y;
        }
        wgmma_settle(out);
        wgmma_fence();
      }
#pragma unroll
      for (int depth = 0; depth < kPairs; ++depth) {
        wgmma_from_registers<kBFloat16, false>(out, written[depth], further(scores, depth * 32),
                                               true);
      }
      wgmma_commit();
    }
    wgmma_wait<kTransition ? 0 : 1>();
    wgmma_settle(state);
    round_state();
    // The state is rounded before the compiler can wait for the results: it goes round a loop
    // first.
    if (count + 1 < chunks) mbarrier_wait(memory.full(count + 1), memory.parity(count + 1));
    if constexpr (!kTransition) {
      wgmma_wait<0>();
      wgmma_settle(out);
#pragma unroll
      for (int i = 0; i < kPairs * 4; ++i) {
        results[i / 4][i % 4] = pack_pair<Format>(out[2 * i], out[2 * i + 1]);
      }
    }
    arrive(memory.empty(count));
  }
  if (!kTransition && chunks > 0) {
    const int64_t begin = work.sequence.begin + (work.segment.last - 1) * kTokens;
    const auto rows = static_cast<int>(min(int64_t{kTokens}, work.sequence.end - begin));
    store_rows_by_tile(memory.stage(chunks - 1).v + group * kBlock, place.warp, to, args.out.token,
                       real ? rows : 0, results);
  }

  float* kept = args.final_state;
  int64_t owner = work.segment.index;
  int pitch = args.value_size;
  if constexpr (kTransition) {
    kept = args.transitions, owner = work.slot, pitch = args.value_size + kKeySize;
  }
  if (kept == nullptr || !real || (!kTransition && work.segment.last != work.segment.all)) return;
  const int first = identity ? column - value_slices * kDeltaSlice + args.value_size : column;
  kept += (owner * args.v_heads + work.head) * kKeySize * pitch + first;
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    kept[int64_t{place.row(i / 4, i % 4)} * pitch + place.column(i % 4)] = state[i];
  }
}

// The fewest of a segment's last chunks, up to 32, that leave nothing of any state before them; 0
// if there are none. By whole warps.
__device__ __forceinline__ int count_until_lost(const DeltaRuleArgs& args, const Work& work) {
  const int lane = threadIdx.x % 32;
  const int64_t chunk = work.segment.last - 1 - lane;
  float left = 0.0f;
  if (chunk >= work.segment.first) {
    const int64_t place = (work.sequence.place + chunk) * args.v_heads + work.head;
    const float* const halves = args.factors + place * kDeltaFactors + 3 * kTokens + 2;
    left = halves[0] < halves[1] ? halves[1] : halves[0];
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const float other = __shfl_up_sync(kFullWarp, left, lanes);
    if (lane >= lanes) left += other;
  }
  return __ffs(__ballot_sync(kFullWarp, left < kLost));
}

template <typename Format, int kKeySize, bool kChannels, bool kTransition>
__global__ void __launch_bounds__(kDeltaRuleThreads, 1)
    gated_delta_rule(const __grid_constant__ DeltaRuleArgs args) {
  extern __shared__ __align__(1024) char shared[];
  Memory<kKeySize, kChannels> memory;
  // With a gate per channel one thread arrives for the bulk copies too.
  const int group = memory.set_up(shared, kDeltaLoaders + (kChannels ? 1 : 0));
  const int groups = memory.groups;
  // Beside the first kernel, this one starts once that has seen the grids before it finish. The
  // fence keeps what L1 holds of an earlier time from being read.
  const bool beside = !kChannels && !kTransition && args.ready != nullptr;
  if (beside) {
    __threadfence();
  } else {
    grid_dependency_wait();
  }
  grid_dependency_launch();

  Work work;
  const int value_slices = (args.value_size + kDeltaSlice - 1) / kDeltaSlice;
  const int slices = value_slices + (kTransition ? kKeySize / kDeltaSlice : 0);
  const int parts = (slices + groups - 1) / groups;
  work.slice = static_cast<int>(blockIdx.x) % parts * groups;
  work.head = static_cast<int>(blockIdx.x) / parts % args.v_heads;
  work.slot = static_cast<int>(blockIdx.x) / parts / args.v_heads;
  work.segment = delta_segment(args, work.slot);
  work.sequence = delta_sequence(args, work.segment.index);
  // Nothing begins with what the last segment leaves.
  bool needed = work.segment.real && (!kTransition || work.segment.last != work.segment.all);
  if constexpr (kTransition) {
    if (needed) {
      const int chunks = kChannels ? 0 : count_until_lost(args, work);
      if (chunks > 0) {
        work.segment.first = work.segment.last - chunks;
        needed = work.slice < value_slices;
      }
      if (work.slice == 0 && threadIdx.x == 0) {
        args.lost[int64_t{work.slot} * args.v_heads + work.head] = chunks > 0;
      }
    }
  }
  if (group == groups) {
    set_registers<kLoad, false>();
    const int64_t chunks = work.segment.last - work.segment.first;
    if (needed && chunks > 0) {
      const Sources sources(args, work);
      Prepared prepared = {nullptr, chunks, 0};
      if (beside) {
        prepared.flags = args.ready + work.head / (args.v_heads / args.k_heads) * args.places +
                         work.sequence.place + work.segment.first;
      }
      load_stages(memory, chunks, [&](int64_t count) {
        if constexpr (!kChannels && !kTransition) prepared.wait_for(count);
        copy_stage<kKeySize, kChannels, kTransition>(args, memory, work, sources, count);
      });
    }
  } else {
    set_registers<kMultiply, true>();
    if (needed) {
      go_through<Format, kKeySize, kChannels, kTransition>(args, memory, work, group);
    }
  }
  if (beside) grid_dependency_wait();
}

__global__ void __launch_bounds__(kDeltaScanThreads)
    gated_delta_rule_scan(const __grid_constant__ DeltaRuleArgs args) {
  extern __shared__ __align__(1024) char shared[];
  grid_dependency_wait();
  grid_dependency_launch();
  scan_segments<false>(args, static_cast<int>(blockIdx.x),
                       *reinterpret_cast<DeltaScanMemory*>(shared), args.initial_state, nullptr);
}

#define TIERCEL_RULE(dtype, size, channels, transition)                                       \
  {transition ? DeltaPart::kTransitions : DeltaPart::kRule, size, DType::k##dtype, channels,  \
   Kernel((transition) ? "gated_delta_rule_transitions<" #dtype ", K=" #size                  \
                         ", channels=" #channels ">"                                          \
                       : "gated_delta_rule<" #dtype ", K=" #size ", channels=" #channels ">", \
          reinterpret_cast<const void*>(gated_delta_rule<dtype, size, channels, transition>), \
          delta_rule_most_smem(size, channels))}

const DeltaRuleKernel kKernels[] = {
    TIERCEL_RULE(BFloat16, 64, false, false),
    TIERCEL_RULE(BFloat16, 64, true, false),
    TIERCEL_RULE(BFloat16, 128, false, false),
    TIERCEL_RULE(BFloat16, 128, true, false),
    TIERCEL_RULE(BFloat16, 128, false, true),
    TIERCEL_RULE(BFloat16, 128, true, true),
    TIERCEL_RULE(Float16, 64, false, false),
    TIERCEL_RULE(Float16, 64, true, false),
    TIERCEL_RULE(Float16, 128, false, false),
    TIERCEL_RULE(Float16, 128, true, false),
    TIERCEL_RULE(Float16, 128, false, true),
    TIERCEL_RULE(Float16, 128, true, true),
    {DeltaPart::kScan, 0, DType::kFloat32, false,
     Kernel("gated_delta_rule_scan", reinterpret_cast<const void*>(gated_delta_rule_scan),
            kDeltaScanSmem)},
};

}  // namespace

const DeltaRuleKernel* delta_rule_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
