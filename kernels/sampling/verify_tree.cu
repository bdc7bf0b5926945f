// SPDX-License-Identifier: Apache-2.0
// Speculative sampling over a tree of draft tokens: from the root on, a node's children are tried
// in order, each against the distribution that the rejected ones before it have left.
//
// At a node with the target's probabilities p, child c with token x_c was drawn from q_c. With r =
// p at first, it is accepted with probability min(1, r(x_c) / q_c(x_c)); otherwise
//
//   r := max(r - q_c, 0) / Z,   Z = sum of max(r - q_c, 0)
//
// and the next child is tried. Behind the last one a token is drawn from r. Children have higher
// numbers than their parents, so one pass over the nodes finds the path.
//
// One block per sequence, after sample_positions, which has drawn a token of each row. Each
// rejected child costs one pass over the row: r is computed anew from p and the rejected children's
// q, so the j-th reads j rows of q. Sums are of whole numbers, in any order.
#include <cstdint>

#include "kernels/sampling/kept.cuh"
#include "kernels/sampling/philox.cuh"
#include "kernels/sampling/row.cuh"
#include "kernels/sampling/sample_kernels.h"
#include "kernels/sm90/float_format.cuh"
#include "kernels/sm90/grid_dependency.cuh"
#include "kernels/sm90/reduce.cuh"

