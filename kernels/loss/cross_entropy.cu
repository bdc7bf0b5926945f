// SPDX-License-Identifier: Apache-2.0
// The cross-entropy of rows of logits, and its gradient in the same pass.
//
//   lse  = log(sum(exp(x)))
//   loss = (1 - s) w[t] (lse - x[t]) + s / V sum(w (lse - x)) + z lse^2
//   grad = p ((1 - s) w[t] + s / V sum(w) + 2 z lse) - s / V w - [c = t] (1 - s) w[t]
//   p    = exp(x - lse);  w = 1 without weights
//
// Kernels for it also give the entropy h = -sum(p log p) = lse - sum(p x), from a second sum in the
// same pass, and add e * -p (log p + h) to the gradient, where e is that of the row's entropy. They
// take no smoothing.
//
// Bound by memory: reads a row once and, with a gradient, writes it once. A row of 128256 16-bit
// logits takes 250 KiB, so a cluster of 1 to 8 blocks holds it in shared memory: each block copies
// its part with the bulk copy engine in a few chunks, reduces each chunk as it arrives (the online
// softmax), exchanges the maximum and the sum with the cluster's other blocks, and writes the
// gradient from shared memory. Three blocks per multiprocessor hide each other's latency.
//
//   block 0   | copy chunks -> max, sum |  \                       / | gradient of its part |
//   block 1   | copy chunks -> max, sum |   > exchange (max, sum) <  | gradient of its part |
//   ...
//
// A row of up to 4 KiB belongs to a warp instead, which copies it with asynchronous loads and needs
// no barrier: then the number of warps hides the latency.
//
// Vectors of 16 bytes are numbered from the multiple of 16 bytes at or before the row's start. The
// first and the last one may hold elements of other rows: their elements are copied one by one, and
// -inf stands for the others.
#include <cstdint>

#include "kernels/loss/cross_entropy_kernels.h"
#include "kernels/sm90/async_copy.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/mbarrier.cuh"
#include "kernels/sm90/tma.cuh"
#include "kernels/softmax/row_group.cuh"

namespace tiercel {
namespace {

__device__ __forceinline__ int64_t load_target(const CrossEntropyTargets& target, int64_t row) {
  const char* at = target.data + row * target.step;
  return target.wide ? *reinterpret_cast<const int64_t*>(at)
                     : *reinterpret_cast<const int32_t*>(at);
}

// With an error of up to 3e-7, and up to 3e-6 of the result. tanhf takes twice the instructions.
__device__ __forceinline__ float tanh_fast(float x) {
  // 1 - 2 / (1 + exp(2 |x|)); near 0, where that cancels, the series.
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;"
      : "=f"(inverse)
      : "f"(1.0f + exp2_approx(fabsf(x) * (2.0f * kLog2E))));
  const float far = fmaf(-2.0f, inverse, 1.0f);
  const float square = x * x;
  const float series = fmaf(square, 2.0f / 15.0f, -1.0f / 3.0f) * square;
  return fabsf(x) < 0.125f ? fmaf(series, x, x) : copysignf(far, x);
}

// softcap * tanh(x / softcap), or x.
struct Cap {
  float cap, inverse;
  __device__ __forceinline__ explicit Cap(float softcap) : cap(softcap), inverse(1.0f / softcap) {}
  __device__ __forceinline__ bool applies() const { return cap != 0.0f; }
  __device__ __forceinline__ float of(float x) const { return cap * tanh_fast(x * inverse); }
  __device__ __forceinline__ float operator()(float x) const { return applies() ? of(x) : x; }
  // The derivative, from the result.
  __device__ __forceinline__ float slope(float capped) const {
    const float share = capped * inverse;
    return fmaf(-share, share, 1.0f);
  }
};

// exp(x - largest), 0 for both -inf.
__device__ __forceinline__ float exp_below(float x, float largest) {
  return exp2_approx((x - largest) * kLog2E);
}

// A block's vectors of its row.
template <typename Format>
struct Part {
  static constexpr int kPerVector = kLossVectorBytes / Format::kBytes;

  int shift;  // columns of other rows in the row's first vector
  int end;    // of the row, counted from the first vector's start
  int first;  // vector of this block
  int count;

