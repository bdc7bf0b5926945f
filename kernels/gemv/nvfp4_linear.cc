// SPDX-License-Identifier: Apache-2.0
// How nvfp4_linear's kernels, for up to 16 tokens, are launched.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/gemv/nvfp4_linear_kernels.h"
#include "kernels/gemv/w4_linear.h"
#include "kernels/sm90/invariant.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

// The launch of a configuration, or why it has none.
struct Fit {
  int sections;
  int passes;
  int all_turns;
  int turns;  // per block
  int group;
  int shared;
  int together;  // blocks per multiprocessor
};

const char* fit(const Nvfp4LinearArgs& args, const Nvfp4LinearConfig& config, Fit* fit) {
  const int64_t lines = std::max<int64_t>(1, ceil_div(args.k, kLinearLine));
  const int warps = config.tiles * config.parts;
  const int most_warps = linear_max_threads(args.scales.format, args.tokens) / 32;
  if (warps > most_warps) return "its block has too many threads";
  if (config.parts * config.cluster >= lines + config.cluster) return "it splits K too often";
  const int64_t passes = ceil_div(lines, config.parts * config.cluster);  // in all sections
  fit->all_turns = static_cast<int>(ceil_div(ceil_div(args.features, 16), config.tiles));
  const int queues = warps * config.stages * kLinearStageBytes;
  const int sum = linear_sum_bytes(args.tokens);
  const int of_strip = config.cluster * config.parts * sum;
  const int64_t pass_bytes = config.parts * linear_line_bytes(args.tokens);
  const int zeros = args.tokens == 1 ? kLinearZeroBytes : 0;
  for (fit->together = most_warps / warps; fit->together > 0; --fit->together) {
    const int64_t room =
        std::min(kLinearMaxShared, 228 * 1024 / fit->together - 2048) - queues - of_strip - zeros;
    const int64_t clusters = cluster_places(config.cluster) * fit->together / config.cluster;
    fit->turns = static_cast<int>(ceil_div(fit->all_turns, clusters));
    // Shared memory per turn: every warp's sums in the block that owns their rows, and in this
    // block between sections. The fewest sections that leave room for a turn.
    int turn = warps * sum;
    fit->sections = 1;
    if (passes * pass_bytes + turn > room) {
      turn *= 2;
      const int64_t most_passes = (room - turn) / pass_bytes;
      if (most_passes < 1 || fit->together > 1) continue;
      fit->sections = static_cast<int>(ceil_div(passes, most_passes));
    }
    fit->passes = static_cast<int>(ceil_div(passes, fit->sections));
    const int64_t most = (room - fit->passes * pass_bytes) / turn;
    if (most < 1 || (fit->together > 1 && most < fit->turns)) continue;
    fit->group = static_cast<int>(ceil_div(fit->turns, ceil_div(fit->turns, most)));
    fit->shared = queues + static_cast<int>(fit->passes * pass_bytes) + zeros +
                  static_cast<int>(ceil_div(fit->group * config.tiles, config.cluster)) * of_strip +
                  (fit->sections > 1 ? fit->group * warps * sum : 0);
    return nullptr;
  }
  return "it needs too much shared memory";
}

