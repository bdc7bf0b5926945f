// SPDX-License-Identifier: Apache-2.0
// Draws a token from each row of logits: penalties, a mask, temperature, min-p, top-k, top-p.
//
//   d_i = max(x) - x_i                 float32; tokens are compared by it
//   w_i = 2^(-d_i log2(e) / T)         the weight of a token
//   min-p keeps w_i >= min_p; top-k the tokens with d up to the k-th smallest; top-p, of these, the
//   tokens with d up to the least one at which they have p of the kept weight. Ties are all kept.
//   The token: the first, by index, at which the kept weights sum up to more than u of them all.
//
// A row is read once. A cluster of 1 to 8 blocks holds it in shared memory, as logits or, with
// penalties, as float32 (sample_stream.cu has many rows without penalties and mask):
//
//   1. Each warp loads segments of 1024 logits, applies penalties and mask, stores them to shared
//      memory, and finds each segment's maximum and, without filters, its sum of weights. All
//      blocks receive all segments' pairs.
//   2. With filters: the k-th largest of the segments' maxima bounds the k-th largest logit from
//      below. If at most 256 tokens are above the bounds, they go to one block, whose threads
//      compare all with all, which gives both thresholds and the token.
//   3. Otherwise, with top-k or top-p, the threshold is found by histograms of d, of 512 bins each,
//      that the cluster adds up: of d in fixed point, then in the bin that the threshold is in, and
//      so on until that bin has one token or one value. For top-p alone of 16-bit logits, the
//      tokens of each number are counted instead. Then each segment's sum of kept weights.
//   4. One warp finds the segment in which the sum is exceeded, and in it the token.
//
// With filters, weights are whole numbers in units of 2^-31, so that their sums do not depend on
// the order of additions.
//
// Nothing depends on how many blocks share a row, so a row's token does not depend on the batch.
#include <cstdint>
#include <type_traits>

#include "kernels/sampling/changes.cuh"
#include "kernels/sampling/finish.cuh"
#include "kernels/sampling/kept.cuh"
#include "kernels/sampling/philox.cuh"
#include "kernels/sampling/row.cuh"
#include "kernels/sampling/sample_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

template <typename Format, bool kPenalties, bool kVerify>
constexpr int kBlocksPerSm = kPenalties || (kVerify && Format::kBytes == 4) ? 2 : 3;