  __device__ __forceinline__ Part(const CrossEntropyArgs& args, const char* row, uint32_t rank)
      : shift(static_cast<int>(reinterpret_cast<uintptr_t>(row) % kLossVectorBytes) /
              Format::kBytes),
        end(shift + args.columns) {
    const int all = (end + kPerVector - 1) / kPerVector;
    const int each = (all + args.blocks - 1) / args.blocks;
    first = min(static_cast<int>(rank) * each, all);
    count = min(each, all - first);
  }
  // The column of a vector's first element; negative in a row's first vector.
  __device__ __forceinline__ int column(int v) const { return (first + v) * kPerVector - shift; }
  __device__ __forceinline__ bool whole(int v) const {
    const int from = (first + v) * kPerVector;
    return from >= shift && from + kPerVector <= end;
  }
  // True if the row has this column.
  __device__ __forceinline__ bool has(int column) const {
    return static_cast<unsigned>(column) < static_cast<unsigned>(end - shift);
  }
  // The first vector that is whole, and the one behind the last that is.
  __device__ __forceinline__ int whole_from() const { return count > 0 && !whole(0) ? 1 : 0; }
  __device__ __forceinline__ int whole_to() const {
    return count > 0 && !whole(count - 1) ? count - 1 : count;
  }
};

// A block, or the blocks of a cluster, that hold a row in shared memory.
struct BlockRow : BlockGroup {
  static constexpr int kThreads = kLossThreads;
  static constexpr int kChunks = kLossChunks;
  static constexpr bool kWarp = false;

  __device__ __forceinline__ explicit BlockRow(const CrossEntropyArgs& args)
      : BlockGroup(args.blocks) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kChunks; ++i) mbarrier_init(arrived(i), 1);
      mbarrier_init_fence();
    }
    __syncthreads();
  }
  __device__ __forceinline__ uint4* memory(const CrossEntropyArgs&) const {
    extern __shared__ uint4 all[];
    return all;
  }
  // Begins to copy the vectors [begin, end) of chunk i.
  __device__ __forceinline__ void copy(int i, uint4* held, const char* x, int begin,
                                       int end) const {
    if (threadIdx.x != 0) return;
    const uint32_t bytes = (end - begin) * kLossVectorBytes;
    mbarrier_expect(arrived(i), bytes);
    bulk_load(&held[begin], x, bytes, arrived(i));
  }
  // Orders what threads wrote to shared memory themselves.
  __device__ __forceinline__ void settle() const { __syncthreads(); }
  __device__ __forceinline__ void wait(int i) const { mbarrier_wait(arrived(i), 0); }

 private:
  static __device__ __forceinline__ uint64_t* arrived(int i) {
    __shared__ uint64_t barriers[kChunks];
    return &barriers[i];
  }
};

// A warp that holds a short row in its piece of the block's shared memory.
struct WarpRow : LaneGroup<32> {
  static constexpr int kThreads = 32;
  static constexpr int kChunks = 1;
  static constexpr bool kWarp = true;

  __device__ __forceinline__ explicit WarpRow(const CrossEntropyArgs&) : LaneGroup<32>(1) {}
  __device__ __forceinline__ uint4* memory(const CrossEntropyArgs& args) const {
    extern __shared__ uint4 all[];
    return all + threadIdx.x / 32 * args.warp_vectors;
  }
  __device__ __forceinline__ void copy(int, uint4* held, const char* x, int begin, int end) const {
#pragma unroll
    for (int i = 0; i < (kLossWarpRow / kLossVectorBytes + kThreads - 1) / kThreads; ++i) {
      const int v = begin + rank() + i * kThreads;
      if (v < end) {
        async_copy_16(shared_address(&held[v]), x + (v - begin) * kLossVectorBytes, true);
      }
    }
    async_copy_commit();
  }
  __device__ __forceinline__ void settle() const {
    async_copy_wait<0>();
    __syncwarp();
  }
  __device__ __forceinline__ void wait(int) const {}

  template <typename Scale>
  __device__ __forceinline__ float2 join(float largest, float sum, Scale) const {
    return make_float2(largest, sum);
  }
  __device__ __forceinline__ float2 sums(float2 value, int) const {
    return make_float2(lanes_reduce<32>(value.x, SumOf()), lanes_reduce<32>(value.y, SumOf()));
  }
};

