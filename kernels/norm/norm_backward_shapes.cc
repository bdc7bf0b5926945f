// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm/norm_backward_shapes.h"

#include <string>

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

// What was measured has so many rows a multiprocessor at least, and two tensors.
constexpr int kMeasuredRows = 7;

struct Line {
  int most;   // vectors of a row: more than the line's before
  int least;  // KB on their way to a block, for rows that are shorter than those measured
  NormBackwardShape shape;
};

// In the comments, columns and rows that each line was measured with, and the microseconds. Shapes:
// vectors, rows, cluster or more, threads, stages or more, ahead, even, pairs. Of no vectors:
// the shape of fewer rows does as well.
constexpr Line kSlowRms[] = {
    {64, 48, {2, 2, 1, 384, 2, 4}},          // 512, 65536: 69.5
    {72, 64, {4, 1, 1, 256, 4, 3, true}},    // 576, 65536: 78.7
    {80, 48, {2, 2, 1, 384, 4, 3, true}},    // 640, 65536: 87.5
    {96, 48, {3, 1, 1, 128, 4, 0, true}},    // 768, 32768: 51.8
    {112, 48, {4, 1, 1, 128, 4, 0, true}},   // 896, 65536: 118.0
    {128, 48, {3, 1, 1, 256, 3}},            // 1024, 32768: 69.6
    {144, 48, {2, 2, 1, 384, 3, 4, true}},   // 1152, 16384: 39.9
    {160, 48, {3, 1, 1, 384, 2, 3}},         // 1280, 16384: 43.7
    {256, 64, {2, 2, 1, 384, 3, 4, true}},   // 2048, 16384: 70.1
    {288, 48, {3, 1, 1, 288, 2, 3}},         // 2304, 16384: 79.0
    {384, 40, {3, 1, 1, 256, 2, 2}},         // 2560, 16384: 88.2
    {448, 48, {2, 2, 1, 224, 4, 3, true}},   // 3584, 16384: 122.0
    {512, 64, {3, 1, 1, 192, 4, 0, true}},   // 4096, 16384: 135.0
    {576, 64, {4, 1, 1, 160, 4}},            // 4608, 16384: 157.9
    {640, 48, {4, 1, 1, 160, 3, 5, true}},   // 5120, 16384: 173.9
    {672, 40, {3, 1, 1, 224, 2}},            // 5376, 16384: 184.3
    {1024, 64, {2, 2, 1, 512, 2, 1, true}},  // 8192, 8192: 140.3
    {1152, 48, {3, 1, 2, 192, 3, 0, true}},  // 9216, 8192: 153.9
    {1280, 48, {4, 1, 2, 160, 3}},           // 10240, 8192: 171.1
    {1536, 40, {3, 1, 2, 256, 2}},           // 12288, 8192: 207.3
    {1728, 48, {3, 1, 2, 288, 2}},           // 13312, 8192: 224.8
    {2048, 64, {2, 2, 4, 256, 4, 4, true}},  // 16384, 4096: 139.0
    {2304, 64, {2, 2, 4, 288, 4, 3, true}},  // 18432, 4096: 156.2
    {2688, 48, {3, 1, 4, 224, 3, 0, true}},  // 20480, 4096: 171.4
    {2816, 64, {4, 1, 4, 192, 4}},           // 22528, 4096: 187.1
    {3072, 48, {3, 1, 4, 256, 2, 0, true}},  // 24576, 4096: 211.0
    {4096, 64, {2, 2, 8, 256, 5}},           // 32768, 1024: 71.8
    {5120, 64, {3, 1, 1, 512, 2, 4}},        // 40960, 4096: 355.0
    {6144, 64, {4, 1, 8, 192, 3, 3}},        // 49152, 4096: 414.3
    {12288, 64, {3, 1, 1, 512, 2, 4}},       // 65536, 1024: 140.0
};
constexpr Line kSlowLayer[] = {
    {128, 0, {}},
    {160, 64, {3, 1, 1, 384, 3, 3}},         // 1280, 16384: 44.4
    {192, 64, {3, 1, 1, 256, 4, 3, true}},   // 1536, 16384: 53.0
    {256, 64, {4, 1, 1, 256, 2, 3, true}},   // 2048, 16384: 71.3
    {288, 64, {4, 1, 1, 384, 2, 3}},         // 2304, 16384: 80.0
    {384, 48, {3, 1, 1, 256, 2, 4}},         // 3072, 16384: 105.8
    {448, 64, {2, 2, 1, 224, 6, 0, true}},   // 3584, 16384: 120.3
    {512, 64, {4, 1, 1, 256, 2, 4, true}},   // 4096, 16384: 141.5
    {576, 64, {2, 2, 1, 288, 4, 0, true}},   // 4608, 16384: 158.0
    {640, 48, {3, 1, 1, 320, 3, 0, true}},   // 5120, 16384: 175.3
    {672, 40, {3, 1, 1, 224, 2}},            // 5376, 16384: 192.3
    {768, 64, {4, 1, 1, 192, 4}},            // 6144, 16384: 209.6
    {832, 64, {4, 1, 1, 224, 3, 3, true}},   // 6656, 16384: 227.1
    {896, 48, {3, 1, 1, 320, 2, 0, true}},   // 7168, 16384: 245.4
    {1056, 64, {2, 2, 2, 288, 6}},           // 8192, 8192: 143.0
    {1152, 64, {4, 1, 1, 288, 2, 3, true}},  // 9216, 8192: 162.3
    {1280, 64, {2, 2, 2, 320, 4}},           // 10240, 8192: 173.4
    {1408, 64, {4, 1, 1, 352, 2, 3}},        // 11264, 8192: 204.2
    {1536, 64, {3, 1, 2, 352, 2, 0, true}},  // 12288, 8192: 216.2
    {1664, 64, {2, 2, 2, 416, 4, 0, true}},  // 13312, 8192: 241.6
    {1792, 64, {3, 1, 2, 320, 3}},           // 14336, 8192: 250.1
    {2048, 64, {3, 1, 2, 352, 2, 0, true}},  // 16384, 4096: 142.5
    {2304, 64, {3, 1, 2, 384, 2, 3, true}},  // 18432, 4096: 162.1
    {2560, 0, {}},
    {2816, 64, {2, 2, 4, 352, 4, 0, true}},  // 22528, 4096: 198.0
    {3072, 64, {2, 2, 4, 384, 4}},           // 24576, 4096: 209.9
    {3584, 64, {2, 2, 4, 448, 4, 0, true}},  // 28672, 4096: 242.3
    {4096, 64, {3, 1, 4, 352, 3}},           // 32768, 4096: 276.0
    {6144, 0, {}},
    {8192, 64, {3, 1, 8, 352, 3}},  // 65536, 4096: 542.3
};
// Of norm_backward_short, which asks for three rows more ahead: warps and stages. The more rows
// there are, the fewer bytes on their way are best: a hundred KB while the first ones come, 30 to
// 40 KB later.
struct ShortLine {
  int most;  // as a Line's
  struct {
    int warps, stages;
  } of[4];  // up to so many MB of x and grad:
};
constexpr int kShortMegabytes[] = {72, 168, 288};
// In the comments, columns, and percent of the rate of a large copy at 48, 96, 192 and 384 MB.
constexpr ShortLine kSlowShort[] = {
    {40, {{12, 5}, {8, 6}, {8, 4}, {8, 3}}},  // 320: 91.5, 93.7, 94.7, 94.2
    {48, {{12, 6}, {8, 3}, {8, 3}, {6, 4}}},  // 384: 94.2, 93.4, 95.2, 95.0
    {56, {{12, 5}, {4, 6}, {4, 6}, {4, 6}}},  // 448: 93.4, 95.1, 97.7, 97.9
    {64, {{8, 6}, {4, 5}, {8, 2}, {8, 2}}},   // 512: 93.8, 93.8, 95.5, 95.5
    {72, {{8, 6}, {4, 5}, {8, 2}, {4, 4}}},   // 576: 93.5, 93.7, 94.7, 95.0
    {80, {{8, 5}, {8, 2}, {4, 4}, {6, 2}}},   // 640: 93.3, 93.9, 94.8, 94.9
    {88, {{8, 4}, {8, 2}, {6, 2}, {6, 2}}},   // 704: 93.3, 94.2, 93.8, 95.5
    {96, {{8, 3}, {8, 2}, {6, 2}, {5, 2}}},   // 768: 93.3, 95.1, 95.0, 94.3
    {104, {{8, 4}, {4, 3}, {4, 3}, {5, 2}}},  // 832: 93.3, 92.9, 94.7, 92.7
    {112, {{8, 3}, {4, 3}, {5, 2}, {5, 2}}},  // 896: 93.1, 93.0, 93.0, 94.8
    {120, {{8, 2}, {4, 3}, {5, 2}, {4, 2}}},  // 960: 93.1, 93.2, 93.1, 94.0
    {128, {{8, 2}, {6, 2}, {4, 2}, {4, 2}}},  // 1024: 93.3, 94.1, 94.2, 96.3
};
constexpr NormBackwardShape short_shape(int64_t vectors, int warps, int stages) {
  return {static_cast<int>(ceil_div(vectors, 32)), 1, 1, warps * 32, stages, 3};
}