// With kVerify, what is kept of each row is written too, and rows share their sequence's
// parameters.
template <typename Format, bool kPenalties, bool kVerify>
__device__ __forceinline__ void draw(
    const std::conditional_t<kVerify, VerifyArgs, SampleArgs>& args) {
  using Held = std::conditional_t<kPenalties, Float32, Format>;
  constexpr int kColumns = kPerVector<Format>;  // of a vector
  constexpr int kPerWord = Format::kPerWord;
  constexpr int kVectors = kSampleSegment / 32 / kColumns;
  extern __shared__ uint4 memory[];
  __shared__ Shared shared;
  if (args.blocks > 1) cluster_arrive_relaxed();
  if constexpr (!kPenalties) {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : shared.arrived) mbarrier_init(&barrier, 1);
      mbarrier_init_fence();
    }
    __syncthreads();
  }
  grid_dependency_wait();
  grid_dependency_launch();

  const uint32_t rank = args.blocks > 1 ? cluster_rank() : 0;
  const int64_t row_place = blockIdx.x / args.blocks;
  int64_t place = row_place, position = 0;
  if constexpr (kVerify) {
    place = row_place / args.positions;
    position = row_place - place * args.positions;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = min(static_cast<int>(rank) * args.segments_per_block, args.segments);
  const int last = min(first + args.segments_per_block, args.segments);
  const char* logits = args.logits + row_place * args.stride;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % kVectorBytes == 0;
  const bool copies = !kPenalties && aligned;
  const int whole = args.columns / kColumns * kColumns;  // columns that copies bring
  if (copies && threadIdx.x == 0) {
    // All at once: as many bytes in flight as the block holds.
#pragma unroll 1
    for (int begin = first; begin < last; begin += kWarps) {
      constexpr int kBytes = kSampleSegment * Format::kBytes;
      const int end = min(min(begin + kWarps, last) * kBytes, whole * Format::kBytes);
      const uint32_t bytes = max(end - begin * kBytes, 0);
      uint64_t* barrier = &shared.arrived[(begin - first) / kWarps];
      mbarrier_expect(barrier, bytes);
      if (bytes > 0) {
        bulk_load(reinterpret_cast<char*>(memory) + (begin - first) * kBytes,
                  logits + static_cast<int64_t>(begin) * kBytes, bytes, barrier);
      }
    }
  }
  char* tables =
      reinterpret_cast<char*>(memory) + args.segments_per_block * kSampleSegment * Held::kBytes;
  Row<Held> row{args,
                row_place,
                first,
                last,
                memory,
                reinterpret_cast<float2*>(tables),
                reinterpret_cast<uint64_t*>(tables) + args.segments,
                reinterpret_cast<float*>(tables) + 4 * args.segments,
                shared,
                0.0f,
                0.0f,
                0.0f,
                0.0f,
                nullptr,
                nullptr,
                nullptr};

  const Rules rules(args, place);
  const bool sums = rules.sums();
  const bool grouped = row.grouped();
  row.scale = rules.scale;
  Changes changes;
  changes.load<kPenalties>(args, place);
  const bool changed = kPenalties || args.allowed != nullptr;

  const auto load = [&](uint32_t (&words)[kVectors][4], int segment) {
    const int begin = segment * kSampleSegment;
    const char* from = logits + static_cast<int64_t>(begin) * Format::kBytes;
    if (kPenalties && aligned && begin + kSampleSegment <= args.columns) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        load_stream(words[i], from + (i * 32 + lane) * kVectorBytes);
      }
      return;
    }
    // One by one what no copy brings, by way of the segment's place in shared memory.
    using Storage = typename Format::Storage;
    char* part =
        reinterpret_cast<char*>(memory) + (segment - first) * kSampleSegment * Held::kBytes;
    const int copied = copies ? min(whole - begin, kSampleSegment) : 0;
#pragma unroll 4
    for (int i = copied + lane; i < kSampleSegment; i += 32) {
      reinterpret_cast<Storage*>(part)[i] = begin + i < args.columns
                                                ? reinterpret_cast<const Storage*>(from)[i]
                                                : static_cast<Storage>(Format::to_bits(-kInfinity));
    }
    __syncwarp();
    if (copies) mbarrier_wait(&shared.arrived[(segment - first) / kWarps], 0);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      load_vector(words[i], part + (i * 32 + lane) * kVectorBytes);
    }
    __syncwarp();
  };

  if (threadIdx.x == 0) {
    const bool own_seed = args.seed.of_rows != nullptr;
    shared.random = philox(static_cast<uint64_t>(parameter(args.seed, place)),
                           static_cast<uint64_t>(parameter(args.offset, place) + position),
                           static_cast<uint64_t>(own_seed ? 0 : place));
  }
  if (args.blocks > 1) cluster_wait();  // the other blocks run
