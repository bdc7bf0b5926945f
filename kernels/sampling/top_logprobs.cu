// SPDX-License-Identifier: Apache-2.0
// The k tokens of each row with the largest logits, k up to 32, and their log-probabilities.
//
// A cluster of 1 to 8 blocks has a row and reads it once, sample's penalties and mask applied. A
// token's 64-bit key is its logit in the order of integers, then the complement of its column: all
// keys differ, so the k largest are the same in any order of comparisons, ties by lowest column.
//
//   1. A warp reads segments of 1024 logits. For each it finds the maximum and the sum of
//      exponentials, in sample's order of additions, and passes both to the first block. Its 32
//      lanes hold its largest keys, sorted; a segment whose maximum does not exceed the k-th is
//      done. Otherwise each lane offers its largest key, then the next, as long as one exceeds it.
//   2. Each block ranks the keys of its warps by comparing all with all, and sends k to the first.
//   3. The first block ranks those likewise and writes them: k columns, and their logits less the
//      logarithm of the row's sum, which gives the bits that sample writes for a chosen token.
//
// Bound by the read of the logits, mostly from L2, where sample's kernel has left them.
#include <cstdint>

#include "kernels/sampling/changes.cuh"
#include "kernels/sampling/row.cuh"
#include "kernels/sampling/sample_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"
#include "kernels/sm90/vector.cuh"

namespace tiercel {
namespace {

// 0 for minus infinity, which is listed nowhere.
__device__ __forceinline__ uint64_t key_of(float x, int column) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 is 0
  const uint32_t ordered = bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
  const uint64_t key = static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(column);
  return x == -kInfinity ? 0 : key;
}

__device__ __forceinline__ float logit_of(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(ordered ^ (ordered >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}

// Puts a key into a warp's keys, which descend from lane 0 on; the last one falls out.
__device__ __forceinline__ void insert(uint64_t* own, uint64_t key) {
  const int place = __popc(__ballot_sync(kFullWarp, *own > key));
  const uint64_t before = __shfl_up_sync(kFullWarp, *own, 1);
  const int lane = threadIdx.x % 32;
  if (lane >= place) *own = lane == place ? key : before;
}

// How many of `lists` lists of k keys, 32 apart, come before the one at `place`.
__device__ __forceinline__ int rank_of(const uint64_t* keys, int lists, int k, int place) {
  const uint64_t own = keys[place];
  int before = 0;
#pragma unroll 1
  for (int list = 0; list < lists; ++list) {
#pragma unroll 4
    for (int i = 32 * list; i < 32 * list + k; ++i) {
      before += keys[i] > own || (keys[i] == own && i < place) ? 1 : 0;
    }
  }
  return before;
}

template <typename Format>
__global__ void __launch_bounds__(kSampleThreads, 4)
    top_logprobs(const __grid_constant__ TopLogprobsArgs args) {
  constexpr int kColumns = kPerVector<Format>;  // of a vector
  constexpr int kVectors = kSampleSegment / 32 / kColumns;
  extern __shared__ float2 segments[];  // maximum and sum of each, in the first block
  __shared__ uint4 staged[kWarps * kSampleSegment / 4];
  __shared__ uint64_t of_warps[kWarps * 32];
  __shared__ uint64_t of_blocks[kSampleBlocks * 32];
  if (args.blocks > 1) cluster_arrive_relaxed();
  grid_dependency_wait();
  grid_dependency_launch();

  const uint32_t rank = args.blocks > 1 ? cluster_rank() : 0;
  const int64_t row = blockIdx.x / args.blocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = min(static_cast<int>(rank) * args.segments_per_block, args.segments);
  const int last = min(first + args.segments_per_block, args.segments);
  const int k = args.k;
  Changes changes;
  changes.load<true>(args, row);
  const bool changed = args.counts != nullptr || args.prompt != nullptr || args.allowed != nullptr;
  const char* logits = args.logits + row * args.stride;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % kVectorBytes == 0;

  // The lane's vectors of a segment, each with room for float32, which no other lane touches. In
  // loops over them there is little code.
  const auto vector = [&](int i) {
    return reinterpret_cast<float*>(staged) + warp * kSampleSegment + (i * 32 + lane) * kColumns;
  };
  const auto read = [&](int i, float (&values)[kColumns]) {
#pragma unroll
    for (int j = 0; j < kColumns; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(vector(i) + j);
      values[j] = four.x, values[j + 1] = four.y, values[j + 2] = four.z, values[j + 3] = four.w;
    }
  };
  if (args.blocks > 1) cluster_wait();  // the first block runs
  uint64_t largest_keys = 0;            // the lane's of the warp's
  uint64_t least = 0;                   // the k-th
#pragma unroll 1
  for (int segment = first + warp; segment < last; segment += kWarps) {
    const int begin = segment * kSampleSegment;
    const char* from = logits + static_cast<int64_t>(begin) * Format::kBytes;
    if (aligned && begin + kSampleSegment <= args.columns) {
      uint32_t words[kVectors][4];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        load_stream(words[i], from + (i * 32 + lane) * kVectorBytes);
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) store_vector(vector(i), words[i]);
    } else {
      using Storage = typename Format::Storage;
#pragma unroll 1
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const int place = (i * 32 + lane) * kColumns + j;
          reinterpret_cast<Storage*>(vector(i))[j] =
              begin + place < args.columns ? reinterpret_cast<const Storage*>(from)[place]
                                           : static_cast<Storage>(Format::to_bits(-kInfinity));
        }
      }
    }
    float values[kColumns];
    float most = -kInfinity;
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) {
      uint32_t words[4];
      load_vector(words, vector(i));
      unpack<Format>(words, values);
      if (changed) {
        changes.apply<true>(begin + (i * 32 + lane) * kColumns, args.columns, values);
      }
#pragma unroll
      for (float x : values) most = max_or_nan(most, x);
#pragma unroll
      for (int j = 0; j < kColumns; j += 4) {
        *reinterpret_cast<float4*>(vector(i) + j) =
            make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
      }
    }
    most = warp_largest(most);
    const float base = most == -kInfinity ? 0.0f : most;
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) {
      read(i, values);
#pragma unroll
      for (float x : values) sum += exp2_approx((x - base) * kLog2E);
    }
    sum = lanes_reduce<32>(sum, Sum());
    if (lane == 0) store_remote(&segments[segment], 0, make_float2(most, sum));

    // Columns ascend, so that a logit equal to the k-th comes behind it.
    if (key_of(most, begin) >> 32 <= least >> 32) continue;
    uint64_t below = ~uint64_t{0};  // keys that the lane offers next are less
