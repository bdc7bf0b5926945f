// SPDX-License-Identifier: Apache-2.0
// Launch configurations of norm_backward: tuned for a device, measured on a kind of device, or by a
// heuristic.
#ifndef KERNELS_NORM_NORM_BACKWARD_CONFIG_H_
#define KERNELS_NORM_NORM_BACKWARD_CONFIG_H_

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/norm/norm_choose.h"
#include "kernels/sm90/status.h"
#include "kernels/sm90/tuned.h"

namespace tiercel {

// A configuration's fields as `tiercel tune` writes them: all of NormBackwardConfig's but
// min_bytes.
using NormBackwardFields = std::array<int, 8>;
NormBackwardConfig norm_backward_config_of(const NormBackwardFields& fields);

// Configurations that `tiercel tune` found; a problem's only size is N, its tokens are the rows.
TunedTable<NormBackwardConfig>& norm_backward_tuned(NormKind kind);

// A measured configuration and the problems that it is for.
struct NormBackwardRange {
  int min_columns;
  int max_columns;
  int min_megabytes;  // of x and grad together
  int max_megabytes;
  bool short_rows;  // only where norm_backward_short has a kernel
  NormBackwardConfig config;
};

// Measurements of one kind of device. They are valid for two tensors and many rows.
struct NormBackwardRanges {
  int64_t rows_per_multiprocessor = 0;  // at least so many, or
  int64_t megabytes = 0;                // so many of x and grad, unless this is 0

  std::vector<NormBackwardRange>& of(NormKind kind, int element) {
    return tables[static_cast<int>(kind)][element == 4];
  }
  std::vector<NormBackwardRange> tables[2][2];  // by kind; 16-bit, float32. The first match counts.
};

// Sets the measurements for devices whose memory is slower than `below_gbps`; where several are,
// the slowest kind counts. INT_MAX: also for devices of unknown rate.
void set_norm_backward_ranges(int below_gbps, NormBackwardRanges ranges);
void clear_norm_backward_ranges();

// An error unless a cluster can hold the range's longest rows with its configuration.
Status norm_backward_check(const NormBackwardRange& range, NormKind kind, int element);

// An error unless the configuration's fields are valid, independent of the problem.
Status norm_backward_check(const char* op, const NormBackwardConfig& config);

// The number of blocks, at most 1/32 below `blocks`, that divides the rows evenly: 128 of 132 for
// a power of two. 0 if there is none. `step` 2 keeps it even, for blocks that work in pairs.
int norm_even_blocks(int64_t rows, int blocks, int step = 1);

// True if norm_backward_short has a kernel for the problem and a thread has as many vectors as rows
// of one warp need.
bool norm_backward_has_short(const NormProblem& problem, int64_t vectors);

// True if the problem's rows, of `vectors` 16-byte vectors, fit a configuration.
bool norm_backward_fits(const NormProblem& problem, const NormBackwardConfig& config,
                        int64_t vectors);

// The measured configuration, or one with vectors == 0 if there is none for the problem.
NormBackwardConfig norm_backward_measured(const NormProblem& problem, int64_t vectors);

// The heuristic's configuration.
NormBackwardConfig norm_backward_heuristic(const NormProblem& problem, int64_t vectors);

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_BACKWARD_CONFIG_H_