constexpr Line kSlowFloatRms[] = {
    {512, 48, {4, 1, 1, 192, 2, 5}},         // 1024, 32768: 138.5
    {640, 48, {4, 1, 1, 160, 3, 3}},         // 2560, 8192: 87.9
    {768, 48, {4, 1, 1, 192, 2}},            // 3072, 8192: 104.5
    {1024, 64, {4, 1, 2, 128, 4, 0, true}},  // 4096, 16384: 266.6
    {1280, 48, {4, 1, 2, 160, 3, 3, true}},  // 5120, 8192: 177.8
    {1536, 48, {4, 1, 2, 192, 2}},           // 6144, 8192: 208.9
    {1792, 48, {4, 1, 2, 224, 2, 0, true}},  // 7168, 8192: 238.5
    {4096, 64, {4, 1, 4, 256, 2, 4}},        // 16384, 4096: 274.4
};
constexpr Line kSlowFloatLayer[] = {
    {512, 48, {4, 1, 1, 192, 2, 5}},   // 1024, 32768: 139.1
    {640, 0, {4, 1, 1, 512, 3}},       // 2560, 8192: 90.7
    {768, 48, {4, 1, 1, 192, 2}},      // 3072, 8192: 106.5
    {1024, 64, {8, 1, 1, 128, 2, 3}},  // 4096, 8192: 143.6
    {1280, 64, {4, 1, 2, 160, 4}},     // 5120, 8192: 172.8
    {1536, 48, {4, 1, 2, 192, 2}},     // 6144, 8192: 213.9
    {1792, 0, {}},
    {2048, 64, {8, 1, 2, 128, 2, 3}},  // 8192, 4096: 141.0
    {2560, 64, {8, 1, 2, 160, 2, 3}},  // 10240, 4096: 181.3
    {4096, 64, {4, 1, 4, 256, 2, 4}},  // 16384, 4096: 275.5
};