// The largest of a vector of logits.
template <typename Format>
__device__ __forceinline__ float largest_of(const uint32_t (&words)[4]) {
  if constexpr (Format::kPerWord == 2) {
    float pair[2];
    Format::unpack(Format::max_pairs(Format::max_pairs(words[0], words[1]),
                                     Format::max_pairs(words[2], words[3])),
                   pair);
    return fmaxf(pair[0], pair[1]);
  } else {
    float values[4];
    unpack<Format>(words, values);
    return fmaxf(fmaxf(values[0], values[1]), fmaxf(values[2], values[3]));
  }
}

// Reads a vector of logits as the loss sees them, with -inf beside the row.
template <typename Format>
__device__ __forceinline__ void load_logits(const uint4* held, const Part<Format>& part, int v,
                                            const Cap& cap,
                                            float (&values)[Part<Format>::kPerVector]) {
  uint32_t words[4];
  load_vector(words, &held[v]);
  unpack<Format>(words, values);
  if (!cap.applies()) return;
#pragma unroll
  for (float& value : values) value = cap.of(value);
  if (part.whole(v)) return;
#pragma unroll
  for (int k = 0; k < Part<Format>::kPerVector; ++k) {
    if (!part.has(part.column(v) + k)) values[k] = -kInfinity;
  }
}

template <typename Format>
__device__ __forceinline__ void store_elements(char* row, int column, int columns,
                                               const float* values) {
#pragma unroll
  for (int i = 0; i < kLossVectorBytes / Format::kBytes; ++i) {
    if (static_cast<unsigned>(column + i) < static_cast<unsigned>(columns)) {
      reinterpret_cast<typename Format::Storage*>(row)[column + i] =
          static_cast<typename Format::Storage>(Format::to_bits(values[i]));
    }
  }
}

// Writes a vector of the gradient.
template <typename Format>
__device__ __forceinline__ void store_gradient(const CrossEntropyArgs& args, char* row,
                                               const Part<Format>& part, int v,
                                               const float (&values)[Part<Format>::kPerVector]) {
  if (args.vectors && part.whole(v)) {
    uint32_t words[4];
    pack<Format>(values, words);
    store_vector(row + static_cast<int64_t>(part.column(v)) * Format::kBytes, words);
  } else {
    store_elements<Format>(row, part.column(v), args.columns, values);
  }
}

// x - largest, but no infinity, whose product with a probability of 0 would be NaN.
__device__ __forceinline__ float distance_below(float x, float largest) {
  return fmaxf(x - largest, -1e30f);
}

