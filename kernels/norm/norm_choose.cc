// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm/norm_choose.h"

#include <algorithm>
#include <initializer_list>

namespace tiercel {
namespace {

// Rows of more vectors than this are best held in shared memory: measured on an H200.
constexpr int64_t kNormLongVectors = 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Threads that share a row of so many vectors in a block, `per_thread` each: part of a warp, a
// power of two, or whole warps.
int threads_for(int64_t vectors, int per_thread, int fewest = 8) {
  const int64_t threads = ceil_div(vectors, per_thread);
  if (threads > 32) return static_cast<int>(round_up(threads, 32));
  int lanes = fewest;
  while (lanes < threads) lanes *= 2;
  return lanes;
}

template <typename Kernel, typename Fits>
const Kernel* find(const Kernel* kernels, int count, Fits fits) {
  const Kernel* found = std::find_if(kernels, kernels + count, fits);
  return found == kernels + count ? nullptr : found;
}

// Of norm_short and norm_long there are kernels for just what most calls are.
NormKinds kinds_of(const NormProblem& problem) {
  if (problem.streams == 2 || !problem.wide || !problem.plain) return NormKinds::kBoth;
  return problem.kind == NormKind::kLayer ? NormKinds::kLayer : NormKinds::kRms;
}

const NormForwardKernel* forward_kernel(const NormProblem& problem, NormShape shape, int lanes,
                                        int vectors) {
  int count = 0;
  const NormForwardKernel* kernels = norm_forward_kernels(&count);
  const NormKinds kinds = shape == NormShape::kBlock ? NormKinds::kBoth : kinds_of(problem);
  return find(kernels, count, [&](const NormForwardKernel& kernel) {
    return kernel.dtype == problem.dtype && kernel.wide == problem.wide &&
           kernel.residual == (problem.streams == 2) && kernel.kinds == kinds &&
           kernel.shape == shape && kernel.lanes == lanes && kernel.vectors == vectors;
  });
}

// A row has 8 to 32 lanes.
NormChoice<NormForwardKernel> choose_short(const NormProblem& problem, int64_t vectors) {
  NormChoice<NormForwardKernel> choice;
  int per_thread = 4, lanes = vectors <= 32 ? 8 : 32;
  if (problem.wide) {
    per_thread = vectors <= 32 ? 1 : vectors <= 64 ? 2 : 4;
    lanes = vectors <= 8 ? 8 : vectors <= 16 ? 16 : 32;
  }
  const NormForwardKernel* const kernel =
      forward_kernel(problem, NormShape::kShort, lanes, per_thread);
  choice.block = norm_short_threads(kernel->vectors, kernel->rows);
  const int64_t grid = ceil_div(problem.rows, choice.block / lanes * kernel->rows);
  if (grid > 0x7fffffff) return choice;
  choice.kernel = kernel;
  choice.threads_per_row = lanes;
  choice.slice = problem.columns;
  choice.grid = static_cast<int>(grid);
  return choice;
}

// What norm_long has kernels for. Float32 rows fit into registers, but a long layer norm's leave no
// room there for weight and bias.
bool is_long(const NormProblem& problem, int64_t vectors) {
  if (kinds_of(problem) == NormKinds::kBoth) return false;
  if (dtype_bytes(problem.dtype) == 2) return vectors > kNormLongVectors;
  return problem.kind == NormKind::kLayer && vectors > 2 * kNormLongVectors &&
         vectors <= kNormMaxCluster * kNormLongVectors;
}

// What norm_plain has kernels for, but rows that norm_short or norm_long takes (measured on an
// H200): of four bytes only rows of a warp. `small` as in choose_norm_forward().
bool is_plain(const NormProblem& problem, int64_t vectors, bool small) {
  if (kinds_of(problem) == NormKinds::kBoth) return false;
  if (!small && vectors > 64 && vectors <= 128) return true;
  if (dtype_bytes(problem.dtype) == 4 || vectors <= (small ? 32 : 128)) return false;
  return vectors <= kNormLongVectors;
}

// A row has a warp or a block.
NormChoice<NormForwardKernel> choose_plain(const NormProblem& problem, int64_t vectors,
                                           bool small) {
  NormChoice<NormForwardKernel> choice;
  const bool warp = !small && vectors <= 128;
  const int per_thread = small ? 2 : 4;
  choice.threads_per_row = threads_for(vectors, per_thread, 32);
  choice.block = warp ? kNormPlainWarpThreads : choice.threads_per_row;
  choice.slice = problem.columns;
  choice.grid = static_cast<int>(ceil_div(problem.rows, choice.block / choice.threads_per_row));
  choice.kernel = forward_kernel(problem, NormShape::kPlain, warp ? 32 : 0, per_thread);
  return choice;
}

// A row has a cluster, of blocks of one size.
NormChoice<NormForwardKernel> choose_long(const NormProblem& problem, int64_t vectors) {
  NormChoice<NormForwardKernel> choice;
  const int per_thread = vectors > int64_t{4} * kNormLongThreads * kNormMaxCluster ? 8 : 4;
  while (ceil_div(vectors, choice.cluster) > per_thread * kNormLongThreads) choice.cluster *= 2;
  if (problem.rows * choice.cluster > 0x7fffffff) return choice;
  choice.kernel = forward_kernel(problem, NormShape::kLong, 0, per_thread);
  choice.block = choice.threads_per_row = kNormLongThreads;
  choice.slice =
      static_cast<int>(ceil_div(vectors, choice.cluster) * (16 / dtype_bytes(problem.dtype)));
  choice.grid = static_cast<int>(problem.rows * choice.cluster);
  return choice;
}

struct BackwardShape {
  int vectors;  // a thread, of a row
  int rows;     // a thread, at once
  int cluster;
  int threads;         // a block, about
  int stages;          // a team's, of a row each
  int ahead = 0;       // rows a team asks for beyond those, before it may read them
  bool even = false;   // whether a few blocks fewer take part where the rows divide among them
  bool pairs = false;  // whether two blocks, of a row each, add their sums up
};

// As many blocks as there is room for, or up to a thirty-second fewer, with the same number of rows
// each: 128 of 132 for a power of two of rows. 0 if no such number divides the rows. Of blocks that
// go in pairs (`step` 2) an even number.
int even_blocks(int64_t rows, int blocks, int step = 1) {
  for (int count = blocks; count * 32 >= blocks * 31; count -= step) {
    if (rows % count == 0) return count;
  }
  return 0;
}

const NormBackwardKernel* backward_kernel(const NormProblem& problem, const BackwardShape& shape) {
  int count = 0;
  const NormBackwardKernel* kernels = norm_backward_kernels(&count);
  return find(kernels, count, [&](const NormBackwardKernel& kernel) {
    return kernel.dtype == problem.dtype && kernel.wide == problem.wide &&
           kernel.kind == problem.kind && kernel.vectors == shape.vectors &&
           kernel.rows == shape.rows;
  });
}

// Measured on an H200. The cluster is the smallest that holds a row. Few bytes on their way are
// better than many, as long as there are enough: 64 to 128 KB in all stages.
BackwardShape backward_shape(const NormProblem& problem, int64_t vectors) {
  const auto clustered = [&](BackwardShape shape) {
    while (ceil_div(vectors, shape.cluster) > int64_t{shape.vectors} * shape.threads) {
      shape.cluster *= 2;
    }
    return shape;
  };
  const bool narrow_element = dtype_bytes(problem.dtype) == 2;
  if (!problem.wide) return clustered({narrow_element ? 8 : 16, 1, 1, kNormNarrowThreads, 1});
  const bool layer = problem.kind == NormKind::kLayer;
  if (vectors <= (narrow_element ? 32 : 64)) {
    const bool most = problem.rows >= int64_t{1024} * problem.multiprocessors;
    const bool heads = narrow_element && !layer && vectors > 8 && vectors <= 16;
    if (most && heads && even_blocks(problem.rows, problem.multiprocessors) > 0) {
      return {2, 1, 1, kNormMaxThreads, 3, 3, true};
    }
    return {2, 1, 1, layer && narrow_element ? kNormMaxThreads : 384, 3};
  }
  if (!narrow_element) {
    if (vectors <= 1024) return {4, 1, 1, 256, 2, layer ? 0 : 4};
    if (!layer && vectors <= 4096) return clustered({4, 1, 1, 256, 3, 4});
    const bool even = layer && vectors > 2048;
    const BackwardShape shape = clustered({4, 1, 1, kNormMaxThreads, 2, 2, even});
    if (shape.cluster <= kNormMaxCluster) return shape;
    return clustered({8, 1, 1, kNormMaxThreads, 2});
  }
  // A layer norm's block has room for two of the longest rows of two tensors, not of three. Blocks
  // of such rows leave so many sums that it pays to add up those of two first.
  if (layer && vectors > 1056 && problem.streams == 2) {
    const bool whole = vectors <= int64_t{4} * kNormMaxThreads;  // a block has a row
    return clustered({4, 1, 1, kNormMaxThreads, 2, whole ? 1 : 0, true, whole});
  }
  if (vectors > 4096) {
    const BackwardShape shape = clustered({2, 2, 1, kNormMaxThreads, 4});
    if (!layer && shape.cluster <= kNormMaxCluster) return shape;
    return clustered({4, 1, 1, kNormMaxThreads, 2});
  }
  // Three vectors a thread where that leaves no more of them idle than two.
  const bool threes = 3 * threads_for(vectors, 3, 32) <= 2 * threads_for(vectors, 2, 32);
  if (layer) {
    const bool many = problem.rows >= int64_t{64} * problem.multiprocessors;
    // Whole teams of 96 or 128 threads; beside such blocks there is room for norm_reduce.
    const bool some = problem.rows >= int64_t{30} * problem.multiprocessors;
    if (problem.streams == 2 && ((many && vectors == 384) || (some && vectors == 512))) {
      return {4, 1, 1, 384, 2, 0, vectors == 384};
    }
    if (vectors <= 1056 && threes) return {3, 1, 1, vectors > 96 ? kNormMaxThreads : 384, 2};
    if (many && vectors > 96 && vectors <= 256) return {4, 1, 1, 384, 2, vectors <= 128 ? 2 : 0};
    // Two rows a thread leave no room for a second team.
    if (vectors > 512 && vectors <= 896) return {4, 1, 1, kNormMaxThreads, 2};
    return clustered({2, 2, 1, kNormMaxThreads, 4});
  }
  if (vectors <= 1056 && (threes || vectors > 256)) {
    return {3, 1, 1, vectors > 576 && vectors <= 672 ? kNormMaxThreads : 384, 2};
  }
  if (vectors > 1024 && vectors <= 2112) return clustered({3, 1, 1, 384, 3});
  if (vectors > 1024) return clustered({2, 2, 1, kNormMaxThreads, 4});
  return {2, 2, 1, 384, 4, 4};
}

}  // namespace

NormChoice<NormForwardKernel> choose_norm_forward(const NormProblem& problem) {
  NormChoice<NormForwardKernel> choice;
  const int elements = problem.wide ? static_cast<int>(16 / dtype_bytes(problem.dtype)) : 1;
  const int64_t vectors = ceil_div(problem.columns, elements);
  // Few enough that each vector can have a thread of its own: latency counts, not bytes.
  const bool small = problem.rows * vectors <= problem.multiprocessors * int64_t{1536};
  if (is_plain(problem, vectors, small)) return choose_plain(problem, vectors, small);
  if (!(vectors > 128 || (problem.wide && small && vectors > 32))) {
    return choose_short(problem, vectors);
  }
  const int element = static_cast<int>(dtype_bytes(problem.dtype));
  if (is_long(problem, vectors)) return choose_long(problem, vectors);
  int per_thread = 4;
  if (!problem.wide) {
    if (vectors > 2048) per_thread = problem.streams == 2 ? 16 : 32;
  } else if (small && vectors <= 1024) {
    const bool no_ones = element == 2 && problem.streams == 1;  // there norm_plain does mostly
    per_thread = vectors <= 512 && !no_ones ? 1 : 2;
  } else if (element == 2 && problem.streams == 2 && vectors <= 1024) {
    per_thread = 2;
  }
  const auto most_threads = [&] { return norm_forward_threads(element, problem.wide, per_thread); };
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
  if (threads() > most || problem.rows * choice.cluster > 0x7fffffff) return choice;
  choice.threads_per_row = choice.block = std::max(32, threads());
  choice.slice = static_cast<int>(ceil_div(vectors, choice.cluster)) * elements;
  choice.grid = static_cast<int>(problem.rows * choice.cluster);
  choice.kernel = forward_kernel(problem, NormShape::kBlock, 0, per_thread);
  // Four such blocks on a multiprocessor: five have more on their way than memory likes.
  if (problem.wide && !small && problem.streams == 2 && element == 2 && per_thread == 2 &&
      choice.block == 256) {
    choice.dynamic_smem = 44 * 1024;
  }
  return choice;
}

NormChoice<NormBackwardKernel> choose_norm_backward(const NormProblem& problem) {
  NormChoice<NormBackwardKernel> choice;
  const int64_t element = dtype_bytes(problem.dtype);
  const int elements = static_cast<int>(16 / element);  // of a vector in shared memory
  const int64_t vectors = ceil_div(problem.columns, elements);
  BackwardShape shape = backward_shape(problem, vectors);
  const NormBackwardKernel* const kernel = backward_kernel(problem, shape);
  const bool keeps = norm_backward_keeps(static_cast<int>(element), problem.wide, shape.vectors,
                                         shape.rows, problem.kind);
  // Of a warp, as the kernels have it.
  const int fewest = !problem.wide ? 8 : shape.vectors * shape.rows > 2 ? 32 : 4;
  for (; shape.cluster <= kNormMaxCluster; shape.cluster *= 2) {
    const int64_t part = ceil_div(vectors, shape.cluster);
    choice.cluster = shape.cluster;
    choice.threads_per_row = threads_for(part, shape.vectors, fewest);
    choice.slice = static_cast<int>(part) * elements;
    const int team_threads = std::max(choice.threads_per_row, 32);
    const int rows_per_team = team_threads / choice.threads_per_row * shape.rows;
    // Blocks for all multiprocessors first, then teams in them. Larger clusters do not find room on
    // all of them: of 132 on 120.
    const int multiprocessors =
        shape.cluster > 2 ? problem.multiprocessors * 10 / 11 : problem.multiprocessors;
    choice.paired = shape.pairs && problem.rows >= multiprocessors && multiprocessors > 1;
    const int step = choice.paired ? 2 : 1;
    const int most_blocks = std::max(1, multiprocessors / shape.cluster) / step * step;
    const int even = shape.even ? even_blocks(problem.rows, most_blocks, step) : 0;
    const int blocks = even > 0 ? even : most_blocks;
    const int64_t most_teams = std::max(1, shape.threads / team_threads);
    const int64_t teams_of_rows =
        std::max<int64_t>(1, ceil_div(ceil_div(problem.rows, rows_per_team), blocks));
    const int64_t teams = shape.cluster > 1 ? 1 : std::min(most_teams, teams_of_rows);
    choice.block = static_cast<int>(teams) * team_threads;
    const int64_t weight = keeps ? 0 : choice.slice * int64_t{4};
    const int64_t room = kNormMaxDynamicSmem - weight - 128;
    const int64_t stage = choice.slice * element * problem.streams *
                          (team_threads / choice.threads_per_row) * teams;  // of all teams
    // The ring's memory holds the teams' sums of the weight's gradient at the end.
    const int64_t sums = teams * choice.slice * int64_t{4};
    if (stage * shape.rows > room || sums > room) continue;
    choice.stages = static_cast<int>(std::min<int64_t>(room / stage, shape.stages));
    choice.ahead = shape.ahead;
    choice.weight_offset = static_cast<int>(round_up(std::max(choice.stages * stage, sums), 128));
    // More than half of what there is: two blocks on one multiprocessor leave another empty.
    choice.dynamic_smem =
        static_cast<int>(std::max<int64_t>(choice.weight_offset + weight, 116 * 1024));
    const int64_t tiles = std::max<int64_t>(1, ceil_div(problem.rows, rows_per_team * teams));
    choice.grid = static_cast<int>(std::min<int64_t>(blocks, tiles)) * shape.cluster;
    if (choice.paired) choice.cluster = 2;
    choice.kernel = kernel;
    return choice;
  }
  return choice;
}

}  // namespace tiercel
