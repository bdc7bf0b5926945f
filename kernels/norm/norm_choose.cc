// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm/norm_choose.h"

#include <algorithm>
#include <initializer_list>

namespace tiercel {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Threads that share a row of so many vectors in a block, `per_thread` each: part of a warp, a
// power of two, or whole warps.
int threads_for(int64_t vectors, int per_thread) {
  const int64_t threads = ceil_div(vectors, per_thread);
  if (threads > 32) return static_cast<int>(round_up(threads, 32));
  int lanes = 8;
  while (lanes < threads) lanes *= 2;
  return lanes;
}

template <typename Kernel, typename Fits>
const Kernel* find(const Kernel* kernels, int count, Fits fits) {
  const Kernel* found = std::find_if(kernels, kernels + count, fits);
  return found == kernels + count ? nullptr : found;
}

const NormForwardKernel* forward_kernel(const NormProblem& problem, bool block_row, int vectors) {
  int count = 0;
  const NormForwardKernel* kernels = norm_forward_kernels(&count);
  return find(kernels, count, [&](const NormForwardKernel& kernel) {
    return kernel.dtype == problem.dtype && kernel.wide == problem.wide &&
           kernel.residual == (problem.streams == 2) && kernel.block_row == block_row &&
           kernel.vectors == vectors;
  });
}

const NormBackwardKernel* backward_kernel(const NormProblem& problem, int vectors) {
  int count = 0;
  const NormBackwardKernel* kernels = norm_backward_kernels(&count);
  return find(kernels, count, [&](const NormBackwardKernel& kernel) {
    return kernel.dtype == problem.dtype && kernel.wide == problem.wide &&
           kernel.kind == problem.kind && kernel.vectors == vectors;
  });
}

// How many threads a backward block had best have, and how many stages: measured on an H200. More
// rows under way than it takes spread the accesses to memory.
int threads_of_teams(const NormProblem& problem, int threads_per_row) {
  if (!problem.wide) return kNormNarrowThreads;
  if (problem.kind == NormKind::kLayer || threads_per_row < 32) return kNormMaxThreads;
  if (dtype_bytes(problem.dtype) == 4) return kNormMaxThreads / 2;
  return threads_per_row <= 128 ? 384 : kNormMaxThreads;
}

int64_t stages_of(const NormProblem& problem, int threads_per_row) {
  if (dtype_bytes(problem.dtype) == 4 || threads_per_row < 32) return 3;
  return problem.kind == NormKind::kLayer && threads_per_row == 32 ? 3 : 2;
}

}  // namespace

NormChoice<NormForwardKernel> choose_norm_forward(const NormProblem& problem) {
  NormChoice<NormForwardKernel> choice;
  const int elements = problem.wide ? static_cast<int>(16 / dtype_bytes(problem.dtype)) : 1;
  const int64_t vectors = ceil_div(problem.columns, elements);
  // Few enough that each vector can have a thread of its own: latency counts, not bytes.
  const bool small = problem.rows * vectors <= problem.multiprocessors * int64_t{1536};
  const bool block_row = vectors > 128 || (problem.wide && small && vectors > 32);
  int64_t grid = 0;
  int per_thread = 4;
  if (!block_row) {  // a warp or less a row
    if (problem.wide && vectors <= 64) per_thread = vectors <= 8 ? 1 : 2;
    choice.threads_per_row = threads_for(vectors, per_thread);
    choice.slice = problem.columns;
    // Many short rows: the blocks themselves are what takes time, so fewer and larger ones.
    choice.block = per_thread <= 2 && problem.rows * choice.threads_per_row >= (1 << 18) ? 256 : 64;
    grid = ceil_div(problem.rows, choice.block / choice.threads_per_row);
  } else {
    if (!problem.wide) {
      if (vectors > 2048) per_thread = problem.streams == 2 ? 16 : 32;
    } else if (small && vectors <= 1024) {
      per_thread = vectors <= 512 ? 1 : 2;
    }
    const int element = static_cast<int>(dtype_bytes(problem.dtype));
    const auto most_threads = [&] {
      return norm_forward_threads(element, problem.wide, per_thread, true);
    };
    if (problem.wide && vectors > int64_t{kNormMaxCluster} * most_threads() * per_thread) {
      per_thread = 8;
    }
    const int most = most_threads();
    // A layer norm's float32 rows need the most of weight and bias: fewer blocks share a row.
    const int wanted = problem.kind == NormKind::kLayer && element == 4 ? 512 : 256;
    const auto threads = [&] { return threads_for(ceil_div(vectors, choice.cluster), per_thread); };
    // Two blocks of half the size hide more of each other's latency; a cluster has eight at most.
    while (threads() > (choice.cluster < kNormMaxCluster ? std::min(most, wanted) : most) &&
           choice.cluster < kNormMaxCluster) {
      if (threads() <= most && choice.cluster == kNormMaxCluster / 2) break;
      choice.cluster *= 2;
    }
    if (per_thread <= 2) choice.cluster = 1;
    if (threads() > most) return choice;
    const int64_t part = ceil_div(vectors, choice.cluster);
    choice.threads_per_row = choice.block = std::max(32, threads());
    choice.slice = static_cast<int>(part) * elements;
    grid = problem.rows * choice.cluster;
  }
  if (grid > 0x7fffffff) return choice;
  choice.kernel = forward_kernel(problem, block_row, per_thread);
  choice.grid = static_cast<int>(grid);
  return choice;
}

