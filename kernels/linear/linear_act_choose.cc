// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel with the least estimated time.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/linear/linear_act_kernels.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/kernel_table.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

// The bytes of a tile's rows in shared memory.
constexpr int64_t kRowBytes = 128;

// Measured on an H200. Times are in microseconds, rates per microsecond.
constexpr double kFlops = 820e6;
constexpr double kDramBytes = 4.4e6;
constexpr double kL2Bytes = 11e6;  // of w, read again for another row of tiles
constexpr double kXBytes = 60e6;   // of x, read again for every tile of w
constexpr double kSmBytes = 62e3;  // of w, into one multiprocessor
constexpr double kCycles = 1900.0;
constexpr double kLaunch = 3.0;       // first loads and last stores included
constexpr double kSmallLaunch = 2.5;  // of a split-K kernel
constexpr double kEpilogue = 1.5;     // of a 128x256 tile, if nothing hides it
constexpr double kTurn = 0.015;       // fraction of its time that a kernel of two turns loses
constexpr double kSplit = 0.3;        // per additional block of a tile,
constexpr double kSplitRows = 0.1;    // and per additional 64 rows of it
constexpr double kNextBlock = 2.0;  // until a block that waited for another's end reaches full rate
constexpr double kFewBlocks = 0.95;  // rate with fewer than three blocks per two multiprocessors
constexpr double kManyRows = 1.2;    // per row of split-K tiles beyond the fourth
constexpr double kWide = 0.93;       // rate with clusters of more than two
constexpr double kTwoRows = 1.1;     // time with two rows of tiles that are no multiple of 64 wide,
constexpr double kMoreRows = 1.45;   // and with more, or more than a round
// Scales of blocks: both warpgroups scale at times, and one that has a tile to itself waits for
// each step's products.
constexpr double kScaledTile = 1.25;
constexpr double kScaledWideTile = 1.05;  // of 256 columns; those of 192 and 144
constexpr double kScaledMiddle = 1.15;    // bring more bytes a product
constexpr int kFewRowsColumns = 144;      // of tiles that serve one row of tiles
constexpr double kScaledCycles = 256.0;   // of a split-K kernel's step,
constexpr double kScaledRow = 2.72;       // and per row of its tile

// Kernels that do not split K: rates of the L2 and of a multiprocessor, and the time of a step.
constexpr double kWholeL2Bytes = 10.5e6;
constexpr double kWholeSmBytes = 140e3;
constexpr double kWholeStep = 0.109;
constexpr double kUneven = 1.22;      // time of tiles of 48 columns,
constexpr int64_t kFewUneven = 100;   // if there are fewer
constexpr int64_t kFewColumns = 256;  // whose K is split in the batch-invariant mode, too,
constexpr int64_t kFewSteps = 8;      // by so many steps

constexpr int64_t kBand = 2048;  // rows of x that stay in L2 together
constexpr int kMaxSplits = 8;    // the largest portable cluster

// A cluster runs within one GPC, and GPCs differ in their number of multiprocessors.
constexpr double kPlaceable[kMaxSplits + 1] = {0, 1, 1, 0.9, 0.85, 0.75, 0.75, 0.75, 0.75};

int64_t element_bytes(const LinearProblem& p) { return p.dtype == DType::kFloat8E4M3 ? 1 : 2; }

int64_t k_tiles_of(const LinearProblem& p) { return ceil_div(p.k * element_bytes(p), kRowBytes); }

// Rows of w per column of the result.
int64_t parts(LinearKind kind) {
  return kind == LinearKind::kGated || kind == LinearKind::kGatedBlocks ? 2 : 1;
}

double dram_time(const LinearProblem& p) {
  const double m = static_cast<double>(p.m), k = static_cast<double>(p.k);
  const double n = static_cast<double>(p.n);
  const double operands = m * k + static_cast<double>(parts(p.kind)) * n * k;
  return (static_cast<double>(element_bytes(p)) * operands + 2.0 * m * n) / kDramBytes;
}