template <typename Format, bool kGradient, bool kEntropy, typename Owner>
__device__ __forceinline__ void cross_entropy_row(const CrossEntropyArgs& args) {
  constexpr int kPerVector = Part<Format>::kPerVector;
  constexpr int kThreads = Owner::kThreads;
  const Owner owner(args);
  uint4* held = owner.memory(args);
  grid_dependency_wait();
  grid_dependency_launch();

  const int64_t row = owner.row();
  if (Owner::kWarp && row >= args.rows) return;
  const char* x = args.x + row * args.x_stride;
  char* grad = kGradient ? args.grad + row * args.grad_stride : nullptr;
  const Part<Format> part(args, x, owner.rank() / kThreads);
  const int thread = owner.rank() % kThreads;
  const bool leads = owner.rank() == 0;

  // Chunk i has the vectors from i * chunk on.
  const int chunk = (part.count + Owner::kChunks - 1) / Owner::kChunks;
  const int from = part.whole_from(), to = part.whole_to();
  const auto copy = [&] {
#pragma unroll 1
    for (int i = 0; i < Owner::kChunks; ++i) {
      const int begin = max(i * chunk, from), end = min((i + 1) * chunk, to);
      if (begin >= end) continue;
      owner.copy(i, held, x + static_cast<int64_t>(part.column(begin)) * Format::kBytes, begin,
                 end);
    }
  };
  // A warp's row is short: it is cheaper to read it in vain than to wait for the target.
  if constexpr (Owner::kWarp) copy();
  const int64_t target = load_target(args.target, row);
  const float scale = args.scale == nullptr ? 1.0f : args.scale[row * args.scale_step];

  if (target == args.target.ignore_index) {
    // The scale of a mean over no rows is infinite, and the mean NaN.
    if (leads) args.loss[row] = 0.0f * scale;
    if (kEntropy && leads) args.entropy[row] = 0.0f;
    if (kGradient && args.grad != nullptr) {
      const float zeros[kPerVector] = {};
#pragma unroll 1
      for (int v = thread; v < part.count; v += kThreads) {
        store_gradient<Format>(args, grad, part, v, zeros);
      }
    }
    if constexpr (Owner::kWarp) owner.settle();
    owner.meet();
    return;
  }

  if constexpr (!Owner::kWarp) copy();
  // The vectors at the row's ends, by one thread each.
  const int edge = thread == 0 ? 0 : part.count - 1;
  if (thread < 2 && part.count > 0 && !part.whole(edge) && (thread == 0 || edge > 0)) {
    auto* elements = reinterpret_cast<typename Format::Storage*>(&held[edge]);
    for (int i = 0; i < kPerVector; ++i) {
      const int column = part.column(edge) + i;
      const bool has = static_cast<unsigned>(column) < static_cast<unsigned>(args.columns);
      elements[i] = has ? reinterpret_cast<const typename Format::Storage*>(x)[column]
                        : static_cast<typename Format::Storage>(Format::to_bits(-kInfinity));
    }
  }

  const char* logits = x;
  if constexpr (Owner::kWarp) {
    owner.settle();
    logits = reinterpret_cast<const char*>(held) + part.shift * Format::kBytes;
  }

  const Cap cap(args.softcap);
  const bool inside = static_cast<uint64_t>(target) < static_cast<uint64_t>(args.columns);
  float at_target = __int_as_float(0x7fc00000);
  float weight = 1.0f;
  if (inside) {
    at_target = cap(load_element<Format>(logits + target * Format::kBytes));
    if (args.weight != nullptr) weight = args.weight[target];
  }
  if constexpr (!Owner::kWarp) owner.settle();

  // The maximum begins with the target's logit, so that this thread has it before another block may
  // write the gradient to its place.
  float largest = fmaxf(-kInfinity, at_target);
  float sum = 0.0f;
  float moment = 0.0f;  // the sum of exp(x - largest) (x - largest)
  // With smoothing: the sums of the weights, and of the logits times them. These count from the
  // target's logit, so that large ones do not cancel.
  const bool smooths = !kEntropy && args.smoothing != 0.0f;
  const float pivot = fabsf(at_target) < kInfinity ? at_target : 0.0f;
  float2 totals = make_float2(0.0f, 0.0f);
#pragma unroll 1
  for (int i = 0; i < Owner::kChunks; ++i) {
    const int begin = i * chunk, end = min(begin + chunk, part.count);
    if (max(begin, from) < min(end, to)) owner.wait(i);
    const float before = largest;
    float raw = -kInfinity;
#pragma unroll 2
    for (int v = begin + thread; v < end; v += kThreads) {
      uint32_t words[4];
      load_vector(words, &held[v]);
      raw = fmaxf(raw, largest_of<Format>(words));
    }
    largest = fmaxf(largest, cap(raw));  // the cap keeps the order
    const float reference = largest == -kInfinity ? 0.0f : largest;
    if (kEntropy && sum != 0.0f) {
      moment = fmaf(sum, before - reference, moment) * exp_below(before, reference);
    }
    sum *= exp_below(before, reference);
#pragma unroll 1
    for (int v = begin + thread; v < end; v += kThreads) {
      float values[kPerVector];
      load_logits(held, part, v, cap, values);
#pragma unroll
      for (float value : values) {
        const float exponential = exp_below(value, reference);
        sum += exponential;
        if (kEntropy) moment = fmaf(exponential, distance_below(value, reference), moment);
      }
      if constexpr (!kEntropy) {
        if (!smooths) continue;
#pragma unroll
        for (int k = 0; k < kPerVector; ++k) {
          const int column = part.column(v) + k;
          if (!part.has(column)) continue;
          const float of_class = args.weight == nullptr ? 1.0f : args.weight[column];
          totals.x += of_class;
          totals.y = fmaf(of_class, values[k] - pivot, totals.y);
        }
      }
    }
  }

  // Each warp's sum is relative to its own maximum.
  const float of_warp = group_reduce<32>(largest, MaxOf());
  const float own = largest == -kInfinity ? 0.0f : exp_below(largest, of_warp);
  const float of_lanes = lanes_reduce<32>(largest == -kInfinity ? sum : sum * own, SumOf());
  owner.meet();
  const float2 all = owner.join(
      of_warp, of_lanes, [](float a, float b) { return a == -kInfinity ? 0.0f : exp_below(a, b); });
  const float log_sum = logf(all.y);
  const float lse = all.x + log_sum;
  if (smooths) totals = owner.sums(totals, 1);
  float entropy = 0.0f;
  if constexpr (kEntropy) {
    if (sum != 0.0f) moment = fmaf(sum, largest - all.x, moment) * exp_below(largest, all.x);
    entropy = log_sum - owner.sums(make_float2(moment, 0.0f), 1).x / all.y;
  }

  const float hit = inside ? (1.0f - args.smoothing) * weight : at_target;
  const float each = args.smoothing / args.columns;
  if (leads) {
    // Differences before sums: the logits may be far from 0.
    float loss = fmaf(hit, (all.x - at_target) + log_sum, args.z_loss * lse * lse);
    if (smooths) loss += each * (totals.x * ((all.x - pivot) + log_sum) - totals.y);
    args.loss[row] = scale * loss;
    if (kEntropy) args.entropy[row] = entropy;
  }
  if (kGradient && args.grad != nullptr) {
    const float share = scale * (hit + each * totals.x + 2.0f * args.z_loss * lse) / all.y;
    const float less = scale * each;
    const float of_entropy =
        kEntropy && args.entropy_scale != nullptr ? -args.entropy_scale[row] / all.y : 0.0f;
    const int target_vector = inside ? (static_cast<int>(target) + part.shift) / kPerVector : -1;
#pragma unroll 1
    for (int v = thread; v < part.count; v += kThreads) {
      float values[kPerVector], results[kPerVector];
      load_logits(held, part, v, cap, values);
#pragma unroll
      for (int k = 0; k < kPerVector; ++k) {
        float factor = share;
        if (kEntropy) {
          const float log_p = distance_below(values[k], all.x) - log_sum;
          factor = fmaf(of_entropy, log_p + entropy, share);
        }
        results[k] = fmaf(exp_below(values[k], all.x), factor, -less);
      }
      if (smooths && args.weight != nullptr) {
#pragma unroll
        for (int k = 0; k < kPerVector; ++k) {
          const int column = part.column(v) + k;
          if (part.has(column)) results[k] += less - less * args.weight[column];
        }
      }
      if (part.first + v == target_vector) {
#pragma unroll
        for (int k = 0; k < kPerVector; ++k) {
          if (part.column(v) + k == target) results[k] -= scale * hit;
        }
      }
      if (cap.applies()) {
#pragma unroll
        for (int k = 0; k < kPerVector; ++k) results[k] *= cap.slope(values[k]);
      }
      store_gradient<Format>(args, grad, part, v, results);
    }
  }
}

