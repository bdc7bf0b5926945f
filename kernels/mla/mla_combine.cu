// SPDX-License-Identifier: Apache-2.0
// mla_combine: combines the rows of sequences that several lanes of mla_decode shared.
//
// A block loops over rows of a sequence, and ends at once if no lanes share it. 128 threads have a
// row, 4 columns each; if a sequence has many parts, all four groups of a block share a row's
// parts. 6 or 8 reads are in flight, and sums are in a fixed order. Parts are in the L2, so the
// time is the latency of a few such rounds.
#include <cstdint>

#include "kernels/mla/mla_kernels.h"
#include "kernels/mla/share.cuh"
#include "kernels/sm90/exponential.cuh"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"

namespace tiercel {
namespace {

constexpr int kGroup = kMlaLatent / 4;

// Four columns of a row, from parts that are relative to different largest scores.
struct Part {
  float largest = -INFINITY;
  float sum = 0.0f;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ __forceinline__ void add(float2 sums, float4 other) {
    if (sums.x == -INFINITY && sums.y == 0.0f) return;
    const float grown = fmaxf(largest, sums.x);
    const float reference = grown == -INFINITY ? 0.0f : grown;
    const float mine = exp2_approx(largest - reference), theirs = exp2_approx(sums.x - reference);
    largest = grown;
    sum = sum * mine + sums.y * theirs;
    out.x = out.x * mine + other.x * theirs;
    out.y = out.y * mine + other.y * theirs;
    out.z = out.z * mine + other.z * theirs;
    out.w = out.w * mine + other.w * theirs;
  }
};

// `kMany`: parts of a row take several rounds. Otherwise two blocks fit on a multiprocessor.
template <typename Format, bool kMany>
__global__ void __launch_bounds__(kMlaCombineGroups* kGroup, kMany ? 1 : 2)
    mla_combine(const __grid_constant__ MlaDecodeArgs args) {
  constexpr int kAtOnce = kMany ? 8 : kMlaCombineParts;
  __shared__ float4 outs[kMlaCombineGroups][kGroup];
  __shared__ float2 sums[kMlaCombineGroups];
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  const int at_once = kMlaCombineGroups / args.row_groups;  // rows
  const int own = group % args.row_groups;
  if (!kMany) grid_dependency_launch();
  grid_dependency_wait();
  if (kMany) grid_dependency_launch();
  const int4 found = args.shared[blockIdx.x];
  const int b = found.x, first_lane = found.y;
  if (found.z == 0) return;

  for (int base = blockIdx.y * at_once; base < args.rows; base += gridDim.y * at_once) {
    const int row = base + group / args.row_groups, row_block = row / kMlaRows;
    const int parts = row < args.rows ? found.z : 0;
    Part part;
    for (int first = own; first < parts; first += args.row_groups * kAtOnce) {
      float2 sum[kAtOnce];
      float4 out[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * args.row_groups;
        sum[i] = make_float2(-INFINITY, 0.0f);
        out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at >= parts) continue;
        const int64_t line = part_line(args, first_lane + at, at == 0, row_block) + row % kMlaRows;
        sum[i] = args.partial_sums[line];
        out[i] = *reinterpret_cast<const float4*>(args.partial + line * kMlaLatent + 4 * thread);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) part.add(sum[i], out[i]);
    }
    if (args.row_groups > 1) {
      __syncthreads();  // those of the row before have been read
      outs[group][thread] = part.out;
      if (thread == 0) sums[group] = make_float2(part.largest, part.sum);
      __syncthreads();
      for (int other = 1; own == 0 && other < args.row_groups; ++other) {
        part.add(sums[group + other], outs[group + other][thread]);
      }
    }
    if (own != 0 || row >= args.rows) continue;

    const float factor = part.sum == 0.0f ? 0.0f : 1.0f / part.sum;
    const float values[4] = {part.out.x * factor, part.out.y * factor, part.out.z * factor,
                             part.out.w * factor};
    uint32_t words[2];
    pack<Format, 2>(values, words);
    store_vector(out_row(args, b, row) + 8 * thread, words);
    if (thread == 0) store_lse(args, b, row, part.largest, part.sum);
  }
}

#define TIERCEL_MLA_COMBINE(dtype, name, many) \
  {DType::k##dtype, many,                      \
   Kernel("mla_combine<" #dtype name ">",      \
          reinterpret_cast<const void*>(mla_combine<dtype, many>))}

const MlaCombineKernel kKernels[] = {
    TIERCEL_MLA_COMBINE(BFloat16, "", false), TIERCEL_MLA_COMBINE(Float16, "", false),
    TIERCEL_MLA_COMBINE(BFloat16, ", many", true), TIERCEL_MLA_COMBINE(Float16, ", many", true)};

}  // namespace

const MlaCombineKernel* mla_combine_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