double large_estimate(const LinearActKernel& kernel, const LinearProblem& p, int multiprocessors,
                      LinearActChoice* choice) {
  const LinearActVariant& v = kernel.variant;
  const int64_t m = p.m;
  const int64_t clusters = multiprocessors / v.cluster;
  const int64_t tiles = ceil_div(m, static_cast<int64_t>(v.tile_m) * v.cluster) *
                        ceil_div(p.n, v.tile_n / parts(p.kind));
  choice->splits = 1;
  choice->rows = 0;
  choice->group = static_cast<int>(std::max<int64_t>(1, kBand / (v.tile_m * v.cluster)));
  choice->blocks = static_cast<unsigned>(std::min(tiles, clusters) * v.cluster);
  const double rounds = static_cast<double>(ceil_div(tiles, clusters));
  // A row of shared memory takes equally long for any contents.
  const double depth = static_cast<double>(k_tiles_of(p) * kRowBytes / 2);
  const double scaling = !has_block_scales(p.kind) ? 1.0
                         : v.tile_n > 192          ? kScaledWideTile
                         : v.tile_n > 128          ? kScaledMiddle
                                                   : kScaledTile;
  const double tile = scaling * 2.0 * v.tile_m * v.tile_n * depth * multiprocessors / kFlops;
  const double missing = 1.0 - static_cast<double>(std::min<int64_t>(m, v.tile_m)) / v.tile_m;
  const double epilogue = kEpilogue * v.tile_m * v.tile_n / (128.0 * 256.0);
  const double compute =
      v.pingpong ? rounds * tile * (1.0 + kTurn) + 2.0 * epilogue : rounds * (tile + epilogue);
  const double busy = static_cast<double>(choice->blocks) / multiprocessors;
  const double rate = busy < 1.0 ? kFewBlocks * std::sqrt(busy) : 1.0;  // relative to the memory's
  return kLaunch + std::max(compute, dram_time(p) / rate) * (1.0 + missing);
}

// The split of K that all kernels have in the batch-invariant mode. Products of few columns, as a
// router's, are split for any number of rows: they have too few tiles.
int64_t fixed_splits(const LinearProblem& p) {
  const bool few = p.n <= kFewColumns && p.dtype != DType::kFloat8E4M3 &&
                   (p.kind == LinearKind::kPlain || p.kind == LinearKind::kExtra);
  return few ? std::clamp<int64_t>(k_tiles_of(p) / kFewSteps, 1, kMaxSplits) : 1;
}