namespace tiercel {
namespace {

constexpr float kMassUnit = 1125899906842624.0f;  // 2^50

struct Tree {
  uint64_t sums[kVerifySegments];  // of the last rejection's masses
  float scales[kTreeNodes];        // 1 / Z of the node's rejected children
  int rejected[kTreeNodes];        // their numbers
  int parents[kTreeNodes];
};

__global__ void __launch_bounds__(kVerifyThreads)
    verify_tree(const __grid_constant__ VerifyTreeArgs args) {
  __shared__ Tree tree;
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t sequence = blockIdx.x, first_row = sequence * args.positions;
  const int count = args.positions - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_node = sequence * count;
  const uint64_t seed = parameter(args.seed, sequence);
  const uint64_t offset = parameter(args.offset, sequence);
  const uint64_t stream = args.seed.of_rows != nullptr ? 0 : sequence;
  constexpr uint64_t kToAccept = uint64_t{1} << 62, kToReplace = uint64_t{1} << 63;
  for (int i = threadIdx.x; i < count; i += kVerifyThreads) {
    tree.parents[i] = args.parents[first_node + i];
  }
  __syncthreads();

  const auto store = [&](int i, int64_t token) {
    if (args.wide) {
      static_cast<int64_t*>(args.tokens)[first_row + i] = token;
    } else {
      static_cast<int*>(args.tokens)[first_row + i] = static_cast<int>(token);
    }
  };
  // The state of the path at its last node, which is row `at`.
  int at = 0, depth = 0, rejections = 0;
  bool spent = false;  // rounding has left nothing of r
  Kept kept = args.kept[first_row];
  float inverse = 0.0f;
  const auto enter = [&](int row) {
    at = row, rejections = 0, spent = false;
    kept = args.kept[first_row + row];
    inverse = static_cast<float>(kept.unit / static_cast<double>(kept.all));
  };
  const auto logit = [&](int64_t column) {
    const char* row = args.logits + (first_row + at) * args.stride;
    if (args.dtype == DType::kFloat32) return load_element<Float32>(row + column * 4);
    return args.dtype == DType::kBFloat16 ? load_element<BFloat16>(row + column * 2)
                                          : load_element<Float16>(row + column * 2);
  };
  const auto draft_prob = [&](int node, int64_t column) {
    return args.probs[(first_node + node) * args.columns + column];
  };
  // r behind the first `behind` rejections, the last of them not yet divided by its Z.
  const auto left = [&](int64_t column, int behind) {
    float r = probability(kept, inverse, logit(column));
#pragma unroll 1
    for (int j = 0; j < behind; ++j) {
      if (j > 0) r *= tree.scales[j - 1];
      r = fmaxf(r - draft_prob(tree.rejected[j], column), 0.0f);
    }
    return r;
  };
  const auto mass = [&](int column) {
    if (column >= args.columns) return uint64_t{0};
    return static_cast<uint64_t>(__float2ull_rn(left(column, rejections) * kMassUnit));
  };
  const int segments = (args.columns + kSampleSegment - 1) / kSampleSegment;

  enter(0);
  uint64_t all = 0;  // of the masses
#pragma unroll 1
  for (int node = 0; node < count; ++node) {
    if (tree.parents[node] != at - 1) continue;
    const int64_t token = args.wide ? static_cast<const int64_t*>(args.draft)[first_node + node]
                                    : static_cast<const int*>(args.draft)[first_node + node];
    const bool by_chance = args.probs != nullptr && kept.all != 0;
    bool accept;
    if (!by_chance) {
      accept = token >= 0 && token == args.drawn[first_row + at];
    } else {
      accept = token >= 0 && token < args.columns && !spent;
      if (accept) {
        float r = left(token, rejections);
        if (rejections > 0) r *= tree.scales[rejections - 1];
        const double q = draft_prob(node, token);
        const double u = (philox(seed, offset + node, stream ^ kToAccept) >> 11) * 0x1p-53;
        accept = u * q < r;
      }
    }
    if (accept) {
      if (threadIdx.x == 0) {
        store(depth, token);
        args.path[first_node + depth] = node;
      }
      ++depth;
      enter(node + 1);
      continue;
    }
    if (!by_chance || spent) continue;
    __syncthreads();  // all have read what the last rejection wrote
    if (threadIdx.x == 0) tree.rejected[rejections] = node;
    ++rejections;
    __syncthreads();
#pragma unroll 1
    for (int segment = warp; segment < segments; segment += kVerifyThreads / 32) {
      uint64_t sum = 0;
#pragma unroll 4
      for (int i = lane; i < kSampleSegment; i += 32) sum += mass(segment * kSampleSegment + i);
      sum = warp_sum(sum);
      if (lane == 0) tree.sums[segment] = sum;
    }
    __syncthreads();
    all = 0;
    for (int s = lane; s < segments; s += 32) all += tree.sums[s];
    all = warp_sum(all);
    spent = all == 0;
    if (threadIdx.x == 0) {
      tree.scales[rejections - 1] = static_cast<float>(kMassUnit / static_cast<double>(all));
    }
    __syncthreads();
  }

  for (int i = threadIdx.x; i <= count; i += kVerifyThreads) {
    if (i > depth) store(i, -1);
    if (i >= depth && i < count) args.path[first_node + i] = -1;
  }
  if (threadIdx.x == 0) args.accepted[sequence] = depth;
  const int drawn = args.drawn[first_row + at];
  if (rejections == 0 || spent) {
    if (threadIdx.x == 0) store(depth, drawn);
    return;
  }
  if (warp != 0) return;
  // The first column at which the running sum exceeds the target; first its segment.
  uint64_t target = __umul64hi(philox(seed, offset + at, stream ^ kToReplace), all);
  const auto find = [&](int end, auto amount) {
    for (int begin = 0; begin < end; begin += 32) {
      const uint64_t own = begin + lane < end ? amount(begin + lane) : 0;
      const uint64_t running = warp_running_sum(own);
      const unsigned beyond = __ballot_sync(kFullWarp, running > target);
      if (beyond != 0) {
        const int found = __ffs(beyond) - 1;
        target -= __shfl_sync(kFullWarp, running - own, found);
        return begin + found;
      }
      target -= __shfl_sync(kFullWarp, running, 31);
    }
    return -1;
  };
  const int segment = find(segments, [&](int s) { return tree.sums[s]; });
  const int column =
      find(kSampleSegment, [&](int i) { return mass(segment * kSampleSegment + i); });
  if (lane == 0) store(depth, segment * kSampleSegment + column);
}

const VerifyTreeKernel kKernels[] = {
    {Kernel("verify_tree", reinterpret_cast<const void*>(verify_tree))}};

}  // namespace

const VerifyTreeKernel* verify_tree_kernels(int* count) {
  *count = 1;
  return kKernels;
}

}  // namespace tiercel