template <typename Format, bool kGradient, bool kEntropy>
__global__ void __launch_bounds__(kLossThreads, 3)
    cross_entropy(const __grid_constant__ CrossEntropyArgs args) {
  cross_entropy_row<Format, kGradient, kEntropy, BlockRow>(args);
}

template <typename Format, bool kEntropy>
__global__ void __launch_bounds__(kLossThreads, kEntropy ? 4 : 5)
    cross_entropy_short(const __grid_constant__ CrossEntropyArgs args) {
  cross_entropy_row<Format, true, kEntropy, WarpRow>(args);
}

__global__ void __launch_bounds__(kLossScaleThreads, 1)
    cross_entropy_scale(const __grid_constant__ CrossEntropyScaleArgs args) {
  const BlockGroup group(1);
  grid_dependency_wait();
  grid_dependency_launch();
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < args.rows; row += kLossScaleThreads) {
    const int64_t target = load_target(args.target, row);
    if (target == args.target.ignore_index) continue;
    const bool inside = static_cast<uint64_t>(target) < static_cast<uint64_t>(args.columns);
    sum += args.weight == nullptr || !inside ? 1.0f : args.weight[target];
  }
  group.meet();
  sum = group.reduce(sum, SumOf(), 0);
  if (threadIdx.x == 0) *args.scale = 1.0f / sum;
}

