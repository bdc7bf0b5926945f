// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm/norm_backward_shapes.h"

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

// What was measured has so many rows a multiprocessor at least.
constexpr int64_t kSlowRows = 7;

struct Line {
  int most;   // vectors of a row: more than the line's before
  int least;  // KB on their way to a block: with fewer than 64 most lengths were far slower
  NormBackwardShape shape;
};

// Measured on an H100, two tensors; in the comments, columns and rows that each line was measured
// with, and the microseconds before and after. Shapes: vectors, rows, cluster or more, threads,
// stages or more, ahead, even.
constexpr Line kSlowRms[] = {
    {64, 48, {2, 2, 1, 384, 2, 4}},          // 512, 65536: 72.4, 70.4
    {112, 64, {4, 1, 1, 256, 6, 4, true}},   // 768, 32768: 55.0, 53.1
    {128, 64, {4, 1, 1, 128, 6, 4, true}},   // 1024, 32768: 72.5, 70.1
    {256, 64, {2, 2, 1, 384, 3, 4, true}},   // 2048, 16384: 72.9, 71.2
    {384, 64, {3, 1, 1, 256, 6, 4}},         // 2560, 16384: 95.6, 88.0
    {576, 64, {3, 1, 1, 192, 4}},            // 4096, 16384: 150, 142.1
    {640, 48, {4, 1, 1, 192, 3}},            // 5120, 16384: 186.9, 170.8
    {1024, 64, {2, 2, 1, 512, 2, 1, true}},  // 8192, 16384: 291, 275.8
    {2048, 64, {2, 2, 4, 512, 6}},           // 16384, 4096: 153, 138.8
    {12288, 64, {3, 1, 1, 512, 2, 4}},       // 32768 and 65536, 1024: 77, 73.5 and 150, 140.4
};
constexpr Line kSlowLayer[] = {
    {64, 64, {2, 2, 1, 256, 4, 0, true}},    // 512, 65536: 75.9, 70.9
    {96, 64, {3, 1, 1, 256, 3, 0, true}},    // 768, 16384: 30.4, 29.7
    {128, 64, {2, 2, 1, 384, 8}},            // 1024, 32768: 75.3, 72.1
    {256, 64, {3, 1, 1, 384, 2, 4, true}},   // 2048, 16384: 82.2, 72.8
    {448, 64, {3, 1, 1, 256, 3}},            // 3072, 16384: 120, 106.3
    {576, 64, {4, 1, 1, 256, 2, 4, true}},   // 4096, 16384: 158, 141.4
    {896, 64, {2, 2, 1, 448, 6, 0, true}},   // 5120, 16384: 191, 174.4
    {1056, 64, {4, 1, 1, 288, 2, 4, true}},  // 8192, 8192: 157.5, 144.1
    {2048, 64, {2, 2, 1, 512, 3, 0, true}},  // 16384, 4096: 153.2, 147.0
};
constexpr Line kSlowFloatRms[] = {
    {512, 48, {4, 1, 1, 192, 2, 8}},  // 1024, 32768: 146, 138.7
    {1024, 0, {}},
    {4096, 64, {4, 1, 4, 256, 2, 4}},  // 16384, 4096: 293, 272.7
};
constexpr Line kSlowFloatLayer[] = {
    {512, 48, {4, 1, 1, 192, 2, 8}},  // 1024, 32768: 147.3, 139.3
};

// Whether a cluster can have each of the lines' rows, and a team's ring a tile.
template <int kLines>
constexpr bool is_sound(const Line (&lines)[kLines]) {
  int before = 0;
  for (const Line& line : lines) {
    const NormBackwardShape& shape = line.shape;
    if (line.most <= before) return false;
    before = line.most;
    if (shape.vectors == 0) continue;
    if (shape.vectors * shape.rows <= 2) return false;  // such kernels have rows of one warp only
    if ((shape.cluster & (shape.cluster - 1)) != 0 || shape.cluster > kNormMaxCluster) return false;
    if (shape.stages < shape.rows || shape.stages > kNormMaxStages) return false;
    if (shape.threads % 32 != 0 || shape.threads > kNormMaxThreads) return false;
    if (line.most > shape.vectors * shape.threads * kNormMaxCluster) return false;
  }
  return true;
}
static_assert(is_sound(kSlowRms) && is_sound(kSlowLayer));
static_assert(is_sound(kSlowFloatRms) && is_sound(kSlowFloatLayer));

