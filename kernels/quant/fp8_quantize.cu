// SPDX-License-Identifier: Apache-2.0
// fp8_quantize: q = e4m3(x / scale), scale = amax / 448 per tensor, row, 1x128 group or 128x128
// tile.
//
// Bound by memory: at [8192, 8192] in bfloat16, 128 MiB are read and 64 MiB written, 47 us at 4.3
// TB/s. Each thread processes vectors of eight neighbouring values ("eights"): 16 bytes in (32 for
// float32), 8 out. Values stay in registers from the maximum to the quantisation, so x is read
// once. Only a whole tensor is read twice, by two kernels that pass one maximum per block, unless
// it is small enough for a cluster of 8 blocks.
//  - rows: a block per row with up to 8 eights per thread; longer rows are read twice, the second
//    time from L2. Many short rows get a warp each, because a multiprocessor starts blocks one by
//    one.
//  - groups: two eights per thread, adjacent for 16-bit values, so that 8 lanes (16 for float32)
//    share a group and q is written 16 bytes at a time; no shared memory.
//  - tiles: 512 threads, 4 eights each.
// While a grid waits for the previous one, its first blocks prefetch their part of x to L2. Hints
// that x and q are used once cost 10 % (measured on an H200), so there are none. The arithmetic is
// the reference's, bit for bit: scale = max(amax / 448, 2^-126) and q = x * (1 / scale), each
// rounded to nearest even, then saturated.
#include <cstdint>

#include "kernels/quant/eight.cuh"
#include "kernels/quant/fp8_quantize_kernels.h"
#include "kernels/sm90/cluster.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/narrow_floats.cuh"
#include "kernels/sm90/prefetch.h"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

// Two eights per thread, of those of kThreads threads: adjacent for 16-bit values, so that their
// results form 16 bytes.
template <typename Source, int kThreads>
struct Two {
  static constexpr bool kNeighbours = Source::kBytes == 2;

  static __device__ __forceinline__ int64_t first(int64_t block) {
    return block * kThreads * 2 + threadIdx.x * (kNeighbours ? 2 : 1);
  }
  static __device__ __forceinline__ int64_t second(int64_t first) {
    return first + (kNeighbours ? 1 : kThreads);
  }
  // Stores to eight `first` of q, which has `eights`; `aligned16`: 16 bytes at once.
  static __device__ __forceinline__ void store(char* q, int64_t first, int64_t eights,
                                               bool aligned16, uint2 a, uint2 b) {
    if (kNeighbours && aligned16 && first + 1 < eights) {
      *reinterpret_cast<uint4*>(q + first * 8) = make_uint4(a.x, a.y, b.x, b.y);
    } else {
      if (first < eights) *reinterpret_cast<uint2*>(q + first * 8) = a;
      if (second(first) < eights) *reinterpret_cast<uint2*>(q + second(first) * 8) = b;
    }
  }
};

__device__ __forceinline__ void clear_counters(const Fp8QuantizeArgs& args) {
  if (args.counters != nullptr && blockIdx.x == 0 && threadIdx.y == 0 &&
      threadIdx.x < kFp8Counters) {
    args.counters[threadIdx.x] = 0;
  }
}

template <typename Source, int kVectors>
__global__ void __launch_bounds__(kFp8RowMaxThreads)
    fp8_quantize_row(const __grid_constant__ Fp8QuantizeArgs args) {
  __shared__ uint32_t scratch[32];
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool is_there = row < args.rows;
  const char* x = args.x + row * args.row_bytes;
  if (is_prefetching(args.prefetch_blocks) && is_there) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * blockDim.x + threadIdx.x;
      if (index < args.eights) prefetch_l2(x + index * 8 * Source::kBytes);
    }
  }
  if (args.starts_next) grid_dependency_launch();
  if (!args.waits_last) grid_dependency_wait();
  clear_counters(args);
  grid_dependency_launch();
  if (!is_there) return;
  Eight<Source> values[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * blockDim.x + threadIdx.x;
    values[v].clear();
    if (index < args.eights) values[v].load(x + index * 8 * Source::kBytes);
  }
  uint32_t largest = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) largest = max(largest, values[v].largest());
  const float scale = e4m3_scale(block_max(largest, scratch));
  const float inverse = __frcp_rn(scale);
  char* q = args.q + row * args.columns;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * blockDim.x + threadIdx.x;
    if (index < args.eights) store_scaled(q + index * 8, values[v], inverse);
  }
  if (threadIdx.x == 0) args.scale[row] = scale;
  if (args.waits_last)
    grid_dependency_wait();  // so that grids that wait for this one also wait for the previous
}

