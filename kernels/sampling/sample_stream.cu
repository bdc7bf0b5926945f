// SPDX-License-Identifier: Apache-2.0
// Draws a token from each row of logits without penalties or mask. The tokens are those of
// sample.cu, bit for bit.
//
// Blocks stay for all their rows, as many as a multiprocessor holds; a cluster of 1 to 8 blocks
// shares a row.
//
//   1. Each of 16 warps takes segments of 1024 logits, row after row. It has a ring of slots of its
//      own in shared memory and refills a slot by a bulk copy as soon as its segment is in
//      registers, so that all of the ring is in flight, also where one row ends and the next
//      begins. A segment's maximum and sum of weights go to the tables of all blocks.
//   2. Without filters one more warp waits until a row's table is complete, finds the segment of
//      the token, reads it once more, from L2, and finds the token. The others are at the next rows
//      meanwhile.
//   3. With filters eight more warps do so, by the steps of sample.cu, and a block has its rows
//      alone. They read the segments that a step needs once more, from L2, four ahead of the one
//      they work on.
#include <cstdint>
#include <type_traits>

#include "kernels/sampling/finish.cuh"
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

__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives at the mbarrier at `barrier`'s offset in block `rank`. It publishes nothing.
__device__ __forceinline__ void arrive_remote(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// The threads that find tokens.
template <bool kFilters>
constexpr int kFinishers = kFilters ? kSampleThreads : 32;

template <typename Format, bool kFilters>
__global__ void __launch_bounds__(32 * kStreamWarps + kFinishers<kFilters>, 1)
    sample_stream(const __grid_constant__ SampleArgs args) {
  constexpr int kColumns = kPerVector<Format>;  // of a vector
  constexpr int kVectors = kSampleSegment / 32 / kColumns;
  constexpr int kBytes = kSampleSegment * Format::kBytes;  // of a segment
  constexpr int kSlots = kStreamRing / (kStreamWarps * kBytes);
  using Storage = typename Format::Storage;
  constexpr int kAgain = kFilters ? kWarps * kStagedSegments : 0;  // slots of the finishers
  extern __shared__ uint4 memory[];
  __shared__ uint64_t arrived[kStreamWarps * kSlots];
  __shared__ uint64_t complete[2], consumed[2];  // of the tables of two rows
  __shared__ uint64_t brought[kAgain + !kFilters];
  __shared__ std::conditional_t<kFilters, Shared, char> shared;
  __shared__ __align__(128) uint4 staged[kBytes / kVectorBytes];
  char* again = reinterpret_cast<char*>(memory) + kStreamRing;  // where the finishers copy to
  auto* pairs = reinterpret_cast<float2*>(again + kAgain * kBytes);
  auto* masses = reinterpret_cast<uint64_t*>(pairs + 2 * args.segments);
  auto* sums = reinterpret_cast<float*>(masses + args.segments);
  const bool alone = kFilters || args.blocks == 1;

  if (threadIdx.x < kStreamWarps * kSlots) mbarrier_init(&arrived[threadIdx.x], 1);
  if (threadIdx.x < 2) {
    // Asynchronous stores count their bytes, but need a launch with clusters.
    mbarrier_init(&complete[threadIdx.x], alone ? kStreamWarps : 1);
    mbarrier_init(&consumed[threadIdx.x], alone ? 32 : args.blocks);
  }
  if (threadIdx.x < kAgain + !kFilters) mbarrier_init(&brought[threadIdx.x], 1);
  mbarrier_init_fence();
  __syncthreads();
  if (!alone) {
    cluster_arrive();
    cluster_wait();
  }
  grid_dependency_wait();
  grid_dependency_launch();

  const uint32_t rank = alone ? 0 : cluster_rank();
  const int64_t first_row = blockIdx.x / args.blocks, step = gridDim.x / args.blocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = min(static_cast<int>(rank) * args.segments_per_block, args.segments);
  const int last = min(first + args.segments_per_block, args.segments);
  const int whole = args.columns / kColumns * kColumns;  // columns that copies bring

  const auto of_row = [&](int64_t place) { return args.logits + place * args.stride; };
  // Copies bring a segment but for what is behind the last whole vector.
  const auto fetch = [&](void* to, uint64_t* barrier, int64_t place, int segment) {
    const int begin = segment * kSampleSegment;
    const uint32_t bytes = max(min(whole - begin, kSampleSegment), 0) * Format::kBytes;
    mbarrier_expect(barrier, bytes);
    if (bytes == 0) return;
    bulk_load(to, of_row(place) + static_cast<int64_t>(begin) * Format::kBytes, bytes, barrier);
  };
  const auto fill = [&](void* to, int64_t place, int segment) {
    const int begin = segment * kSampleSegment;
    if (begin + kSampleSegment <= whole) return;
    const auto* from = reinterpret_cast<const Storage*>(of_row(place)) + begin;
#pragma unroll 1
    for (int i = max(whole - begin, 0) + lane; i < kSampleSegment; i += 32) {
      static_cast<Storage*>(to)[i] =
          begin + i < args.columns ? from[i] : static_cast<Storage>(Format::to_bits(-kInfinity));
    }
    // The next copy to this place comes later.
    async_proxy_fence();
    __syncwarp();
  };

  if (warp < kStreamWarps) {
    char* ring = reinterpret_cast<char*>(memory) + warp * kSlots * kBytes;
    uint64_t* barriers = &arrived[warp * kSlots];
    int64_t next_row = first_row;
    int next = first + warp;
    const auto refill = [&](int slot) {
      if (next >= last || next_row >= args.rows) return;
      if (lane == 0) fetch(ring + slot * kBytes, &barriers[slot], next_row, next);
      next += kStreamWarps;
      if (next >= last) next = first + warp, next_row += step;
    };
#pragma unroll 1
    for (int slot = 0; slot < kSlots; ++slot) refill(slot);
    int slot = 0;
    uint32_t parity = 0, turn = 0;  // of the slots; rows so far
#pragma unroll 1
    for (int64_t place = first_row; place < args.rows; place += step, ++turn) {
      const Rules rules(args, place);
      const bool has_sums = !kFilters && !rules.greedy;
      const int table = turn % 2;
      // The table's last row has been read, in all blocks that send to it.
      if (turn >= 2) mbarrier_wait_cluster(&consumed[table], (turn / 2 - 1) % 2);
#pragma unroll 1
      for (int segment = first + warp; segment < last; segment += kStreamWarps) {
        uint32_t words[kVectors][4];
        float values[kVectors][kColumns];
        mbarrier_wait(&barriers[slot], parity);
        fill(ring + slot * kBytes, place, segment);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          load_vector(words[i], ring + slot * kBytes + (i * 32 + lane) * kVectorBytes);
          unpack<Format>(words[i], values[i]);
        }
        __syncwarp();
        refill(slot);
        if (++slot == kSlots) slot = 0, parity ^= 1;
        const int entry = table * args.segments + segment;
        const float most = warp_largest(largest_of<Format>(words));
        const float base = most == -kInfinity ? 0.0f : most;
        float sum = 0.0f, plain = 0.0f;
#pragma unroll 1
        for (int which = has_sums ? 0 : 1; which < (args.logprobs != nullptr ? 2 : 1); ++which) {
          const float found = segment_sum(values, base, which == 0 ? rules.scale : kLog2E);
          (which == 0 ? sum : plain) = found;
        }
        if (alone) {
          if (lane == 0) {
            pairs[entry] = make_float2(most, sum);
            sums[entry] = plain;
          }
        } else if (lane < args.blocks) {
          send_remote(&pairs[entry], &complete[table], lane, make_float2(most, sum));
          if (args.logprobs != nullptr) send_remote(&sums[entry], &complete[table], lane, plain);
        }
      }
      if (alone && lane == 0) mbarrier_arrive(&complete[table]);
    }
  } else if constexpr (kFilters) {
    // Bulk copies cannot bring a last segment that is not whole.
    const int cut = (args.segments - 1) * kSampleSegment;
    const bool has_tail = cut + kSampleSegment > args.columns;
    const int slots = Finishers::thread() / 32 * kStagedSegments;
    Staging staging{again + slots * kBytes, &brought[slots], 0};
    uint32_t turn = 0;
#pragma unroll 1
    for (int64_t place = first_row; place < args.rows; place += step, ++turn) {
      const int table = turn % 2;
      const Rules rules(args, place);
      if (has_tail) {
        const auto* from = reinterpret_cast<const Storage*>(of_row(place)) + cut;
#pragma unroll
        for (int i = 0; i < kSampleSegment; i += kSampleThreads) {
          const int inside = i + Finishers::thread();
          reinterpret_cast<Storage*>(staged)[inside] =
              cut + inside < args.columns ? from[inside]
                                          : static_cast<Storage>(Format::to_bits(-kInfinity));
        }
      }
      if (Finishers::thread() == 0) {
        const bool own_seed = args.seed.of_rows != nullptr;
        shared.random = philox(static_cast<uint64_t>(parameter(args.seed, place)),
                               static_cast<uint64_t>(parameter(args.offset, place)),
                               static_cast<uint64_t>(own_seed ? 0 : place));
      }
      mbarrier_wait(&complete[table], turn / 2 % 2);
      Finishers::sync();
      Row<Format, Finishers> row{args,
                                 place,
                                 0,
                                 args.segments,
                                 reinterpret_cast<uint4*>(const_cast<char*>(of_row(place))),
                                 pairs + table * args.segments,
                                 masses,
                                 sums + table * args.segments,
                                 shared,
                                 rules.scale,
                                 0.0f,
                                 0.0f,
                                 0.0f,
                                 has_tail ? staged : nullptr,
                                 &staging,
                                 nullptr};
      finish<false>(row, rules, nullptr);
      Finishers::sync();
      if (warp == kStreamWarps) mbarrier_arrive(&consumed[table]);
    }
  } else {
    uint32_t turn = 0, rounds = 0;
#pragma unroll 1
    for (int64_t place = first_row; place < args.rows; place += step, ++turn) {
      const int table = turn % 2;
      if (!alone && lane == 0) {
        const uint32_t each = args.logprobs == nullptr ? sizeof(float2) : sizeof(float2) + 4;
        mbarrier_expect(&complete[table], args.segments * each);
      }
      const Rules rules(args, place);
      const bool greedy = rules.greedy;
      const bool own_seed = args.seed.of_rows != nullptr;
      const uint64_t random = philox(static_cast<uint64_t>(parameter(args.seed, place)),
                                     static_cast<uint64_t>(parameter(args.offset, place)),
                                     static_cast<uint64_t>(own_seed ? 0 : place));
      mbarrier_wait_cluster(&complete[table], turn / 2 % 2);

      // The row has one segment at a time, which is staged.
      Row<Format> row{args,
                      place,
                      0,
                      0,
                      staged,
                      pairs + table * args.segments,
                      masses,
                      sums + table * args.segments,
                      reinterpret_cast<Shared&>(memory[0]),  // is not used
                      rules.scale,
                      0.0f,
                      0.0f,
                      0.0f,
                      nullptr,
                      nullptr,
                      nullptr};
      float largest = -kInfinity;
#pragma unroll 1
      for (int s = lane; s < args.segments; s += 32) {
        largest = max_or_nan(largest, row.segments[s].x);
      }
      row.largest = largest = warp_largest(largest);
      const bool infinite = largest == kInfinity && !greedy;
      if (infinite) {
        // Only the infinite ones have weight. All blocks count them.
#pragma unroll 1
        for (int s = 0; s < args.segments; ++s) {
          uint32_t count = 0;
          if (row.segments[s].x == kInfinity) {
#pragma unroll 1
            for (int i = s * kSampleSegment + lane; i < args.columns; i += 32) {
              if (i >= (s + 1) * kSampleSegment) break;
              count +=
                  load_element<Format>(of_row(place) + i * Format::kBytes) == kInfinity ? 1 : 0;
            }
            count = __reduce_add_sync(kFullWarp, count);
          }
          if (lane == 0) masses[s] = uint64_t{count} << 31;
        }
        __syncwarp();
      }
      if (largest != largest || largest == -kInfinity) {
        if (rank == 0 && lane == 0) row.write(-1, __int_as_float(0x7fc00000));
      } else {
        uint64_t remains = 0;
        int segment;
        if (greedy) {
          segment = row.segment_of(largest);
        } else {
          const auto amount = [&](int s) {
            return infinite ? masses[s] : row.segment_weight(s, kFineUnit);
          };
          segment = row.find_segment([&](uint64_t sum) { return __umul64hi(random, sum); }, amount,
                                     &remains);
        }
        if (segment >= first && segment < last) {
          if (lane == 0) fetch(staged, brought, place, segment);
          mbarrier_wait(brought, rounds++ % 2);
          fill(staged, place, segment);
          row.first = segment, row.last = segment + 1;
          const int column = row.find_column(segment, remains, [&](float x) {
            if (greedy || infinite) {
              return static_cast<uint64_t>(x == largest ? 1 : 0) << (greedy ? 0 : 31);
            }
            return row.fine_weight(x);
          });
          row.write_token(column, row.value_at(column) - largest);
        }
      }
      __syncwarp();
      if (alone) {
        mbarrier_arrive(&consumed[table]);
      } else if (lane < args.blocks) {
        arrive_remote(&consumed[table], lane);
      }
    }
  }
  if (!alone) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

#define TIERCEL_STREAM(type, filters)                                \
  {DType::k##type, filters, 32 * kStreamWarps + kFinishers<filters>, \
   Kernel("sample_stream<" #type ", filters=" #filters ">",          \
          reinterpret_cast<const void*>(sample_stream<type, filters>), kSampleLargestSmem)}

const SampleStreamKernel kKernels[] = {TIERCEL_STREAM(Float32, false),
                                       TIERCEL_STREAM(BFloat16, false),
                                       TIERCEL_STREAM(BFloat16, true)};

}  // namespace

const SampleStreamKernel* sample_stream_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