bool is_slow(const NormProblem& problem) {
  return problem.memory_gbps > 0 && problem.memory_gbps < kSlowMemory && problem.streams == 2 &&
         problem.rows >= kSlowRows * problem.multiprocessors;
}

// Of no vectors where nothing better was measured than on an H200.
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

NormBackwardShape slow_shape(const NormProblem& problem, int64_t vectors) {
  const bool layer = problem.kind == NormKind::kLayer;
  if (dtype_bytes(problem.dtype) == 2) {
    return layer ? find_line(kSlowLayer, vectors) : find_line(kSlowRms, vectors);
  }
  return layer ? find_line(kSlowFloatLayer, vectors) : find_line(kSlowFloatRms, vectors);
}

}  // namespace

int norm_even_blocks(int64_t rows, int blocks, int step) {
  for (int count = blocks; count * 32 >= blocks * 31; count -= step) {
    if (rows % count == 0) return count;
  }
  return 0;
}

// Measured on an H200, except where is_slow(). The cluster is the smallest that holds a row. Few
// bytes on their way are better than many, as long as there are enough: 64 to 128 KB in all stages.
NormBackwardShape norm_backward_shape(const NormProblem& problem, int64_t vectors) {
  const bool narrow_element = dtype_bytes(problem.dtype) == 2;
  if (!problem.wide) {
    return clustered({narrow_element ? 8 : 16, 1, 1, kNormNarrowThreads, 1}, vectors);
  }
  const bool layer = problem.kind == NormKind::kLayer;
  if (vectors <= (narrow_element ? 32 : 64)) {
    const bool most = problem.rows >= int64_t{1024} * problem.multiprocessors;
    const bool heads = narrow_element && !layer && vectors > 8 && vectors <= 16;
    if (most && heads && norm_even_blocks(problem.rows, problem.multiprocessors) > 0) {
      if (is_slow(problem)) return {2, 1, 1, 256, 6, 3, true};  // N 128, 262144 rows
      return {2, 1, 1, kNormMaxThreads, 3, 3, true};
    }
    return {2, 1, 1, layer && narrow_element ? kNormMaxThreads : 384, 3};
  }
  if (is_slow(problem)) {
    const NormBackwardShape shape = slow_shape(problem, vectors);
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
    // Whole teams of 96 or 128 threads; beside such blocks there is room for norm_reduce.
    const bool some = problem.rows >= int64_t{30} * problem.multiprocessors;
    if (problem.streams == 2 && ((many && vectors == 384) || (some && vectors == 512))) {
      return {4, 1, 1, 384, 2, 0, vectors == 384};
    }
    if (vectors <= 1056 && threes) return {3, 1, 1, vectors > 96 ? kNormMaxThreads : 384, 2};
    if (many && vectors > 96 && vectors <= 256) return {4, 1, 1, 384, 2, vectors <= 128 ? 2 : 0};
    // Two rows a thread leave no room for a second team.
    if (vectors > 512 && vectors <= 896) return {4, 1, 1, kNormMaxThreads, 2};
    return clustered({2, 2, 1, kNormMaxThreads, 4}, vectors);
  }
  if (vectors <= 1056 && (threes || vectors > 256)) {
    const bool ahead = vectors > 448 && vectors <= 576;  // N 4096, 16384 rows: 103.3 us, 100.2
    return {3, 1, 1, vectors > 576 && vectors <= 672 ? kNormMaxThreads : 384, 2, ahead ? 4 : 0};
  }
  if (vectors > 1024 && vectors <= 2112) return clustered({3, 1, 1, 384, 3, 0, true}, vectors);
  if (vectors > 1024) return clustered({2, 2, 1, kNormMaxThreads, 4}, vectors);
  return {2, 2, 1, 384, 4, 4};
}

}  // namespace tiercel