template <typename Source>
__global__ void __launch_bounds__(kFp8RowMaxThreads)
    fp8_quantize_long_row(const __grid_constant__ Fp8QuantizeArgs args) {
  __shared__ uint32_t scratch[32];
  const int64_t row = blockIdx.x;
  const char* x = args.x + row * args.row_bytes;
  if (is_prefetching(args.prefetch_blocks)) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int index = v * blockDim.x + threadIdx.x;
      if (index < args.eights) prefetch_l2(x + index * 8 * Source::kBytes);
    }
  }
  if (args.starts_next) grid_dependency_launch();
  if (!args.waits_last) grid_dependency_wait();
  clear_counters(args);
  grid_dependency_launch();
  uint32_t largest = 0;
#pragma unroll 4
  for (int index = threadIdx.x; index < args.eights; index += blockDim.x) {
    Eight<Source> values;
    values.load(x + static_cast<int64_t>(index) * 8 * Source::kBytes);
    largest = max(largest, values.largest());
  }
  const float scale = e4m3_scale(block_max(largest, scratch));
  const float inverse = __frcp_rn(scale);
  char* q = args.q + row * args.columns;
#pragma unroll 4
  for (int index = threadIdx.x; index < args.eights; index += blockDim.x) {
    Eight<Source> values;
    values.load(x + static_cast<int64_t>(index) * 8 * Source::kBytes);
    store_scaled(q + static_cast<int64_t>(index) * 8, values, inverse);
  }
  if (threadIdx.x == 0) args.scale[row] = scale;
  if (args.waits_last)
    grid_dependency_wait();  // so that grids that wait for this one also wait for the previous
}

// A block processes part of one row or, if there are no gaps and whole groups, of all rows.
template <typename Source>
__global__ void __launch_bounds__(kFp8GroupThreads)
    fp8_quantize_group(const __grid_constant__ Fp8QuantizeArgs args) {
  using Mine = Two<Source, kFp8GroupThreads>;
  constexpr int kLanes = Mine::kNeighbours ? 8 : 16;  // per group
  const int64_t row = args.flat ? 0 : blockIdx.x / args.row_blocks;
  const int64_t eights = args.flat ? args.rows * args.eights : args.eights;
  const int64_t first = Mine::first(blockIdx.x - row * args.row_blocks);
  const int64_t second = Mine::second(first);
  const char* x = args.x + row * args.row_bytes;
  if (is_prefetching(args.prefetch_blocks)) {
    if (first < eights) prefetch_l2(x + first * 8 * Source::kBytes);
    if (second < eights && !Mine::kNeighbours) prefetch_l2(x + second * 8 * Source::kBytes);
  }
  if (args.starts_next) grid_dependency_launch();
  if (!args.waits_last) grid_dependency_wait();
  clear_counters(args);
  grid_dependency_launch();
  Eight<Source> a, b;
  a.clear();
  b.clear();
  if (first < eights) a.load(x + first * 8 * Source::kBytes);
  if (second < eights) b.load(x + second * 8 * Source::kBytes);
  uint32_t largest = a.largest(), other = b.largest();
  if (Mine::kNeighbours) largest = other = max(largest, other);
  const float scale = e4m3_scale(lanes_reduce<kLanes>(largest, Max()));
  const float other_scale =
      Mine::kNeighbours ? scale : e4m3_scale(lanes_reduce<kLanes>(other, Max()));
  float* scales = args.scale + row * ((args.eights + 15) / 16);
  if (threadIdx.x % kLanes == 0) {
    if (first < eights) scales[first / 16] = scale;
    if (second < eights && !Mine::kNeighbours) scales[second / 16] = other_scale;
  }
  Mine::store(args.q + row * args.columns, first, eights, args.aligned16,
              scaled(a, __frcp_rn(scale)), scaled(b, __frcp_rn(other_scale)));
  if (args.waits_last) grid_dependency_wait();
}