#pragma unroll 1
  for (int segment = first + warp; segment < last; segment += kWarps) {
    uint32_t words[kVectors][4];
    load(words, segment);
    float most = -kInfinity;
    float values[kVectors][kColumns];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      unpack<Format>(words[i], values[i]);
      const int inside = (i * 32 + lane) * kColumns;
      auto* to = reinterpret_cast<char*>(memory) +
                 ((segment - first) * kSampleSegment + inside) * Held::kBytes;
      if (changed) {
        changes.apply<kPenalties>(segment * kSampleSegment + inside, args.columns, values[i]);
        constexpr int kHeld = kPerVector<Held>;
#pragma unroll
        for (int part = 0; part < kColumns / kHeld; ++part) {
          float some[kHeld];
#pragma unroll
          for (int k = 0; k < kHeld; ++k) some[k] = values[i][part * kHeld + k];
          uint32_t packed[4];
          pack<Held>(some, packed);
          store_vector(to + part * kVectorBytes, packed);
        }
      } else if (kPenalties) {
        store_vector(to, words[i]);
      }
      if (kPerWord == 1 || changed) {
#pragma unroll
        for (float x : values[i]) most = max_or_nan(most, x);
      }
    }
    if constexpr (kPerWord == 2) {
      if (!changed) {
        uint32_t pairs = words[0][0];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
#pragma unroll
          for (uint32_t word : words[i]) pairs = max_pairs_or_nan<Format>(pairs, word);
        }
        float two[2];
        Format::unpack(pairs, two);
        most = max_or_nan(two[0], two[1]);
      }
    }
    if (grouped && rules.filters) {
      const float group = largest_of_group(most);
      float* top = &shared.tops[segment * kGroups + lane / (32 / kGroups)];
      if (lane % (32 / kGroups) < args.blocks) store_remote(top, lane % (32 / kGroups), group);
    }
    most = warp_largest(most);
    const float base = most == -kInfinity ? 0.0f : most;
    const float sum = sums ? segment_sum(values, base, row.scale) : 0.0f;
    const float plain = args.logprobs != nullptr ? segment_sum(values, base, kLog2E) : 0.0f;
    if (lane < args.blocks) {
      store_remote(&row.segments[segment], lane, make_float2(most, sum));
      if (args.logprobs != nullptr) store_remote(&row.sums[segment], lane, plain);
    }
  }
  row.meet();

  Kept* kept = nullptr;
  if constexpr (kVerify) kept = &args.kept[row_place];
  finish<kVerify>(row, rules, kept);
}

template <typename Format, bool kPenalties>
__global__ void __launch_bounds__(kSampleThreads, (kBlocksPerSm<Format, kPenalties, false>))
    sample(const __grid_constant__ SampleArgs args) {
  draw<Format, kPenalties, false>(args);
}

template <typename Format>
__global__ void __launch_bounds__(kSampleThreads, (kBlocksPerSm<Format, false, true>))
    sample_positions(const __grid_constant__ VerifyArgs args) {
  draw<Format, false, true>(args);
}

#define TIERCEL_SAMPLE(type, penalties)                  \
  {DType::k##type, penalties,                            \
   Kernel("sample<" #type ", penalties=" #penalties ">", \
          reinterpret_cast<const void*>(sample<type, penalties>), kSampleLargestSmem)}
#define TIERCEL_TYPE(type) TIERCEL_SAMPLE(type, false), TIERCEL_SAMPLE(type, true)

const SampleKernel kKernels[] = {TIERCEL_TYPE(Float32), TIERCEL_TYPE(BFloat16),
                                 TIERCEL_TYPE(Float16)};

