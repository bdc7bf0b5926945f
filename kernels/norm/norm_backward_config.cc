// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm/norm_backward_config.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/norm_threads.h"

namespace tiercel {
namespace {

// Measurements by the memory rate that they end at. Readers take no lock: a map that was published
// is never changed and never freed.
using RangesByRate = std::map<int, NormBackwardRanges>;
std::atomic<const RangesByRate*> all_ranges{nullptr};

// The configuration with the smallest cluster that holds a row.
NormBackwardConfig clustered(NormBackwardConfig config, int64_t vectors) {
  while (ceil_div(vectors, config.cluster) > int64_t{config.vectors} * config.threads) {
    config.cluster *= 2;
  }
  return config;
}

bool is_valid(const NormBackwardConfig& config) {
  if (config.vectors < 1 || config.rows < 1) return false;
  if (config.cluster < 1 || config.cluster > kNormMaxCluster) return false;
  if ((config.cluster & (config.cluster - 1)) != 0) return false;
  if (config.stages < config.rows || config.stages > kNormMaxStages) return false;
  if (config.prefetch_rows < 0 || config.prefetch_rows > kNormMaxStages) return false;
  return config.threads > 0 && config.threads % 32 == 0 && config.threads <= kNormMaxThreads;
}

int64_t megabytes_of(const NormProblem& problem, int64_t vectors) {
  return problem.rows * vectors * 32 >> 20;
}

}  // namespace

NormBackwardConfig norm_backward_config_of(const NormBackwardFields& f) {
  return {f[0], f[1], f[2], f[3], f[4], f[5], f[6] != 0, f[7] != 0};
}

TunedTable<NormBackwardConfig>& norm_backward_tuned(NormKind kind) {
  static auto* tables =
      new TunedTable<NormBackwardConfig>[2];  // never destroyed: threads may launch
  return tables[static_cast<int>(kind)];
}

void set_norm_backward_ranges(int below_gbps, NormBackwardRanges ranges) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const RangesByRate* old = all_ranges.load();
  auto* next = old != nullptr ? new RangesByRate(*old) : new RangesByRate();
  (*next)[below_gbps] = std::move(ranges);
  all_ranges.store(next, std::memory_order_release);
}

void clear_norm_backward_ranges() { all_ranges.store(nullptr); }

Status norm_backward_check(const char* op, const NormBackwardConfig& config) {
  if (is_valid(config)) return Status();
  return Status::InvalidArgument(
      std::string(op) +
      ": expected a configuration with `vectors` and `rows` from 1, `cluster` 1, 2, 4 or 8, "
      "`threads` a multiple of 32 up to 512, `stages` from `rows` to 8 and `prefetch_rows` from 0 "
      "to 8, got " +
      std::to_string(config.vectors) + ", " + std::to_string(config.rows) + ", " +
      std::to_string(config.cluster) + ", " + std::to_string(config.threads) + ", " +
      std::to_string(config.stages) + ", " + std::to_string(config.prefetch_rows));
}

Status norm_backward_check(const NormBackwardRange& range, NormKind kind, int element) {
  constexpr const char* kOp = "norm_backward_ranges";
  TIERCEL_RETURN_IF_ERROR(norm_backward_check(kOp, range.config));
  const int64_t vectors = ceil_div(int64_t{range.max_columns} * element, 16);
  NormProblem problem{};
  problem.kind = kind;
  problem.dtype = element == 4 ? DType::kFloat32 : DType::kBFloat16;
  problem.columns = range.max_columns;
  problem.aligned16 = true;
  if (norm_backward_fits(problem, clustered(range.config, vectors), vectors)) return Status();
  return Status::InvalidArgument(std::string(kOp) + ": rows of " +
                                 std::to_string(range.max_columns) +
                                 " columns do not fit their configuration");
}

int norm_even_blocks(int64_t rows, int blocks, int step) {
  for (int count = blocks; count * 32 >= blocks * 31; count -= step) {
    if (rows % count == 0) return count;
  }
  return 0;
}

bool norm_backward_has_short(const NormProblem& problem, int64_t vectors) {
  return problem.aligned16 && problem.plain && problem.streams == 2 &&
         problem.kind == NormKind::kLayer && dtype_bytes(problem.dtype) == 2 && vectors > 32 &&
         vectors <= 128;
}

bool norm_backward_fits(const NormProblem& problem, const NormBackwardConfig& config,
                        int64_t vectors) {
  if (!is_valid(config)) return false;
  // A row of the kernels with the fewest registers belongs to one warp.
  const bool warp_rows = config.vectors * config.rows <= 2;
  const int lanes = warp_rows ? 32 : config.cluster * config.threads;
  if (vectors > int64_t{config.vectors} * lanes || (warp_rows && config.cluster > 1)) return false;
  if (!config.pairs) return true;
  const int element = static_cast<int>(dtype_bytes(problem.dtype));
  return config.cluster == 1 && config.threads < 2 * threads_for(vectors, config.vectors, 32) &&
         norm_backward_can_pair(element, problem.aligned16, config.vectors, config.rows,
                                problem.kind);
}