template <typename Source>
__global__ void __launch_bounds__(kFp8BlockThreads)
    fp8_quantize_block(const __grid_constant__ Fp8QuantizeArgs args) {
  constexpr int kVectors = 128 * 16 / kFp8BlockThreads;
  __shared__ uint32_t scratch[32];
  const int tile_row = blockIdx.x / args.row_blocks;
  const int64_t row = static_cast<int64_t>(tile_row) * 128 + threadIdx.x / 16;
  const int column = (blockIdx.x - tile_row * args.row_blocks) * 16 + threadIdx.x % 16;
  const char* x = args.x + row * args.row_bytes + static_cast<int64_t>(column) * 8 * Source::kBytes;
  const auto has = [&](int v) {
    return row + v * (128 / kVectors) < args.rows && column < args.eights;
  };
  if (is_prefetching(args.prefetch_blocks)) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (has(v)) prefetch_l2(x + v * (128 / kVectors) * args.row_bytes);
    }
  }
  grid_dependency_wait();
  grid_dependency_launch();
  Eight<Source> values[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    values[v].clear();
    if (has(v)) values[v].load(x + v * (128 / kVectors) * args.row_bytes);
  }
  uint32_t largest = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) largest = max(largest, values[v].largest());
  const float scale = e4m3_scale(block_max(largest, scratch));
  const float inverse = __frcp_rn(scale);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (has(v)) {
      store_scaled(
          args.q + (row + v * (128 / kVectors)) * args.columns + static_cast<int64_t>(column) * 8,
          values[v], inverse);
    }
  }
  if (threadIdx.x == 0) args.scale[blockIdx.x] = scale;
}

// The address of a tensor's eight number `index`.
template <typename Source, bool kFlat>
__device__ __forceinline__ const char* eight_at(const Fp8QuantizeArgs& args, int64_t index) {
  if (kFlat) return args.x + index * 8 * Source::kBytes;
  const int64_t row = index / args.eights;
  return args.x + row * args.row_bytes + (index - row * args.eights) * 8 * Source::kBytes;
}

// The addresses of several eights, computed before the first load: divisions in between would
// separate the loads.
template <typename Source, int kCount>
__device__ __forceinline__ void find_eights(const char* (&places)[kCount],
                                            const Fp8QuantizeArgs& args, int64_t first,
                                            int64_t step) {
#pragma unroll
  for (int v = 0; v < kCount; ++v) places[v] = eight_at<Source, true>(args, first + v * step);
  if (args.flat) return;
#pragma unroll
  for (int v = 0; v < kCount; ++v) places[v] = eight_at<Source, false>(args, first + v * step);
}

// Loads in flight per thread: the most that leave registers for four blocks of 512 threads.
template <typename Source>
constexpr int kLargestVectors = 4 / Source::kBytes;

template <typename Source, bool kFlat>
__device__ __forceinline__ uint32_t largest_of(const Fp8QuantizeArgs& args, int64_t first,
                                               int64_t eights, int64_t step) {
  constexpr int kVectors = kLargestVectors<Source>;
  uint32_t largest = 0;
  for (int64_t i = first; i < eights; i += kVectors * step) {
    Eight<Source> values[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      values[v].clear();
      if (i + v * step < eights) values[v].load(eight_at<Source, kFlat>(args, i + v * step));
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) largest = max(largest, values[v].largest());
  }
  return largest;
}

template <typename Source>
__global__ void __launch_bounds__(kFp8LargestThreads, 4)
    fp8_quantize_largest(const __grid_constant__ Fp8QuantizeArgs args) {
  __shared__ uint32_t scratch[32];
  const int64_t eights = args.rows * args.eights;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFp8LargestThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kFp8LargestThreads + threadIdx.x;
  constexpr int kVectors = kLargestVectors<Source>;
  const char* places[kVectors];
  find_eights<Source>(places, args, first, step);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * step < eights) prefetch_l2(places[v]);
  }
  grid_dependency_wait();
  grid_dependency_launch();
  uint32_t largest = args.flat ? largest_of<Source, true>(args, first, eights, step)
                               : largest_of<Source, false>(args, first, eights, step);
  largest = block_max(largest, scratch);
  if (threadIdx.x == 0) args.partial[blockIdx.x] = __uint_as_float(largest);
}

