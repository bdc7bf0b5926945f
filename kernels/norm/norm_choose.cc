// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm/norm_choose.h"

#include <algorithm>

#include "kernels/norm/norm_backward_config.h"
#include "kernels/norm/norm_threads.h"
#include "kernels/sm90/invariant.h"

namespace tiercel {
namespace {

// Longer rows are faster in shared memory: measured on an H200.
constexpr int64_t kNormLongVectors = 1024;

template <typename Kernel, typename Fits>
const Kernel* find(const Kernel* kernels, int count, Fits fits) {
  const Kernel* found = std::find_if(kernels, kernels + count, fits);
  return found == kernels + count ? nullptr : found;
}

// The specialised kernels of norm_short, norm_plain and norm_long that take the problem.
NormSpecialization specialization_of(const NormProblem& problem, NormRowOwner owner) {
  const bool layer = problem.kind == NormKind::kLayer;
  if (owner == NormRowOwner::kBlock || !problem.aligned16 || !problem.plain) {
    return NormSpecialization::kBoth;
  }
  if (problem.streams == 2) {
    const bool has = owner == NormRowOwner::kPlain && !layer && dtype_bytes(problem.dtype) == 2;
    return has ? NormSpecialization::kRms : NormSpecialization::kBoth;
  }
  return layer ? NormSpecialization::kLayer : NormSpecialization::kRms;
}

const NormForwardKernel* forward_kernel(const NormProblem& problem, NormRowOwner owner, int lanes,
                                        int vectors) {
  int count = 0;
  const NormForwardKernel* kernels = norm_forward_kernels(&count);
  const NormSpecialization specialization = specialization_of(problem, owner);
  return find(kernels, count, [&](const NormForwardKernel& kernel) {
    return kernel.dtype == problem.dtype && kernel.aligned16 == problem.aligned16 &&
           kernel.residual == (problem.streams == 2) && kernel.specialization == specialization &&
           kernel.owner == owner && kernel.lanes == lanes && kernel.vectors == vectors;
  });
}

// 8 to 32 lanes per row.
NormChoice<NormForwardKernel> choose_short(const NormProblem& problem, int64_t vectors) {
  NormChoice<NormForwardKernel> choice;
  int per_thread = 4, lanes = vectors <= 32 ? 8 : 32;
  if (problem.aligned16) {
    per_thread = vectors <= 32 ? 1 : vectors <= 64 ? 2 : 4;
    lanes = vectors <= 8 ? 8 : vectors <= 16 ? 16 : 32;
  }
  const NormForwardKernel* const kernel =
      forward_kernel(problem, NormRowOwner::kShort, lanes, per_thread);
  choice.block = norm_short_threads(kernel->vectors, kernel->rows);
  const int64_t grid = ceil_div(problem.rows, choice.block / lanes * kernel->rows);
  if (grid > 0x7fffffff) return choice;
  choice.kernel = kernel;
  choice.threads_per_row = lanes;
  choice.slice = problem.columns;
  choice.grid = static_cast<int>(grid);
  return choice;
}

// norm_long has a kernel. Float32 rows fit into registers, but those of a long layer norm leave no
// room for weight and bias.
bool is_long(const NormProblem& problem, int64_t vectors) {
  if (specialization_of(problem, NormRowOwner::kLong) == NormSpecialization::kBoth) return false;
  if (dtype_bytes(problem.dtype) == 2) return vectors > kNormLongVectors;
  return problem.kind == NormKind::kLayer && vectors > 2 * kNormLongVectors &&
         vectors <= kNormMaxCluster * kNormLongVectors;
}

// norm_plain has a kernel, and norm_short and norm_long do not take the rows. float32: only many
// rows of one warp each. `small` as in choose_forward().
bool is_plain(const NormProblem& problem, int64_t vectors, bool small) {
  if (specialization_of(problem, NormRowOwner::kPlain) == NormSpecialization::kBoth) return false;
  if (dtype_bytes(problem.dtype) == 4) return !small && vectors > 32 && vectors <= 128;
  return vectors > (problem.streams == 2 ? 64 : 32) && vectors <= kNormLongVectors;
}

struct PlainConfig {
  bool warp;             // one warp per row, without a barrier; else one block
  int vectors;           // per thread
  int prefetch_threads;  // per multiprocessor, whose rows are prefetched
};

// Depends on the vectors per multiprocessor, in steps measured on an H100 with 16-bit elements and
// 384 to 8192 columns; they follow no simple rule. Prefetching more rows competes with the previous
// grid's reads.
PlainConfig plain_config(const NormProblem& problem, int64_t vectors) {
  const int64_t rows = rows_to_choose_by(problem.rows);
  const int64_t share = rows * vectors / std::max(1, problem.multiprocessors);
  const bool layer = problem.kind == NormKind::kLayer, residual = problem.streams == 2;
  const bool warp = vectors <= 128 && rows > problem.multiprocessors;
  const PlainConfig warps{true, vectors <= 64 ? 2 : 4, 1024};
  if (dtype_bytes(problem.dtype) == 4) {  // not measured: prefetch as in choose_norm_forward()
    return {true, warps.vectors, problem.rows > int64_t{64} * problem.multiprocessors ? 768 : 1024};
  }
  if (warp && vectors <= 64) return {true, 2, share > 1024 && share <= 2048 ? 512 : 1024};
  if (share > (layer ? 2048 : 3072)) return {warp, 4, 512};
  if (residual) {
    if (share > 1536 || (share > 768 && vectors <= 128)) return {false, 2, 512};
    if (share > 768) return {false, 4, 2048};
    return warp ? warps : PlainConfig{false, 2, 2048};
  }
  if (layer && warp && share <= 1024) return warps;
  if (share > (layer ? 1536 : 2048)) return {false, 2, 512};
  const int64_t ones =
      !layer || share > 1024 ? 512 : 128;  // up to so many vectors have a thread each
  return {false, vectors <= ones ? 1 : 2, 2048};
}

NormChoice<NormForwardKernel> choose_plain(const NormProblem& problem, int64_t vectors) {
  NormChoice<NormForwardKernel> choice;
  const PlainConfig config = plain_config(problem, vectors);
  choice.threads_per_row = config.warp ? 32 : threads_for(vectors, config.vectors, 32);
  choice.block = config.warp ? kNormPlainWarpThreads : choice.threads_per_row;
  choice.slice = problem.columns;
  choice.grid = static_cast<int>(ceil_div(problem.rows, choice.block / choice.threads_per_row));
  choice.prefetch = config.prefetch_threads / choice.block;
  choice.kernel =
      forward_kernel(problem, NormRowOwner::kPlain, config.warp ? 32 : 0, config.vectors);
  return choice;
}

// One cluster per row, of blocks of one size.
NormChoice<NormForwardKernel> choose_long(const NormProblem& problem, int64_t vectors) {
  NormChoice<NormForwardKernel> choice;
  const int per_thread = vectors > int64_t{4} * kNormLongThreads * kNormMaxCluster ? 8 : 4;
  while (ceil_div(vectors, choice.cluster) > per_thread * kNormLongThreads) choice.cluster *= 2;
  if (problem.rows * choice.cluster > 0x7fffffff) return choice;
  choice.kernel = forward_kernel(problem, NormRowOwner::kLong, 0, per_thread);
  choice.block = choice.threads_per_row = kNormLongThreads;
  choice.slice =
      static_cast<int>(ceil_div(vectors, choice.cluster) * (16 / dtype_bytes(problem.dtype)));
  choice.grid = static_cast<int>(problem.rows * choice.cluster);
  return choice;
}

NormChoice<NormForwardKernel> choose_forward(const NormProblem& problem) {
  NormChoice<NormForwardKernel> choice;
  const int elements = problem.aligned16 ? static_cast<int>(16 / dtype_bytes(problem.dtype)) : 1;
  const int64_t vectors = ceil_div(problem.columns, elements);
  // Few enough for one thread per vector: latency counts, not bytes.
  const int64_t rows = rows_to_choose_by(problem.rows);
  const bool small = rows * vectors <= problem.multiprocessors * int64_t{1536};
  if (is_plain(problem, vectors, small)) return choose_plain(problem, vectors);
  if (!(vectors > 128 || (problem.aligned16 && small && vectors > 32))) {
    return choose_short(problem, vectors);
  }
  const int element = static_cast<int>(dtype_bytes(problem.dtype));
  if (is_long(problem, vectors)) return choose_long(problem, vectors);
  int per_thread = 4;
  if (!problem.aligned16) {
    if (vectors > 2048) per_thread = problem.streams == 2 ? 16 : 32;
  } else if (small && vectors <= 1024) {
    const bool no_ones = element == 2 && problem.streams == 1;  // norm_plain takes most of these
    per_thread = vectors <= 512 && !no_ones ? 1 : 2;
  } else if (element == 2 && problem.streams == 2 && vectors <= 1024) {
    per_thread = 2;
  }
  const auto most_threads = [&] {
    return norm_forward_threads(element, problem.aligned16, per_thread);
  };
  if (problem.aligned16 && vectors > int64_t{kNormMaxCluster} * most_threads() * per_thread) {
    per_thread = 8;
  }
  const int most = most_threads();
  // A float32 layer norm reads the most of weight and bias: let fewer blocks share a row.
  const int wanted = problem.kind == NormKind::kLayer && element == 4 ? 512 : 256;
  const auto threads = [&] { return threads_for(ceil_div(vectors, choice.cluster), per_thread); };
  // Two blocks of half the size hide more of each other's latency; a cluster has at most eight.
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
  choice.kernel = forward_kernel(problem, NormRowOwner::kBlock, 0, per_thread);
  // Limits a multiprocessor to four such blocks: five have more bytes in flight than is best.
  if (problem.aligned16 && !small && problem.streams == 2 && element == 2 && per_thread == 2 &&
      choice.block == 256) {
    choice.dynamic_smem = 44 * 1024;
  }
  return choice;
}

const NormBackwardKernel* backward_kernel(const NormProblem& problem,
                                          const NormBackwardConfig& config, bool is_short) {
  int count = 0;
  const NormBackwardKernel* kernels = norm_backward_kernels(&count);
  return find(kernels, count, [&](const NormBackwardKernel& kernel) {
    return kernel.dtype == problem.dtype && kernel.aligned16 == problem.aligned16 &&
           kernel.kind == problem.kind && kernel.vectors == config.vectors &&
           kernel.rows == config.rows && kernel.is_short == is_short;
  });
}

// The launch of a configuration; without a kernel if shared memory has no room or there is none.
NormChoice<NormBackwardKernel> configure_backward(const NormProblem& problem,
                                                  NormBackwardConfig config, int64_t vectors) {
  NormChoice<NormBackwardKernel> choice;
  const int64_t element = dtype_bytes(problem.dtype);
  const int elements = static_cast<int>(16 / element);  // per vector in shared memory
  const bool short_rows = norm_backward_has_short(problem, vectors) && config.rows == 1 &&
                          config.cluster == 1 && config.vectors == ceil_div(vectors, 32);
  if (short_rows) {
    config.threads = std::min(config.threads, norm_backward_short_threads(config.vectors));
  }
  const NormBackwardKernel* const kernel = backward_kernel(problem, config, short_rows);
  const bool keeps = norm_backward_keeps_weight(static_cast<int>(element), problem.aligned16,
                                                config.vectors, config.rows, problem.kind);
  // The fewest lanes of a warp per row that the kernels support.
  const int fewest = !problem.aligned16 ? 8 : config.vectors * config.rows > 2 ? 32 : 4;
  for (; config.cluster <= kNormMaxCluster; config.cluster *= 2) {
    const int64_t part = ceil_div(vectors, config.cluster);
    choice.cluster = config.cluster;
    choice.threads_per_row = threads_for(part, config.vectors, fewest);
    choice.slice = static_cast<int>(part) * elements;
    const int team_threads = std::max(choice.threads_per_row, 32);
    const int rows_per_team = team_threads / choice.threads_per_row * config.rows;
    // Fill all multiprocessors with blocks first, then the blocks with teams. Larger clusters fit
    // on 120 of 132 multiprocessors only.
    const int multiprocessors =
        config.cluster > 2 ? problem.multiprocessors * 10 / 11 : problem.multiprocessors;
    choice.paired = config.pairs && problem.rows >= multiprocessors && multiprocessors > 1;
    const int step = choice.paired ? 2 : 1;
    const int most_blocks = std::max(1, multiprocessors / config.cluster) / step * step;
    const int even = config.even ? norm_even_blocks(problem.rows, most_blocks, step) : 0;
    const int blocks = even > 0 ? even : most_blocks;
    const int64_t most_teams = std::max(1, config.threads / team_threads);
    const int64_t teams_of_rows =
        std::max<int64_t>(1, ceil_div(ceil_div(problem.rows, rows_per_team), blocks));
    const int64_t teams = config.cluster > 1 ? 1 : std::min(most_teams, teams_of_rows);
    choice.block = static_cast<int>(teams) * team_threads;
    const int64_t weights = short_rows ? 32 * config.vectors * elements : keeps ? 0 : choice.slice;
    const int64_t weight = weights * 4;
    const int64_t room = kNormMaxDynamicSmem - weight - 128;
    const int64_t stage = choice.slice * element * problem.streams *
                          (team_threads / choice.threads_per_row) * teams;  // of all teams
    // At the end the ring's memory holds the teams' sums of the parameters' gradients.
    const int64_t sums =
        (problem.kind == NormKind::kLayer ? 2 : 1) * teams * choice.slice * int64_t{4};
    if (stage * config.rows > room || sums > room) continue;
    const int64_t enough = std::min<int64_t>(ceil_div(config.min_bytes, stage), kNormMaxStages);
    const int64_t stages = std::max<int64_t>(config.stages, enough);
    choice.stages = static_cast<int>(std::min(room / stage, stages));
    choice.prefetch = config.prefetch_rows;
    choice.weight_offset = static_cast<int>(round_up(std::max(choice.stages * stage, sums), 128));
    // More than half of the shared memory: two blocks on one multiprocessor would leave another
    // idle.
    choice.dynamic_smem =
        static_cast<int>(std::max<int64_t>(choice.weight_offset + weight, 116 * 1024));
    const int64_t tiles = std::max<int64_t>(1, ceil_div(problem.rows, rows_per_team * teams));
    choice.grid = static_cast<int>(std::min<int64_t>(blocks, tiles)) * config.cluster;
    if (choice.paired) choice.cluster = 2;
    choice.kernel = kernel;
    return choice;
  }
  return choice;
}

}  // namespace

NormChoice<NormForwardKernel> choose_norm_forward(const NormProblem& problem) {
  NormChoice<NormForwardKernel> choice = choose_forward(problem);
  if (choice.kernel == nullptr || choice.kernel->owner == NormRowOwner::kPlain) return choice;
  // With more rows than are read at once, prefetching fewer is better.
  int threads = choice.kernel->owner == NormRowOwner::kShort ? 1024 : 2048;
  if (int64_t{choice.grid} * choice.block > int64_t{2048} * problem.multiprocessors) {
    threads = problem.streams == 2 ? 512 : 768;
  }
  choice.prefetch = std::max(1, threads / choice.block);
  return choice;
}

NormChoice<NormBackwardKernel> choose_norm_backward(const NormProblem& problem) {
  const int64_t vectors = ceil_div(int64_t{problem.columns} * dtype_bytes(problem.dtype), 16);
  const auto choice_of = [&](const NormBackwardConfig* config) {
    if (config == nullptr || !norm_backward_fits(problem, *config, vectors)) {
      return NormChoice<NormBackwardKernel>();
    }
    return configure_backward(problem, *config, vectors);
  };
  if (problem.config != nullptr) return choice_of(problem.config);
  if (problem.aligned16 && problem.streams == 2) {
    const NormBackwardConfig* tuned =
        norm_backward_tuned(problem.kind)
            .find({problem.device, problem.dtype, {problem.columns}}, problem.rows);
    const NormBackwardConfig measured = norm_backward_measured(problem, vectors);
    for (const NormBackwardConfig* config : {tuned, &measured}) {
      const NormChoice<NormBackwardKernel> choice = choice_of(config);
      if (choice.kernel != nullptr) return choice;
    }
  }
  return configure_backward(problem, norm_backward_heuristic(problem, vectors), vectors);
}

}  // namespace tiercel