NormBackwardConfig norm_backward_measured(const NormProblem& problem, int64_t vectors) {
  const RangesByRate* all = all_ranges.load(std::memory_order_acquire);
  if (all == nullptr || !problem.aligned16 || problem.streams != 2) return {};
  const auto found = all->upper_bound(problem.memory_gbps > 0 ? problem.memory_gbps : INT_MAX - 1);
  if (found == all->end()) return {};
  const NormBackwardRanges& ranges = found->second;
  const int64_t megabytes = megabytes_of(problem, vectors);
  const bool many_rows = problem.rows >= ranges.rows_per_multiprocessor * problem.multiprocessors ||
                         (ranges.megabytes > 0 && megabytes >= ranges.megabytes);
  if (!many_rows) return {};
  const bool is_float = dtype_bytes(problem.dtype) == 4;
  for (const auto& range : ranges.tables[static_cast<int>(problem.kind)][is_float]) {
    if (problem.columns > range.max_columns || problem.columns < range.min_columns) continue;
    if (megabytes < range.min_megabytes || megabytes > range.max_megabytes) continue;
    if (range.short_rows && !norm_backward_has_short(problem, vectors)) continue;
    return clustered(range.config, vectors);
  }
  return {};
}

// Measured on an H200. The cluster is the smallest that holds a row. 64 to 128 KB in flight per
// block, in all stages, are enough; more is slower.
NormBackwardConfig norm_backward_heuristic(const NormProblem& problem, int64_t vectors) {
  const bool narrow_element = dtype_bytes(problem.dtype) == 2;
  if (!problem.aligned16) {
    return clustered({narrow_element ? 8 : 16, 1, 1, kNormNarrowThreads, 1}, vectors);
  }
  const bool layer = problem.kind == NormKind::kLayer;
  if (vectors <= (narrow_element ? 32 : 64)) {
    const bool many_rows = problem.rows >= int64_t{1024} * problem.multiprocessors;
    const bool heads = narrow_element && !layer && vectors > 8 && vectors <= 16;
    if (many_rows && heads && norm_even_blocks(problem.rows, problem.multiprocessors) > 0) {
      return {2, 1, 1, kNormMaxThreads, 3, 3, true};
    }
    return {2, 1, 1, layer && narrow_element ? kNormMaxThreads : 384, 3};
  }
  if (!narrow_element) {
    if (vectors <= 1024) return {4, 1, 1, 256, 2, layer ? 0 : 4};
    if (!layer && vectors <= 4096) return clustered({4, 1, 1, 256, 3, 4}, vectors);
    const bool even = layer && vectors > 2048;
    const NormBackwardConfig config = clustered({4, 1, 1, kNormMaxThreads, 2, 2, even}, vectors);
    if (config.cluster <= kNormMaxCluster) return config;
    return clustered({8, 1, 1, kNormMaxThreads, 2}, vectors);
  }
  // A layer norm's block has room for two of its longest rows with two tensors, not with three.
  // Such rows leave so many partial sums that adding those of two blocks first pays off.
  if (layer && vectors > 1056 && problem.streams == 2) {
    const bool whole = vectors <= int64_t{4} * kNormMaxThreads;  // one block per row
    return clustered({4, 1, 1, kNormMaxThreads, 2, whole ? 1 : 0, true, whole}, vectors);
  }
  if (vectors > 4096) {
    const NormBackwardConfig config = clustered({2, 2, 1, kNormMaxThreads, 4}, vectors);
    if (!layer && config.cluster <= kNormMaxCluster) return config;
    return clustered({4, 1, 1, kNormMaxThreads, 2}, vectors);
  }
  // Three vectors per thread if that leaves no more of them idle than two.
  const bool threes = 3 * threads_for(vectors, 3, 32) <= 2 * threads_for(vectors, 2, 32);
  if (layer) {
    const bool many = problem.rows >= int64_t{64} * problem.multiprocessors;
    if (vectors <= 1056 && threes) return {3, 1, 1, vectors > 96 ? kNormMaxThreads : 384, 2};
    if (many && vectors > 96 && vectors <= 256) return {4, 1, 1, 384, 2, vectors <= 128 ? 2 : 0};
    // Two rows per thread leave no room for a second team.
    if (vectors > 512 && vectors <= 896) return {4, 1, 1, kNormMaxThreads, 2};
    return clustered({2, 2, 1, kNormMaxThreads, 4}, vectors);
  }
  if (vectors <= 1056 && (threes || vectors > 256)) {
    return {3, 1, 1, vectors > 576 && vectors <= 672 ? kNormMaxThreads : 384, 2};
  }
  if (vectors > 1024 && vectors <= 2112) return clustered({3, 1, 1, 384, 3, 0, true}, vectors);
  if (vectors > 1024) return clustered({2, 2, 1, kNormMaxThreads, 4}, vectors);
  return {2, 2, 1, 384, 4, 4};
}

}  // namespace tiercel
