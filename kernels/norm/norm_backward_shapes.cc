// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm/norm_backward_shapes.h"

#include <algorithm>
#include <string>

#include "kernels/norm/norm_backward_tables.h"
#include "kernels/norm/norm_kernels.h"
#include "kernels/norm/norm_threads.h"

namespace tiercel {
namespace {

NormBackwardShape clustered(NormBackwardShape shape, int64_t vectors) {
  while (ceil_div(vectors, shape.cluster) > int64_t{shape.vectors} * shape.threads) {
    shape.cluster *= 2;
  }
  return shape;
}

// On an H100 multiprocessors get unequal shares of the memory: what is best there differs. Its rate
// is 3352 gigabytes a second, an H200's 4916.
constexpr int kSlowMemory = 4000;

// What was measured has two tensors, and so many rows a multiprocessor or, on an H100, megabytes of
// x and grad.
constexpr int kMeasuredRows = 7;
constexpr int kMeasuredMegabytes = 40;

int64_t megabytes_of(const NormProblem& problem, int64_t vectors) {
  return problem.rows * vectors * 32 >> 20;
}

// Whether a cluster can have it, and a team's ring a tile.
constexpr bool is_sound(const NormBackwardShape& shape) {
  if (shape.cluster < 1 || shape.cluster > kNormMaxCluster) return false;
  if ((shape.cluster & (shape.cluster - 1)) != 0) return false;
  if (shape.stages < shape.rows || shape.stages > kNormMaxStages) return false;
  return shape.threads > 0 && shape.threads % 32 == 0 && shape.threads <= kNormMaxThreads;
}

template <typename AnyLine, int kLines>
constexpr bool is_sound(const AnyLine (&lines)[kLines]) {
  int before = 0;
  for (const AnyLine& line : lines) {
    const NormBackwardShape& shape = line.shape;
    if (line.most <= before) return false;
    before = line.most;
    if (shape.vectors == 0) continue;
    const bool of_one_warp = shape.vectors * shape.rows <= 2;  // such kernels' rows
    const int lanes = of_one_warp ? 32 : shape.threads * kNormMaxCluster;
    if (!is_sound(shape) || line.most > shape.vectors * lanes) return false;
  }
  return true;
}
template <int kLines>
constexpr bool is_sound(const ShortLine (&lines)[kLines]) {
  int before = 32;
  for (const ShortLine& line : lines) {
    if (line.most <= before) return false;
    before = line.most;
    for (const auto& one : line.of) {
      if (!is_sound(short_shape(line.most, one.warps, one.stages))) return false;
      if (one.warps * 32 > norm_backward_short_threads(line.most / 32)) return false;
    }
  }
  return before == 128;
}
static_assert(is_sound(kSlowRms) && is_sound(kSlowLayer) && is_sound(kSlowShort));
static_assert(is_sound(kSlowFloatRms) && is_sound(kSlowFloatLayer));
static_assert(is_sound(kSlowRmsFew) && is_sound(kSlowRmsMany));
static_assert(is_sound(kSlowLayerFew) && is_sound(kSlowLayerMany));
static_assert(is_sound(kSlowFloatRmsFew) && is_sound(kSlowFloatRmsMany));
static_assert(is_sound(kSlowFloatLayerFew) && is_sound(kSlowFloatLayerMany));
static_assert(is_sound(kFastRms) && is_sound(kFastLayer) && is_sound(kFastFloatLayer));

bool is_slow(const NormProblem& problem) {
  return problem.memory_gbps > 0 && problem.memory_gbps < kSlowMemory;
}
bool is_measured(const NormProblem& problem, int64_t vectors) {
  if (problem.streams != 2) return false;
  if (problem.rows >= int64_t{kMeasuredRows} * problem.multiprocessors) return true;
  return is_slow(problem) && megabytes_of(problem, vectors) >= kMeasuredMegabytes;
}

// Of no vectors where the shape of fewer rows does as well.
template <int kLines>
NormBackwardShape find_line(const Line (&lines)[kLines], int64_t vectors) {
  for (const Line& line : lines) {
    if (vectors > line.most) continue;
    NormBackwardShape shape = line.shape;
    if (shape.vectors == 0) break;
    shape.least = line.least * 1024;
    return clustered(shape, vectors);
  }
  return {};
}

// What a line's longest rows have on their way to a block, or `limit` if that is less.
int least_bytes(const NormBackwardShape& shape, int most, int limit) {
  const int64_t part = ceil_div(most, shape.cluster);
  const int team = threads_for(part, shape.vectors, 32);
  const int64_t teams = shape.cluster > 1 ? 1 : std::max<int64_t>(1, shape.threads / team);
  return static_cast<int>(std::min<int64_t>(shape.stages * teams * part * 32, limit));
}

// Of no vectors where it has no shape for so many rows.
template <int kLines>
NormBackwardShape find_sized(const SizedLine (&lines)[kLines], int64_t vectors, bool few,
                             int64_t megabytes) {
  for (const SizedLine& line : lines) {
    if (vectors > line.most) continue;
    NormBackwardShape shape = line.shape;
    if (shape.vectors == 0 || few != (megabytes <= line.megabytes)) break;
    shape.least = least_bytes(shape, line.most, (few ? 64 : 32) * 1024);
    return clustered(shape, vectors);
  }
  return {};
}

template <int kFew, int kUsual, int kMany>
NormBackwardShape find_line(const SizedLine (&few)[kFew], const Line (&usual)[kUsual],
                            const SizedLine (&many)[kMany], const NormProblem& problem,
                            int64_t vectors) {
  const int64_t megabytes = megabytes_of(problem, vectors);
  NormBackwardShape shape = find_sized(few, vectors, true, megabytes);
  if (shape.vectors == 0) shape = find_sized(many, vectors, false, megabytes);
  return shape.vectors > 0 ? shape : find_line(usual, vectors);
}

// Of no vectors where norm_backward_short has none.
NormBackwardShape measured_short_shape(const NormProblem& problem, int64_t vectors) {
  if (!norm_backward_has_short(problem, vectors)) return {};
  const int64_t megabytes = megabytes_of(problem, vectors);
  int many = 0;
  for (const int most : kShortMegabytes) many += megabytes > most ? 1 : 0;
  for (const ShortLine& line : kSlowShort) {
    if (vectors > line.most) continue;
    return short_shape(vectors, line.of[many].warps, line.of[many].stages);
  }
  return {};
}

NormBackwardShape measured_shape(const NormProblem& problem, int64_t vectors) {
  const bool layer = problem.kind == NormKind::kLayer;
  const bool halves = dtype_bytes(problem.dtype) == 2;
  if (!is_slow(problem)) {
    if (layer) return halves ? find_line(kFastLayer, vectors) : find_line(kFastFloatLayer, vectors);
    return halves ? find_line(kFastRms, vectors) : NormBackwardShape{};
  }
  if (!halves) {
    if (layer) {
      return find_line(kSlowFloatLayerFew, kSlowFloatLayer, kSlowFloatLayerMany, problem, vectors);
    }
    return find_line(kSlowFloatRmsFew, kSlowFloatRms, kSlowFloatRmsMany, problem, vectors);
  }
  if (!layer) return find_line(kSlowRmsFew, kSlowRms, kSlowRmsMany, problem, vectors);
  const NormBackwardShape shape = measured_short_shape(problem, vectors);
  if (shape.vectors > 0) return shape;
  return find_line(kSlowLayerFew, kSlowLayer, kSlowLayerMany, problem, vectors);
}

thread_local NormBackwardShape on_trial{};  // of no vectors: none is

// Of no vectors where the problem's kernel could not have it.
NormBackwardShape tried_shape(const NormProblem& problem, int64_t vectors) {
  const NormBackwardShape& shape = on_trial;
  const int element = static_cast<int>(dtype_bytes(problem.dtype));
  const bool of_one_warp = shape.vectors * shape.rows <= 2;  // such kernels' rows
  const int lanes = of_one_warp ? 32 : shape.cluster * shape.threads;
  if (vectors > int64_t{shape.vectors} * lanes || (of_one_warp && shape.cluster > 1)) return {};
  const bool has_pairs =
      shape.cluster == 1 && shape.threads < 2 * threads_for(vectors, shape.vectors, 32) &&
      norm_backward_pairs(element, problem.wide, shape.vectors, shape.rows, problem.kind);
  return shape.pairs && !has_pairs ? NormBackwardShape{} : shape;
}

}  // namespace

Status norm_try_backward_shape(const NormBackwardShape* shape) {
  if (shape != nullptr && !(shape->vectors > 0 && shape->rows > 0 && shape->ahead >= 0 &&
                            shape->ahead <= kNormMaxStages && is_sound(*shape))) {
    return Status::InvalidArgument(
        "norm_try_backward_shape: expected `vectors` and `rows` from 1, `cluster` 1, 2, 4 or 8, "
        "`threads` a multiple of 32 up to 512, `stages` from `rows` to 8 and `ahead` from 0 to 8, "
        "got " +
        std::to_string(shape->vectors) + ", " + std::to_string(shape->rows) + ", " +
        std::to_string(shape->cluster) + ", " + std::to_string(shape->threads) + ", " +
        std::to_string(shape->stages) + ", " + std::to_string(shape->ahead));
  }
  on_trial = shape != nullptr ? *shape : NormBackwardShape{};
  return Status();
}

bool norm_backward_has_short(const NormProblem& problem, int64_t vectors) {
  return problem.wide && problem.plain && problem.streams == 2 &&
         problem.kind == NormKind::kLayer && dtype_bytes(problem.dtype) == 2 && vectors > 32 &&
         vectors <= 128;
}

int norm_even_blocks(int64_t rows, int blocks, int step) {
  for (int count = blocks; count * 32 >= blocks * 31; count -= step) {
    if (rows % count == 0) return count;
  }
  return 0;
}

// Beside the tables, measured on an H200. The cluster is the smallest that holds a row. Few
// bytes on their way are better than many, as long as there are enough: 64 to 128 KB in all stages.
NormBackwardShape norm_backward_shape(const NormProblem& problem, int64_t vectors) {
  if (on_trial.vectors > 0) return tried_shape(problem, vectors);
  const bool narrow_element = dtype_bytes(problem.dtype) == 2;
  if (!problem.wide) {
    return clustered({narrow_element ? 8 : 16, 1, 1, kNormNarrowThreads, 1}, vectors);
  }
  const bool layer = problem.kind == NormKind::kLayer;
  const bool measured = is_measured(problem, vectors);
  const bool in_tables = measured && is_slow(problem) && narrow_element;
  if (vectors <= (narrow_element ? 32 : 64) && !in_tables) {
    const bool most = problem.rows >= int64_t{1024} * problem.multiprocessors;
    const bool heads = narrow_element && !layer && vectors > 8 && vectors <= 16;
    if (most && heads && norm_even_blocks(problem.rows, problem.multiprocessors) > 0) {
      return {2, 1, 1, kNormMaxThreads, 3, 3, true};
    }
    return {2, 1, 1, layer && narrow_element ? kNormMaxThreads : 384, 3};
  }
  if (measured) {
    const NormBackwardShape shape = measured_shape(problem, vectors);
    if (shape.vectors > 0) return shape;
  }
  if (!narrow_element) {
    if (vectors <= 1024) return {4, 1, 1, 256, 2, layer ? 0 : 4};
    if (!layer && vectors <= 4096) return clustered({4, 1, 1, 256, 3, 4}, vectors);
    const bool even = layer && vectors > 2048;
    const NormBackwardShape shape = clustered({4, 1, 1, kNormMaxThreads, 2, 2, even}, vectors);
    if (shape.cluster <= kNormMaxCluster) return shape;
    return clustered({8, 1, 1, kNormMaxThreads, 2}, vectors);
  }
  // A layer norm's block has room for two of the longest rows of two tensors, not of three. Blocks
  // of such rows leave so many sums that it pays to add up those of two first.
  if (layer && vectors > 1056 && problem.streams == 2) {
    const bool whole = vectors <= int64_t{4} * kNormMaxThreads;  // a block has a row
    return clustered({4, 1, 1, kNormMaxThreads, 2, whole ? 1 : 0, true, whole}, vectors);
  }
  if (vectors > 4096) {
    const NormBackwardShape shape = clustered({2, 2, 1, kNormMaxThreads, 4}, vectors);
    if (!layer && shape.cluster <= kNormMaxCluster) return shape;
    return clustered({4, 1, 1, kNormMaxThreads, 2}, vectors);
  }
  // Three vectors a thread where that leaves no more of them idle than two.
  const bool threes = 3 * threads_for(vectors, 3, 32) <= 2 * threads_for(vectors, 2, 32);
  if (layer) {
    const bool many = problem.rows >= int64_t{64} * problem.multiprocessors;
    if (vectors <= 1056 && threes) return {3, 1, 1, vectors > 96 ? kNormMaxThreads : 384, 2};
    if (many && vectors > 96 && vectors <= 256) return {4, 1, 1, 384, 2, vectors <= 128 ? 2 : 0};
    // Two rows a thread leave no room for a second team.
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
