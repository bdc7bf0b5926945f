// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/decode_choose.h"

#include <algorithm>

#include "kernels/attention/decode_kernels.h"

namespace tiercel {
namespace {

// A model of both ways, in microseconds. Its constants are the memory's speed and latencies of an
// H200; they decide only where the two are close.
constexpr double kBytesPerMicrosecond = 4.3e6;  // of the device
constexpr double kChain = 2.5;     // dependent reads before the first product: all ways have them
constexpr double kStep = 1.0;      // at least, of one step: the memory's latency
constexpr double kRestart = 0.7;   // a further tile of a block, beside those of its neighbours
constexpr double kExchange = 0.6;  // of a cluster's blocks
constexpr double kShares = 0.8;    // lengths first, before the page table
constexpr double kCombine = 2.0;   // the second kernel

// Spread blocks are even whatever the lengths; a cluster's time is that of the longest sequence, so
// it has to be clearly better.
constexpr double kPreferSpread = 0.9;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One step of each of `warps` that run at once.
double step_time(const DecodeLoad& load, double warps) {
  return std::max(kStep, warps * static_cast<double>(load.step_bytes) / kBytesPerMicrosecond);
}

double clustered(const DecodeLoad& load, int cluster) {
  const int64_t blocks = load.tiles * cluster;
  const int64_t rounds = ceil_div(blocks, load.blocks);
  const double warps = static_cast<double>(std::min(blocks, load.blocks)) * kDecodeWarps;
  const auto steps = static_cast<double>(ceil_div(load.steps, cluster * kDecodeWarps));
  return kChain + (cluster > 1 ? kExchange : 0.0) +
         static_cast<double>(rounds) * steps * step_time(load, warps) +
         static_cast<double>(rounds - 1) * kRestart;
}

double spread(const DecodeLoad& load) {
  const int64_t each = ceil_div(load.tiles * load.steps, load.blocks);
  const auto steps = static_cast<double>(ceil_div(each, kDecodeWarps));
  const auto warps = static_cast<double>(load.blocks * kDecodeWarps);
  const auto tiles = static_cast<double>(each / std::max<int64_t>(load.steps, 1));
  return kChain + kShares + kCombine + steps * step_time(load, warps) + tiles * kRestart;
}

}  // namespace

DecodeSplit decode_choose(const DecodeLoad& load, int forced) {
  DecodeSplit best{0, load.blocks, spread(load)};
  if (forced < 0) return best;
  if (forced > 0) return {forced, load.tiles * forced, clustered(load, forced)};
  double least = best.microseconds * kPreferSpread;
  for (int cluster = 1; cluster <= kDecodeMaxCluster; cluster *= 2) {
    const double time = clustered(load, cluster);
    // Blocks without a step would only wait.
    const bool idle = cluster > 1 && (cluster - 1) * kDecodeWarps >= load.steps;
    if (time < least && !idle) {
      least = time;
      best = {cluster, load.tiles * cluster, time};
    }
  }
  return best;
}

}  // namespace tiercel