// Estimated microseconds with two stages. Fitted to sweeps of 35 problems on an H200
// (tests/gemv/nvfp4_linear_h200.json), where its choice is within 4 % of the best, also for each of
// the seven shapes when fitted without it. The sweeps measured this kernel's predecessor.
double estimate(const Nvfp4LinearArgs& args, const Nvfp4LinearConfig& config, const Fit& fit) {
  constexpr double kLaunch = 0.8;
  constexpr double kBytes = 4.708e6;     // from memory, per microsecond
  constexpr double kApart = 0.3834;      // extra time for a line whose rows are not adjacent
  constexpr double kTurn = 0.2397;       // the end of a turn, which sends sums
  constexpr double kLoadX = 1.026;       // loading x
  constexpr double kLoadLine = 0.01557;  // and for each 512 bytes of it
  constexpr double kMeet = 0.584;        // waiting for a group's sums
  constexpr double kAdd = 0.0349;        // adding four sums of one part, per lane
  constexpr double kCluster = 0.1406;    // any cluster
  constexpr double kClusters = 0.0872;   // for each doubling
  const int kind = args.tokens == 1 ? 0 : args.tokens <= 8 ? 1 : 2;
  // A line of 16 rows: the only warp of a scheduler, and one of several.
  constexpr double kStep[] = {0.8125, 0.8674, 1.027};
  constexpr double kEach[] = {0.0665, 0.0688, 0.0818};
  const int warps = config.tiles * config.parts;
  const int64_t grid = ceil_div(fit.all_turns, fit.turns) * config.cluster;
  const int64_t warps_at_once =
      warps * std::min<int64_t>(fit.together, ceil_div(grid, cluster_places(config.cluster)));
  const double groups = static_cast<double>(ceil_div(fit.turns, fit.group));
  const double loads = fit.sections == 1 ? 1.0 : fit.sections * groups;
  // Four schedulers share the warps; the one with most of them finishes last.
  const double of_schedulers = 4.0 * static_cast<double>(ceil_div(warps_at_once, 4));
  const double turns = static_cast<double>(fit.turns) * fit.sections;
  const double multiply =
      turns * (fit.passes * std::max(kEach[kind] * of_schedulers, kStep[kind]) + kTurn);
  // Parts of a row are adjacent in memory and read at the same time.
  const double apart = 1.0 + kApart / config.parts;
  const double load = 0.5625 * args.features * static_cast<double>(args.k) * apart / kBytes;
  const int64_t lines = static_cast<int64_t>(fit.passes) * config.parts * args.tokens;
  const double x =
      loads * (kLoadX + kLoadLine * static_cast<double>(ceil_div(lines, warps) * warps_at_once));
  const int64_t owned = ceil_div(fit.group * config.tiles, config.cluster);  // 16 rows each
  const double adds = groups * static_cast<double>(ceil_div(owned * (kind == 2 ? 2 : 1), warps)) *
                      config.cluster * config.parts * (kind == 0 ? 0.25 : 1.0);
  const double cluster =
      config.cluster == 1 ? 0.0 : kCluster + std::log2(config.cluster) * kClusters;
  return kLaunch + std::max(multiply, load) + x + groups * kMeet + adds * kAdd + cluster;
}

Nvfp4LinearConfig choose(const Nvfp4LinearArgs& args) {
  // The range of the sweeps.
  constexpr int kParts[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16};
  constexpr int kWarps[] = {8, 10, 12, 14, 15, 16, 18, 20, 21, 24, 28};
  Nvfp4LinearConfig best{1, 1, 1, 2};  // which always fits
  double least = std::numeric_limits<double>::infinity();
  Fit place{};
  for (int cluster : {1, 2, 4, 8}) {
    for (int parts : kParts) {
      for (int warps : kWarps) {
        if (warps % parts != 0) continue;
        const Nvfp4LinearConfig config{cluster, warps / parts, parts, 2};
        if (fit(args, config, &place) != nullptr) continue;
        const double time = estimate(args, config, place);
        if (time < least) least = time, best = config;
      }
    }
  }
  return best;
}

// Caches the choice: a model has few problems, and estimating hundreds of configurations takes
// longer than a launch.
Nvfp4LinearConfig choose_once(const Nvfp4LinearArgs& args) {
  struct Known {
    W4Format format;
    int tokens, features, k;
    Nvfp4LinearConfig config;
  };
  static thread_local Known known[64] = {};
  const uint32_t hash = static_cast<uint32_t>(args.features) * 0x9e3779b1u +
                        static_cast<uint32_t>(args.k) * 0x85ebca6bu;
  Known& entry = known[(hash >> 26) ^ static_cast<uint32_t>(args.tokens)];
  if (entry.format != args.scales.format || entry.tokens != args.tokens ||
      entry.features != args.features || entry.k != args.k) {
    entry = {args.scales.format, args.tokens, args.features, args.k, choose(args)};
  }
  return entry.config;
}