NormChoice<NormBackwardKernel> choose_norm_backward(const NormProblem& problem) {
  NormChoice<NormBackwardKernel> choice;
  const int64_t element = dtype_bytes(problem.dtype);
  const int elements = static_cast<int>(16 / element);  // of a vector in shared memory
  const int64_t vectors = ceil_div(problem.columns, elements);
  const int widest = elements == 8 ? 4 : 8;
  const int max_threads = problem.wide ? kNormMaxThreads : kNormNarrowThreads;
  int per_thread = problem.wide ? widest : 2 * widest;
  if (problem.wide && vectors <= 32 * widest / 2) per_thread /= 2;
  if (problem.wide && vectors <= 32 * widest / 4) per_thread /= 2;
  // Eight registers of four float32 sums each are for rows that no cluster holds otherwise.
  const bool wide_float32 = problem.wide && elements == 4;
  if (wide_float32 && vectors <= int64_t{kNormMaxCluster} * kNormMaxThreads * 4) {
    per_thread = std::min(per_thread, 4);
  }
  int teams = 1;
  for (;; choice.cluster *= 2) {
    if (choice.cluster > kNormMaxCluster) return choice;
    const int64_t part = ceil_div(vectors, choice.cluster);
    choice.threads_per_row = threads_for(part, per_thread);
    if (choice.threads_per_row > max_threads) continue;
    choice.slice = static_cast<int>(part) * elements;
    const int team_threads = std::max(choice.threads_per_row, 32);
    const int rows_per_team = team_threads / choice.threads_per_row;
    const int64_t tiles = ceil_div(problem.rows, rows_per_team);
    // Blocks for all multiprocessors first, then teams in them.
    const int blocks = std::max(1, problem.multiprocessors / choice.cluster);
    teams = static_cast<int>(std::min<int64_t>(
        std::max(1, threads_of_teams(problem, choice.threads_per_row) / team_threads),
        std::max<int64_t>(1, ceil_div(tiles, blocks))));
    if (choice.cluster > 1) teams = 1;
    choice.block = teams * team_threads;
    const int64_t stage = choice.slice * element * rows_per_team * problem.streams;
    const int64_t weight = choice.slice * int64_t{4};
    const int64_t room = kNormMaxDynamicSmem - weight - 128;
    // The ring's memory holds the teams' sums of the weight's gradient at the end.
    const int64_t sums = teams * choice.slice * int64_t{4};
    const int64_t most = stages_of(problem, choice.threads_per_row);
    const int64_t stages = problem.wide ? std::min(room / (teams * stage), most) : 1;
    if (stages < 1 || teams * stage > room || sums > room) continue;
    choice.stages = static_cast<int>(stages);
    choice.weight_offset =
        static_cast<int>(round_up(std::max(choice.stages * teams * stage, sums), 128));
    // More than half of what there is: two blocks on one multiprocessor leave another empty.
    choice.dynamic_smem =
        static_cast<int>(std::max<int64_t>(choice.weight_offset + weight, 116 * 1024));
    choice.grid =
        static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(blocks, ceil_div(tiles, teams)))) *
        choice.cluster;
    break;
  }
  choice.kernel = backward_kernel(problem, per_thread);
  return choice;
}

}  // namespace tiercel