template <typename Format>
__global__ void __launch_bounds__(kLossThreads)
    cross_entropy_rescale(const __grid_constant__ CrossEntropyRescaleArgs args) {
  constexpr int kPerVector = kLossVectorBytes / Format::kBytes;
  grid_dependency_wait();
  grid_dependency_launch();
  if (args.factor_step == 0 && *args.factor == 1.0f) return;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const float factor = args.factor[row * args.factor_step];
    if (factor == 1.0f) continue;
    char* data = args.grad + row * args.row_stride;
    auto* elements = reinterpret_cast<typename Format::Storage*>(data);
    const auto rescale = [&](int i) {
      elements[i] = static_cast<typename Format::Storage>(
          Format::to_bits(Format::from_bits(elements[i]) * factor));
    };
    const int shift = static_cast<int>(-reinterpret_cast<uintptr_t>(data) % kLossVectorBytes);
    const int head = min(shift / Format::kBytes, args.columns);
    const int vectors = (args.columns - head) / kPerVector;
    const int tail = head + vectors * kPerVector;
    for (int v = threadIdx.x; v < vectors; v += kLossThreads) {
      char* at = data + shift + static_cast<int64_t>(v) * kLossVectorBytes;
      uint32_t words[4];
      float values[kPerVector];
      load_vector(words, at);
      unpack<Format>(words, values);
#pragma unroll
      for (float& value : values) value *= factor;
      pack<Format>(values, words);
      store_vector(at, words);
    }
    // Fewer than a vector at either end.
    const int ends = head + args.columns - tail;
    if (static_cast<int>(threadIdx.x) < ends) {
      rescale(static_cast<int>(threadIdx.x) < head ? threadIdx.x : tail + threadIdx.x - head);
    }
  }
}

#define TIERCEL_LOSS(type, gradient, entropy, name)                              \
  {DType::k##type, gradient, entropy,                                            \
   Kernel("cross_entropy<" #type ", gradient=" #gradient name ">",               \
          reinterpret_cast<const void*>(cross_entropy<type, gradient, entropy>), \
          kLossLargestPart)}
#define TIERCEL_TYPE(type)                                                   \
  TIERCEL_LOSS(type, false, false, ""), TIERCEL_LOSS(type, true, false, ""), \
      TIERCEL_LOSS(type, false, true, ", entropy"), TIERCEL_LOSS(type, true, true, ", entropy")
#define TIERCEL_SHORT(type, entropy, name)       \
  {DType::k##type, entropy,                      \
   Kernel("cross_entropy_short<" #type name ">", \
          reinterpret_cast<const void*>(cross_entropy_short<type, entropy>))}
#define TIERCEL_SHORTS(type) TIERCEL_SHORT(type, false, ""), TIERCEL_SHORT(type, true, ", entropy")
#define TIERCEL_RESCALE(type)                                 \
  {DType::k##type, Kernel("cross_entropy_rescale<" #type ">", \
                          reinterpret_cast<const void*>(cross_entropy_rescale<type>))}

const CrossEntropyKernel kKernels[] = {TIERCEL_TYPE(Float32), TIERCEL_TYPE(BFloat16),
                                       TIERCEL_TYPE(Float16)};
const CrossEntropyShortKernel kShortKernels[] = {TIERCEL_SHORTS(Float32), TIERCEL_SHORTS(BFloat16),
                                                 TIERCEL_SHORTS(Float16)};
const CrossEntropyFormatKernel kRescaleKernels[] = {
    TIERCEL_RESCALE(Float32), TIERCEL_RESCALE(BFloat16), TIERCEL_RESCALE(Float16)};

}  // namespace

const Kernel kCrossEntropyScale("cross_entropy_scale",
                                reinterpret_cast<const void*>(cross_entropy_scale));

const CrossEntropyKernel* cross_entropy_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

const CrossEntropyShortKernel* cross_entropy_short_kernels(int* count) {
  *count = sizeof(kShortKernels) / sizeof(kShortKernels[0]);
  return kShortKernels;
}

const CrossEntropyFormatKernel* cross_entropy_rescale_kernels(int* count) {
  *count = sizeof(kRescaleKernels) / sizeof(kRescaleKernels[0]);
  return kRescaleKernels;
}

}  // namespace tiercel