double small_estimate(const LinearActKernel& kernel, const LinearProblem& p, int multiprocessors,
                      LinearActChoice* choice) {
  const LinearActVariant& v = kernel.variant;
  const int64_t m = p.m, n = p.n * parts(p.kind);
  const double k_bytes = static_cast<double>(p.k * element_bytes(p));
  const int64_t row_tiles = ceil_div(m, v.tile_m);
  const int64_t rows = ceil_div(ceil_div(m, row_tiles), 8) * 8;
  const int64_t tiles = row_tiles * ceil_div(p.n, v.tile_n / parts(p.kind));
  const int64_t k_tiles = k_tiles_of(p);
  const double sm_count = multiprocessors;
  const double per_sm = kernel.dynamic_smem <= 113 * 1024 ? 2 : 1;
  const double step_bytes = kRowBytes * static_cast<double>(v.tile_n + rows);
  const double in_flight = step_bytes * v.stages;
  const double again = k_bytes * static_cast<double>(tiles * rows) / kXBytes +
                       k_bytes * static_cast<double>((row_tiles - 1) * n) / kL2Bytes;
  // Shared memory delivers 128 bytes per cycle to the tensor cores and receives the loads.
  const double step_cycles =
      v.tile_m + v.tile_n * v.tile_m / 64.0 + static_cast<double>(rows) + v.tile_n;
  const double scaled_cycles = (kScaledCycles + kScaledRow * v.tile_m) * v.tile_n / 64.0;
  double best = std::numeric_limits<double>::infinity();
  // These tiles are faster if one row of them fills the GPU, or two in one round; otherwise others
  // mostly are.
  const bool uneven = v.tile_n > 64 && v.tile_n % 64 != 0 && row_tiles > 1;
  // Products of as many splits add up K in one order, whatever the tile: see docs/numerics.md.
  const int fixed = batch_invariant() ? static_cast<int>(fixed_splits(p)) : 0;
  const int most = fixed > 0 ? fixed : static_cast<int>(std::min<int64_t>(kMaxSplits, k_tiles));
  for (int splits = std::max(fixed, 1); splits <= most; ++splits) {
    const double blocks = static_cast<double>(tiles * splits);
    const double steps = static_cast<double>(ceil_div(k_tiles, splits));
    const double slots = per_sm * sm_count * kPlaceable[splits];
    const double waves = std::ceil(blocks / slots);
    const double flying = std::min(blocks, slots) * in_flight / 1e6;  // megabytes
    const double rate = std::min(1.0, 0.7 + 0.03 * flying) *          // relative to the memory's
                        (blocks < 1.5 * sm_count ? kFewBlocks : 1.0) * (splits > 2 ? kWide : 1.0) *
                        std::sqrt(std::min(1.0, blocks / sm_count));
    const double stream = dram_time(p) / rate + again;
    const double block_load = steps * kRowBytes * v.tile_n / kSmBytes;
    const double busiest = std::ceil(blocks / sm_count);
    double multiply = busiest * steps * step_cycles / kCycles;
    if (has_block_scales(p.kind)) {
      multiply = std::max(multiply, std::ceil(busiest / per_sm) * steps * scaled_cycles / kCycles);
    }
    const double wait = (waves - 1.0) * kNextBlock / per_sm +
                        (waves > 1.0 ? block_load * (waves - blocks / slots) : 0.0);
    const double rows_cost = kManyRows * std::max(0.0, static_cast<double>(row_tiles) - 4.0);
    const double adding =
        rows_cost + (splits - 1) * (kSplit + kSplitRows * static_cast<double>(rows) / 64.0);
    const bool two_rows = row_tiles == 2 && blocks <= sm_count && splits == 1;
    const double only_one_row = !uneven ? 1.0 : two_rows ? kTwoRows : kMoreRows;
    // With scales of blocks, tiles of 96 columns are there for what they do in one wave.
    const double one_wave =
        has_block_scales(p.kind) && v.tile_n == 96 && waves > 1 ? kMoreRows : 1.0;
    const double time =
        (kSmallLaunch + adding + std::max({stream, busiest * block_load, multiply}) + wait) *
        only_one_row * one_wave;
    if (time < best) {
      best = time;
      choice->splits = splits;
      choice->rows = static_cast<int>(rows);
      choice->group = 0;
      choice->blocks = static_cast<unsigned>(tiles * splits);
    }
  }
  return best;
}

// Estimates the time of a kernel that does not split K. Its ring is deep enough, so the slowest of
// these decides: the memory, the L2, a multiprocessor's loads, or the products of its steps.
double whole_estimate(const LinearActKernel& kernel, const LinearProblem& p, int multiprocessors,
                      LinearActChoice* choice) {
  const LinearActVariant& v = kernel.variant;
  const int64_t row_tiles = ceil_div(p.m, v.tile_m);
  const int64_t rows = ceil_div(ceil_div(p.m, row_tiles), 8) * 8;
  const int64_t blocks = row_tiles * ceil_div(p.n, v.tile_n / parts(p.kind));
  const auto steps = static_cast<double>(k_tiles_of(p)), all = static_cast<double>(blocks);
  const double bytes = steps * kRowBytes * static_cast<double>(rows + v.tile_n);  // of a block
  const double turns = std::ceil(all / multiprocessors);
  const bool uneven = v.tile_n == 48 && blocks < kFewUneven;
  const double stream = dram_time(p) * (uneven ? kUneven : 1.0);
  const double last = steps * kRowBytes * v.tile_n / kSmBytes * (turns - all / multiprocessors);
  const double wait = turns > 1.0 ? (turns - 1.0) * kNextBlock + last : 0.0;
  choice->splits = 1;
  choice->rows = static_cast<int>(rows);
  choice->group = 0;
  choice->blocks = static_cast<unsigned>(blocks);
  return kSmallLaunch + wait +
         std::max({stream, bytes * all / kWholeL2Bytes, turns * bytes / kWholeSmBytes,
                   turns * steps * kWholeStep});
}

