// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/paged/split.h"

#include <algorithm>

#include "kernels/sm90/math.h"

namespace tiercel {
namespace {

// A model of the time, in steps of a block of threads; a step takes about 1.5 microseconds.
constexpr double kTile = 1.0;            // before a tile's first step, and after the last
constexpr double kCombine = 2.0;         // the second kernel
constexpr double kBytesOfAStep = 6.0e6;  // of partial results, written and read
constexpr double kWorthwhile = 0.95;     // of the time with fewer parts
constexpr int64_t kLeastSteps = 2;       // of a part

constexpr int64_t kMostFloats = int64_t{1} << 26;  // of a workspace of fixed parts: 256 MiB
constexpr int64_t kMostItems = int64_t{1} << 30;   // tiles and parts of a launch

double time_of(const PagedLoad& load, int64_t steps, int64_t parts, int multiprocessors) {
  const auto rounds = static_cast<double>(ceil_div(load.tiles * parts, int64_t{multiprocessors}));
  const double time = rounds * (static_cast<double>(ceil_div(steps, parts)) + kTile);
  if (parts == 1) return time;
  return time + kCombine + 2.0 * static_cast<double>(load.result_bytes * parts) / kBytesOfAStep;
}

// In microseconds: what a step takes longer that widens its keys and values, of 128 columns and of
// 64; launches of a slice of heads; the time of a float of copies, two elements of three bytes.
constexpr double kWidening[] = {0.9, 0.3};
constexpr double kSlice = 5.0;
constexpr double kFloat = 6.0 / 4.0e6;

}  // namespace

double paged_time(const PagedLoad& load, int64_t parts, int multiprocessors) {
  const int64_t steps = std::max<int64_t>(ceil_div(load.keys, load.tile_n), 1);
  return time_of(load, steps, parts, multiprocessors);
}

int64_t paged_widened_heads(double steps, int64_t d, int64_t floats, int64_t heads) {
  const int64_t most = kPagedMostCopied / floats;
  if (most == 0) return 0;
  const int64_t slices = ceil_div(heads, most), at_once = ceil_div(heads, slices);
  const double copied =
      static_cast<double>(slices) * kSlice + static_cast<double>(floats * heads) * kFloat;
  return steps * kWidening[d <= 64] > copied ? at_once : 0;
}

int64_t paged_parts(const PagedLoad& load, int multiprocessors) {
  const int64_t steps = std::max<int64_t>(ceil_div(load.keys, load.tile_n), 1);
  int64_t best = 1;
  double least = time_of(load, steps, 1, multiprocessors);
  const int64_t most = std::min(kPagedMostParts, steps / kLeastSteps);
  for (int64_t parts = 2; parts <= most; ++parts) {
    const double time = time_of(load, steps, parts, multiprocessors);
    if (time < kWorthwhile * least) best = parts, least = time;
  }
  return best;
}

int64_t paged_fixed_parts(int64_t keys, int64_t span) {
  const int64_t all = std::max<int64_t>(ceil_div(keys, kPagedPartKeys), 1);
  return std::min(all, ceil_div(span, kPagedPartKeys) + 1);
}

bool paged_chains(const PagedLoad& load, int64_t parts, int multiprocessors) {
  if (parts == 1) return false;
  return paged_time(load, 1, multiprocessors) < paged_time(load, parts, multiprocessors);
}

int64_t paged_heads_at_once(int64_t heads, int64_t rows, int64_t d, int64_t tiles, int64_t parts) {
  const int64_t floats = parts * rows * (d / 2 + 1);
  const int64_t most = std::min(kMostFloats / floats, kMostItems / (tiles * parts));
  return std::clamp<int64_t>(most, 1, heads);
}

}  // namespace tiercel