Status configure(const char* op, const Nvfp4LinearConfig& config, FewLaunch* choice) {
  Nvfp4LinearArgs& args = choice->args;
  Fit place{};
  const bool sizes = config.cluster >= 1 && config.cluster <= 8 &&
                     (config.cluster & (config.cluster - 1)) == 0 && config.tiles >= 1 &&
                     config.tiles <= 32 && config.parts >= 1 && config.parts <= 32;
  choice->kernel =
      sizes ? nvfp4_linear_kernel(args.scales.format, args.tokens, config.stages) : nullptr;
  const char* problem =
      choice->kernel == nullptr ? "there is no such kernel" : fit(args, config, &place);
  if (problem != nullptr) {
    return Status::Unimplemented(
        std::string(op) + ": the configuration cluster " + std::to_string(config.cluster) +
        ", tiles " + std::to_string(config.tiles) + ", parts " + std::to_string(config.parts) +
        ", stages " + std::to_string(config.stages) + " cannot run: " + problem);
  }
  args.tiles = config.tiles;
  args.parts = config.parts;
  args.passes = args.k > 0 ? place.passes : 0;
  args.sections = place.sections;
  args.all_turns = place.all_turns;
  args.turns = place.turns;
  // With larger weights, the prefetch slows the reads of the previous grid.
  constexpr int64_t kLargestPrefetched = 5'000'000;  // bytes
  args.prefetch_weights =
      args.tokens == 1 && args.features * static_cast<int64_t>(args.k) / 2 <= kLargestPrefetched;
  args.group = place.group;
  const int64_t groups = ceil_div(place.all_turns, place.turns);
  choice->config.grid.x = static_cast<uint32_t>(groups * config.cluster);
  choice->config.block = {32, static_cast<uint32_t>(config.parts),
                          static_cast<uint32_t>(config.tiles)};
  choice->config.cluster.x = config.cluster;
  choice->config.dynamic_smem = place.shared;
  choice->config.dependent = true;
  return Status();
}

// Configures for the most tokens, whatever their number: one kernel, one order of sums.
Status configure_invariant(const char* op, const Nvfp4LinearConfig* config, FewLaunch* launch) {
  Nvfp4LinearArgs& args = launch->args;
  const int tokens = args.tokens;
  args.tokens = kLinearMaxTokens;
  const Status status = configure(op, config != nullptr ? *config : choose_once(args), launch);
  args.tokens = tokens;
  return status;
}

}  // namespace

Status nvfp4_linear_configure(const char* op, const TunedProblem& problem,
                              const Nvfp4LinearConfig* config, FewLaunch* launch) {
  const Nvfp4LinearArgs& args = launch->args;
  if (batch_invariant()) return configure_invariant(op, config, launch);
  if (config != nullptr) return configure(op, *config, launch);
  const bool table = args.scales.format == W4Format::kNvfp4;
  const Nvfp4LinearConfig* tuned =
      table ? nvfp4_linear_tuned().find(problem, args.tokens) : nullptr;
  // A configuration tuned for another number of tokens may not fit.
  if (tuned != nullptr && configure(op, *tuned, launch).ok()) return Status();
  return configure(op, choose_once(args), launch);
}

TunedTable<Nvfp4LinearConfig>& nvfp4_linear_tuned() {
  // Never destroyed, as threads may still launch.
  static auto* table = new TunedTable<Nvfp4LinearConfig>();
  return *table;
}

Status nvfp4_linear_load(int device) { return w4_linear_load(W4Format::kNvfp4, device); }

}  // namespace tiercel