bool serves(const LinearActVariant& v, const LinearProblem& p) {
  const bool kind = v.kind == p.kind ||
                    (p.kind == LinearKind::kExtra && v.kind == LinearKind::kPlain && v.split_k);
  const bool activation = has_block_scales(v.kind) || v.activation == p.activation;
  return kind && v.dtype == p.dtype && activation;
}

// Measured: float8 products of tiles of 64 columns and of more have other bits, which 16 bits do
// not depend on. The split-K kernels of 64 suit few rows.
bool may_choose(const LinearActVariant& v, const LinearProblem& p) {
  if (v.tile_n == kFewRowsColumns && p.m > v.tile_m) return false;  // slower than others there
  if (!batch_invariant()) return serves(v, p) && !v.whole;
  if (fixed_splits(p) > 1) return serves(v, p) && v.split_k && !v.whole;
  return serves(v, p) && (v.dtype != DType::kFloat8E4M3 || (v.split_k && v.tile_n == 64));
}

}  // namespace

double linear_act_estimate(const LinearActKernel& kernel, const LinearProblem& problem,
                           int multiprocessors, LinearActChoice* choice) {
  choice->kernel = &kernel;
  if (!kernel.variant.split_k) return large_estimate(kernel, problem, multiprocessors, choice);
  if (kernel.variant.whole) return whole_estimate(kernel, problem, multiprocessors, choice);
  const double time = small_estimate(kernel, problem, multiprocessors, choice);
  const LinearActVariant& v = kernel.variant;
  const bool whole = batch_invariant() && choice->splits == 1 && problem.m > 64;
  if (!whole || v.tile_m != 128 || v.tile_n != 64 || problem.dtype == DType::kFloat8E4M3) {
    return time;
  }
  // Measured: with more than 64 rows these blocks get on better than the estimate for splits says.
  return std::min(time, whole_estimate(kernel, problem, multiprocessors, choice));
}

Status linear_act_configure(const LinearActConfig& config, const LinearProblem& problem,
                            int multiprocessors, LinearActChoice* choice) {
  const int64_t most = std::min<int64_t>(kMaxSplits, k_tiles_of(problem));
  const bool splits = !config.split_k || (config.splits >= 1 && config.splits <= most);
  double best = std::numeric_limits<double>::infinity();
  for (const LinearActKernel& kernel : KernelTable(linear_act_kernels)) {
    const LinearActVariant& v = kernel.variant;
    if (!splits || config.group < 0 || !serves(v, problem) || v.tile_m != config.tile_m ||
        v.tile_n != config.tile_n || v.pingpong != config.pingpong || v.split_k != config.split_k ||
        (v.whole && (config.splits > 1 || !batch_invariant()))) {
      continue;
    }
    LinearActChoice found;
    double time = linear_act_estimate(kernel, problem, multiprocessors, &found);
    if (v.whole) time = 0.0;  // made for this; others of its tile split K, too
    if (time >= best) continue;
    best = time;
    *choice = found;
    if (config.split_k) {
      choice->blocks = choice->blocks / choice->splits * config.splits;
      choice->splits = config.splits;
    } else if (config.group > 0) {
      choice->group = config.group;
    }
  }
  if (std::isfinite(best)) return Status();
  return Status::Unimplemented(
      "linear_act: the configuration tile " + std::to_string(config.tile_m) + "x" +
      std::to_string(config.tile_n) + (config.pingpong ? ", pingpong" : "") +
      (config.split_k ? ", split K by " + std::to_string(config.splits)
                      : ", group " + std::to_string(config.group)) +
      (splits ? ": no precompiled kernel has it" : ": K splits by 1 to " + std::to_string(most)));
}

LinearActChoice linear_act_choose(const LinearProblem& problem, int multiprocessors) {
  LinearActChoice best{nullptr, 1, 0, 1, 0};
  double best_time = std::numeric_limits<double>::infinity();
  for (const LinearActKernel& kernel : KernelTable(linear_act_kernels)) {
    if (!may_choose(kernel.variant, problem)) continue;
    LinearActChoice choice;
    const double time = linear_act_estimate(kernel, problem, multiprocessors, &choice);
    if (time < best_time) {
      best_time = time;
      best = choice;
    }
  }
  return best;
}

}  // namespace tiercel