// One block per sequence: accepts draft tokens up to the first rejection, and there draws from what
// the target's probabilities have above the draft's.
template <typename Format>
__global__ void __launch_bounds__(kVerifyThreads)
    verify_draft(const __grid_constant__ VerifyDraftArgs args) {
  __shared__ uint64_t sums[kVerifySegments];
  __shared__ int rejected;
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t sequence = blockIdx.x, first_row = sequence * args.positions;
  const int count = args.positions - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t seed = parameter(args.seed, sequence);
  const uint64_t offset = parameter(args.offset, sequence);
  const uint64_t stream = args.seed.of_rows != nullptr ? 0 : sequence;
  constexpr uint64_t kToAccept = uint64_t{1} << 62, kToReplace = uint64_t{1} << 63;
  const auto draft = [&](int i) {
    return args.wide ? static_cast<const int64_t*>(args.draft)[sequence * count + i]
                     : int64_t{static_cast<const int*>(args.draft)[sequence * count + i]};
  };
  const auto logit = [&](int i, int64_t column) {
    return load_element<Format>(args.logits + (first_row + i) * args.stride +
                                column * Format::kBytes);
  };
  const auto inverse_of = [](const Kept& kept) {
    return static_cast<float>(kept.unit / static_cast<double>(kept.all));
  };

  if (threadIdx.x == 0) rejected = count;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kVerifyThreads) {
    const Kept kept = args.kept[first_row + i];
    const int64_t token = draft(i);
    bool accept;
    if (args.probs == nullptr || kept.all == 0) {
      accept = token >= 0 && token == args.drawn[first_row + i];
    } else {
      accept = token >= 0 && token < args.columns;
      if (accept) {
        const float p = probability(kept, inverse_of(kept), logit(i, token));
        const double q = args.probs[(sequence * count + i) * args.columns + token];
        const double u = (philox(seed, offset + i, stream ^ kToAccept) >> 11) * 0x1p-53;
        accept = u * q < p;
      }
    }
    if (!accept) atomicMin(&rejected, i);
  }
  __syncthreads();
  const int last = rejected;
  const auto store = [&](int i, int64_t token) {
    const int64_t place = first_row + i;
    if (args.wide) {
      static_cast<int64_t*>(args.tokens)[place] = token;
    } else {
      static_cast<int*>(args.tokens)[place] = static_cast<int>(token);
    }
  };
  for (int i = threadIdx.x; i <= count; i += kVerifyThreads) {
    if (i != last) store(i, i < last ? draft(i) : -1);
  }
  if (threadIdx.x == 0) args.accepted[sequence] = last;
  const int drawn = args.drawn[first_row + last];
  const Kept kept = args.kept[first_row + last];
  if (last == count || args.probs == nullptr || kept.all == 0) {
    if (threadIdx.x == 0) store(last, drawn);
    return;
  }

  const float inverse = inverse_of(kept);
  const float* probs = args.probs + (sequence * count + last) * args.columns;
  const auto excess = [&](int column) {
    if (column >= args.columns) return uint64_t{0};
    const float more = probability(kept, inverse, logit(last, column)) - probs[column];
    return static_cast<uint64_t>(__float2ull_rn(fmaxf(more, 0.0f) * 0x1p50f));
  };
  const int segments = (args.columns + kSampleSegment - 1) / kSampleSegment;
  for (int segment = warp; segment < segments; segment += kVerifyThreads / 32) {
    uint64_t sum = 0;
#pragma unroll 8
    for (int i = lane; i < kSampleSegment; i += 32) sum += excess(segment * kSampleSegment + i);
    sum = warp_sum(sum);
    if (lane == 0) sums[segment] = sum;
  }
  __syncthreads();
  if (warp != 0) return;
  // The first column at which the running sum exceeds the target; first its segment.
  const auto find = [&](uint64_t* target, int end, auto amount) {
    for (int begin = 0; begin < end; begin += 32) {
      const uint64_t own = begin + lane < end ? amount(begin + lane) : 0;
      const uint64_t running = warp_running_sum(own);
      const unsigned beyond = __ballot_sync(kFullWarp, running > *target);
      if (beyond != 0) {
        const int found = __ffs(beyond) - 1;
        *target -= __shfl_sync(kFullWarp, running - own, found);
        return begin + found;
      }
      *target -= __shfl_sync(kFullWarp, running, 31);
    }
    return -1;
  };
  uint64_t all = 0;
  for (int s = lane; s < segments; s += 32) all += sums[s];
  all = warp_sum(all);
  uint64_t target = __umul64hi(philox(seed, offset + last, stream ^ kToReplace), all);
  const int segment = find(&target, segments, [&](int s) { return sums[s]; });
  int token = drawn;  // rounding has left nothing
  if (segment >= 0) {
    token = segment * kSampleSegment + find(&target, kSampleSegment, [&](int i) {
              return excess(segment * kSampleSegment + i);
            });
  }
  if (lane == 0) store(last, token);
}

#define TIERCEL_VERIFY(type)                                                                    \
  {DType::k##type, true,                                                                        \
   Kernel("sample_positions<" #type ">", reinterpret_cast<const void*>(sample_positions<type>), \
          kSampleLargestSmem)},                                                                 \
  {                                                                                             \
    DType::k##type, false,                                                                      \
        Kernel("verify_draft<" #type ">", reinterpret_cast<const void*>(verify_draft<type>))    \
  }

const VerifyKernel kVerifyKernels[] = {TIERCEL_VERIFY(Float32), TIERCEL_VERIFY(BFloat16),
                                       TIERCEL_VERIFY(Float16)};

}  // namespace

const VerifyKernel* verify_kernels(int* count) {
  *count = sizeof(kVerifyKernels) / sizeof(kVerifyKernels[0]);
  return kVerifyKernels;
}

const SampleKernel* sample_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