constexpr Line kFastRms[] = {
    {64, 64, {2, 2, 1, 256, 4, 1, true}},    // 512, 65536: 49.9
    {96, 48, {3, 1, 1, 256, 2, 1, true}},    // 768, 32768: 38.4
    {128, 64, {4, 1, 1, 256, 2, 4, true}},   // 1024, 32768: 50.1
    {256, 64, {4, 1, 1, 256, 2, 0, true}},   // 2048, 16384: 50.2
    {384, 64, {2, 2, 1, 384, 4, 0, true}},   // 2560, 16384: 61.7
    {576, 64, {4, 1, 1, 256, 2, 4, true}},   // 4096, 16384: 97.8
    {768, 64, {2, 2, 1, 384, 4, 0, true}},   // 5120, 16384: 120.6
    {1056, 64, {3, 1, 1, 352, 2, 4}},        // 8192, 8192: 99.6
    {2048, 64, {3, 1, 2, 352, 2, 4}},        // 16384, 4096: 101.1
    {4096, 64, {3, 1, 4, 352, 3, 0, true}},  // 32768, 1024: 53.4
    {8192, 64, {2, 2, 8, 512, 4, 4}},        // 65536, 1024: 102.5
};
constexpr Line kFastLayer[] = {
    {64, 64, {2, 2, 1, 384, 4}},                   // 512, 65536: 50.8
    {96, 64, {3, 1, 1, 384, 2}},                   // 768, 16384: 22.2
    {128, 64, {4, 1, 1, 384, 2, 3}},               // 1024, 32768: 52.7
    {256, 64, {4, 1, 1, 384, 2, 2}},               // 2048, 16384: 52.7
    {448, 64, {3, 1, 1, 384, 3, 1}},               // 3072, 16384: 76.0
    {576, 64, {4, 1, 1, 384, 3, 2, true}},         // 4096, 16384: 100.8
    {896, 64, {3, 1, 1, 448, 2}},                  // 5120, 16384: 128.6
    {1024, 64, {2, 2, 1, 512, 6, 0, true}},        // 8192, 8192: 108.0
    {2048, 64, {4, 1, 1, 512, 2, 2, true, true}},  // 16384, 4096: 108.6
};
constexpr Line kFastFloatLayer[] = {
    {2048, 0, {}},
    {4096, 64, {4, 1, 4, 256, 4, 0, true}},  // 16384, 4096: 189.8
};

