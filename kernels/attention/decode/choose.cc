// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/decode/choose.h"

#include <algorithm>

#include "kernels/attention/decode/kernels.h"
#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

// A model of both ways, in microseconds, fitted to an H200.
struct Rate {
  double clustered, spread;  // bytes a microsecond, of the device
};
constexpr Rate kWide{4.42e6, 4.55e6}, kNarrow{4.3e6, 4.45e6};  // rows of up to kNarrowRow bytes
constexpr int64_t kNarrowRow = 128;
constexpr double kSparse = 3.7e6;   // clustered, with one block a multiprocessor
constexpr double kChain = 4.0;      // launch, lengths, first keys, results: all ways have them
constexpr double kStep = 0.75;      // at least, per step
constexpr double kBeside = 1.25;    // factor, with other blocks on the multiprocessor
constexpr double kConvert = 1.5;    // factor for float8
constexpr double kExchange = 0.05;  // of each of a cluster's blocks
constexpr double kShares = 1.5;     // lengths first, before the page table
constexpr double kCombine = 1.5;    // the parts of a tile
constexpr double kRestart = 1.0;    // a further tile of a block

// For clusters of 1, 2, 4, 8 blocks: the share of the device that they fit in, since all blocks of
// a cluster are in one part of it, and the time of each further round of them.
constexpr double kRoom[] = {1.0, 1.0, 0.94, 0.9};
constexpr double kRound[] = {0.3, 1.5, 2.5, 3.7};

// Spread blocks have equal work for any lengths; clusters that all run at once take as long as the
// longest sequence, so they must be faster by a margin. Several rounds of single blocks even out.
constexpr double kPreferSpread = 0.97;
constexpr int kManyRounds = 3;

// Steps of a warp, of all tiles and of one, from which on spread tiles of 32 rows took less time
// than tiles of 16: 0.89 to 0.98 of it. With 8 to 14, or less than one of a tile, they took 1.15 to
// 1.23 times as long.
constexpr int64_t kLongShare = 16, kLongTile = 8;

const Rate& rate(const DecodeLoad& load) { return load.row_bytes > kNarrowRow ? kWide : kNarrow; }

double least_step(const DecodeLoad& load, bool sparse) {
  return kStep * (sparse ? 1.0 : kBeside) * (load.float8 ? kConvert : 1.0);
}

// The time of one step of each warp, with that many clustered blocks at once.
double step_time(const DecodeLoad& load, int64_t blocks) {
  const bool sparse = blocks * 2 <= load.blocks;
  const double bytes = static_cast<double>(blocks * load.warps * load.step_bytes);
  return std::max(least_step(load, sparse), bytes / (sparse ? kSparse : rate(load).clustered));
}

double clustered(const DecodeLoad& load, int cluster) {
  const int kind = cluster == 1 ? 0 : cluster == 2 ? 1 : cluster == 4 ? 2 : 3;
  const int64_t blocks = load.tiles * cluster;
  const auto found = static_cast<int64_t>(static_cast<double>(load.blocks) * kRoom[kind]);
  const int64_t most = std::max<int64_t>(found, 1);
  const int64_t full = blocks / most, rest = blocks % most;
  const auto steps = static_cast<double>(ceil_div(load.steps, cluster * load.warps));
  const double rounds =
      static_cast<double>(full) * step_time(load, most) + (rest > 0 ? step_time(load, rest) : 0.0);
  return kChain + (cluster > 1 ? kExchange * cluster : 0.0) + steps * rounds +
         static_cast<double>(ceil_div(blocks, most) - 1) * kRound[kind];
}

double spread(const DecodeLoad& load) {
  const int64_t each = ceil_div(load.spread_tiles * load.steps, load.spread_blocks);
  const auto steps = static_cast<double>(ceil_div(each, load.spread_warps));
  const auto tiles = static_cast<double>(each / std::max<int64_t>(load.steps, 1));
  const double bytes =
      static_cast<double>(load.spread_blocks * load.spread_warps * load.step_bytes);
  return kChain + kShares + kCombine +
         steps * std::max(least_step(load, false), bytes / rate(load).spread) + tiles * kRestart;
}

}  // namespace

bool decode_is_long(const DecodeLoad& load) {
  const int64_t warps = load.spread_blocks * load.spread_warps;
  return load.steps >= kLongTile * load.spread_warps &&
         load.spread_tiles * load.steps >= kLongShare * warps;
}

int decode_columns(int tiles, int64_t blocks) {
  for (int64_t columns = std::min<int64_t>(tiles, blocks); columns > 1; --columns) {
    if (tiles % columns == 0 && blocks / columns * columns * 16 >= blocks * 15) {
      return static_cast<int>(columns);
    }
  }
  return 1;
}

DecodeSplit decode_choose(const DecodeLoad& load, int forced) {
  DecodeSplit best{0, load.spread_blocks, spread(load)};
  if (forced < 0) return best;
  const double spread_time = best.microseconds;
  if (forced > 0) return {forced, load.tiles * forced, clustered(load, forced)};
  double least = best.microseconds;
  for (int cluster = 1; cluster <= kDecodeMaxCluster; cluster *= 2) {
    const double time = clustered(load, cluster);
    // Blocks without a step would only wait.
    const bool idle = cluster > 1 && (cluster - 1) * load.warps >= load.steps;
    const bool many = cluster == 1 && load.tiles > (kManyRounds - 1) * load.blocks;
    const bool better = time < least && (many || time < spread_time * kPreferSpread);
    if (better && !idle) {
      least = time;
      best = {cluster, load.tiles * cluster, time};
    }
  }
  return best;
}

}  // namespace tiercel