#pragma unroll 1
    while (true) {
      uint64_t own = 0;
#pragma unroll 1
      for (int i = 0; i < kVectors; ++i) {
        read(i, values);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const uint64_t key = key_of(values[j], begin + (i * 32 + lane) * kColumns + j);
          own = key < below && key > own ? key : own;
        }
      }
      below = own;
      unsigned offers = __ballot_sync(kFullWarp, own > least);
      if (offers == 0) break;
#pragma unroll 1
      for (; offers != 0; offers &= offers - 1) {
        insert(&largest_keys, __shfl_sync(kFullWarp, own, __ffs(offers) - 1));
      }
      least = __shfl_sync(kFullWarp, largest_keys, k - 1);
    }
  }

  of_warps[threadIdx.x] = largest_keys;
  __syncthreads();
  if (lane < k) {
    const int place = rank_of(of_warps, kWarps, k, threadIdx.x);
    if (place < k) {
      store_remote(reinterpret_cast<float2*>(&of_blocks[32 * rank + place]), 0,
                   make_float2(__uint_as_float(static_cast<uint32_t>(largest_keys)),
                               __uint_as_float(static_cast<uint32_t>(largest_keys >> 32))));
    }
  }
  if (args.blocks > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  if (rank != 0) return;

  float largest = -kInfinity;
#pragma unroll 1
  for (int s = lane; s < args.segments; s += 32) largest = max_or_nan(largest, segments[s].x);
  largest = warp_largest(largest);
  const float logarithm =
      logf(plain_sum(args.segments, largest, [&](int s) { return segments[s]; }));
  if (warp >= static_cast<int>(args.blocks) || lane >= k) return;
  const uint64_t key = of_blocks[threadIdx.x];
  const int place = rank_of(of_blocks, static_cast<int>(args.blocks), k, threadIdx.x);
  if (place >= k) return;
  const float logit = logit_of(key);
  int token = key == 0 ? -1 : static_cast<int>(~static_cast<uint32_t>(key));
  float logprob = (logit == largest && largest < kInfinity ? 0.0f : logit - largest) - logarithm;
  if (key == 0) logprob = -kInfinity;
  if (largest != largest || largest == -kInfinity) {
    token = -1;
    logprob = __int_as_float(0x7fc00000);
  }
  if (args.wide) {
    static_cast<int64_t*>(args.top_tokens)[row * k + place] = token;
  } else {
    static_cast<int*>(args.top_tokens)[row * k + place] = token;
  }
  args.top_logprobs[row * k + place] = logprob;
}

#define TIERCEL_TOP(type)                            \
  {DType::k##type, Kernel("top_logprobs<" #type ">", \
                          reinterpret_cast<const void*>(top_logprobs<type>), kTopLogprobsSmem)}

const TopLogprobsKernel kKernels[] = {TIERCEL_TOP(Float32), TIERCEL_TOP(BFloat16),
                                      TIERCEL_TOP(Float16)};

}  // namespace

const TopLogprobsKernel* top_logprobs_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