template <typename Source>
__global__ void __launch_bounds__(kFp8TensorThreads)
    fp8_quantize_tensor(const __grid_constant__ Fp8QuantizeArgs args) {
  using Mine = Two<Source, kFp8TensorThreads>;
  __shared__ uint32_t scratch[32];
  const int64_t eights = args.rows * args.eights;
  // Backwards: the data that the previous kernel read last is still in L2.
  const int64_t block = args.given != nullptr ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const int64_t first = Mine::first(block), second = Mine::second(first);
  const char* places[2];
  find_eights<Source>(places, args, first, second - first);
  if (args.given != nullptr) {
    if (is_prefetching(args.prefetch_blocks)) {
      if (first < eights) prefetch_l2(places[0]);
      if (second < eights) prefetch_l2(places[1]);
    }
    grid_dependency_wait();
  }
  grid_dependency_launch();
  // The kernel that computes the maxima allowed this one to start after its own wait, so x is
  // complete and may be read while that kernel still runs.
  Eight<Source> a, b;
  a.clear();
  b.clear();
  if (first < eights) a.load(places[0]);
  if (second < eights) b.load(places[1]);
  float scale;
  if (args.given != nullptr) {
    scale = *args.given;
  } else {
    grid_dependency_wait();
    uint32_t largest = 0;
    for (int i = threadIdx.x; i < args.partials; i += kFp8TensorThreads) {
      largest = max(largest, __float_as_uint(args.partial[i]));
    }
    scale = e4m3_scale(block_max(largest, scratch));
    if (blockIdx.x == 0 && threadIdx.x == 0) *args.scale = scale;
  }
  const float inverse = __frcp_rn(scale);
  Mine::store(args.q, first, eights, args.aligned16, scaled(a, inverse), scaled(b, inverse));
}

template <typename Source, int kVectors>
__global__ void __launch_bounds__(kFp8SmallThreads)
    fp8_quantize_small_tensor(const __grid_constant__ Fp8QuantizeArgs args) {
  constexpr int kStep = kFp8SmallCluster * kFp8SmallThreads;
  __shared__ uint32_t scratch[32];
  __shared__ uint32_t block_largest[kFp8SmallCluster];
  const int64_t eights = args.rows * args.eights;
  const int first = blockIdx.x * kFp8SmallThreads + threadIdx.x;
  const char* places[kVectors];
  find_eights<Source>(places, args, first, kStep);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * kStep < eights) prefetch_l2(places[v]);
  }
  cluster_arrive_relaxed();  // all blocks run before any writes to another
  grid_dependency_wait();
  grid_dependency_launch();
  Eight<Source> values[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    values[v].clear();
    if (first + v * kStep < eights) values[v].load(places[v]);
  }
  uint32_t largest = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) largest = max(largest, values[v].largest());
  largest = block_max(largest, scratch);
  cluster_wait();
  // Every block sends its maximum to every other.
  if (threadIdx.x < kFp8SmallCluster) {
    store_remote(&block_largest[blockIdx.x], threadIdx.x, largest);
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < kFp8SmallCluster; ++i) largest = max(largest, block_largest[i]);
  const float scale = e4m3_scale(largest);
  const float inverse = __frcp_rn(scale);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t index = first + v * kStep;
    if (index < eights) store_scaled(args.q + index * 8, values[v], inverse);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.scale = scale;
}

struct Entry {
  Fp8Kernel kind;
  DType dtype;
  int vectors;
  Kernel kernel;
};

#define TIERCEL_KERNEL(kind, function, dtype, vectors, name, ...) \
  {Fp8Kernel::kind, DType::k##dtype, vectors,                     \
   Kernel("fp8_quantize_" #function "<" #dtype name ">",          \
          reinterpret_cast<const void*>(fp8_quantize_##function<dtype##Source __VA_ARGS__>))}
#define TIERCEL_HELD(kind, function, dtype, vectors) \
  TIERCEL_KERNEL(kind, function, dtype, vectors, ", vectors=" #vectors, , vectors)
#define TIERCEL_KERNELS(dtype, small, large)                                                     \
  TIERCEL_HELD(kRow, row, dtype, 1), TIERCEL_HELD(kRow, row, dtype, 2),                          \
      TIERCEL_HELD(kRow, row, dtype, large), TIERCEL_KERNEL(kLongRow, long_row, dtype, 0, "", ), \
      TIERCEL_KERNEL(kGroup, group, dtype, 0, "", ),                                             \
      TIERCEL_KERNEL(kBlock, block, dtype, 0, "", ),                                             \
      TIERCEL_KERNEL(kLargest, largest, dtype, 0, "", ),                                         \
      TIERCEL_KERNEL(kTensor, tensor, dtype, 0, "", ),                                           \
      TIERCEL_HELD(kSmallTensor, small_tensor, dtype, small)

// By kind and dtype, fewest vectors first.
const Entry kKernels[] = {TIERCEL_KERNELS(BFloat16, 2, 8), TIERCEL_KERNELS(Float16, 2, 8),
                          TIERCEL_KERNELS(Float32, 1, 4)};

}  // namespace

const Kernel* fp8_quantize_kernel(Fp8Kernel kind, DType dtype, int vectors) {
  for (const Entry& entry : kKernels) {
    if (entry.kind == kind && entry.dtype == dtype && entry.vectors >= vectors) {
      return &entry.kernel;
    }
  }
  return nullptr;
}

}  // namespace tiercel