// Whether a cluster can have it, and a team's ring a tile.
constexpr bool is_sound(const NormBackwardShape& shape) {
  if (shape.cluster < 1 || shape.cluster > kNormMaxCluster) return false;
  if ((shape.cluster & (shape.cluster - 1)) != 0) return false;
  if (shape.stages < shape.rows || shape.stages > kNormMaxStages) return false;
  return shape.threads > 0 && shape.threads % 32 == 0 && shape.threads <= kNormMaxThreads;
}

template <int kLines>
constexpr bool is_sound(const Line (&lines)[kLines]) {
  int before = 0;
  for (const Line& line : lines) {
    const NormBackwardShape& shape = line.shape;
    if (line.most <= before) return false;
    before = line.most;
    if (shape.vectors == 0) continue;
    if (shape.vectors * shape.rows <= 2) return false;  // such kernels have rows of one warp only
    if (!is_sound(shape)) return false;
    if (line.most > shape.vectors * shape.threads * kNormMaxCluster) return false;
  }
  return true;
}
constexpr bool is_sound(const ShortLine (&lines)[sizeof(kSlowShort) / sizeof(ShortLine)]) {
  int before = 32;
  for (const ShortLine& line : lines) {
    if (line.most <= before) return false;
    before = line.most;
    for (const auto& one : line.of) {
      if (!is_sound(short_shape(line.most, one.warps, one.stages))) return false;
    }
  }
  return true;
}
static_assert(is_sound(kSlowRms) && is_sound(kSlowLayer) && is_sound(kSlowShort));
static_assert(is_sound(kSlowFloatRms) && is_sound(kSlowFloatLayer));
static_assert(is_sound(kFastRms) && is_sound(kFastLayer) && is_sound(kFastFloatLayer));

bool is_measured(const NormProblem& problem) {
  return problem.streams == 2 && problem.rows >= int64_t{kMeasuredRows} * problem.multiprocessors;
}
bool is_slow(const NormProblem& problem) {
  return problem.memory_gbps > 0 && problem.memory_gbps < kSlowMemory;
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

// Of no vectors where norm_backward_short has none.
NormBackwardShape measured_short_shape(const NormProblem& problem, int64_t vectors) {
  if (!norm_backward_has_short(problem, vectors)) return {};
  const int64_t megabytes = problem.rows * vectors * 32 >> 20;
  int many = 0;
  for (const int most : kShortMegabytes) many += megabytes > most ? 1 : 0;
  for (const ShortLine& line : kSlowShort) {
    if (vectors > line.most) continue;
    return short_shape(vectors, line.of[many].warps, line.of[many].stages);
  }
  return {};
}

NormBackwardShape measured_shape(const NormProblem& problem, int64_t vectors) {
  const bool layer = problem.kind == NormKind::kLayer, slow = is_slow(problem);
  if (dtype_bytes(problem.dtype) == 2) {
    if (layer && slow) {
      const NormBackwardShape shape = measured_short_shape(problem, vectors);
      return shape.vectors > 0 ? shape : find_line(kSlowLayer, vectors);
    }
    if (layer) return find_line(kFastLayer, vectors);
    return slow ? find_line(kSlowRms, vectors) : find_line(kFastRms, vectors);
  }
  if (layer) {
    return slow ? find_line(kSlowFloatLayer, vectors) : find_line(kFastFloatLayer, vectors);
  }
  return slow ? find_line(kSlowFloatRms, vectors) : NormBackwardShape{};
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
      shape.cluster == 1 &&
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
  if (vectors <= (narrow_element ? 32 : 64)) {
    const bool most = problem.rows >= int64_t{1024} * problem.multiprocessors;
    const bool heads = narrow_element && !layer && vectors > 8 && vectors <= 16;
    if (most && heads && norm_even_blocks(problem.rows, problem.multiprocessors) > 0) {
      if (is_slow(problem) && is_measured(problem)) return {2, 1, 1, 384, 2, 5, true};  // 69.6 us
      return {2, 1, 1, kNormMaxThreads, 3, 3, true};
    }
    return {2, 1, 1, layer && narrow_element ? kNormMaxThreads : 384, 3};
  }
  if (is_measured(problem)) {
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
