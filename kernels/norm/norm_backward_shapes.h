// SPDX-License-Identifier: Apache-2.0
// How many threads, rows and bytes a block of norm_backward has: what was measured.
#ifndef KERNELS_NORM_NORM_BACKWARD_SHAPES_H_
#define KERNELS_NORM_NORM_BACKWARD_SHAPES_H_

#include <cstdint>

#include "kernels/norm/norm_choose.h"
#include "kernels/sm90/status.h"

namespace tiercel {

struct NormBackwardShape {
  int vectors;  // a thread, of a row
  int rows;     // a thread, at once
  int cluster;
  int threads;         // a block, about
  int stages;          // a team's, of a row each
  int ahead = 0;       // rows a team asks for beyond those, before it may read them
  bool even = false;   // whether a few blocks fewer take part where the rows divide among them
  bool pairs = false;  // whether two blocks, of a row each, add their sums up
  int least = 0;       // bytes on their way to a block: more stages where those have fewer
};

// As many blocks as there is room for, or up to a thirty-second fewer, with the same number of rows
// each: 128 of 132 for a power of two of rows. 0 if no such number divides the rows. Of blocks that
// go in pairs (`step` 2) an even number.
int norm_even_blocks(int64_t rows, int blocks, int step = 1);

// Whether norm_backward_short has a kernel for it: with as many vectors a thread as a row needs
// that has one warp.
bool norm_backward_has_short(const NormProblem& problem, int64_t vectors);

// For rows of so many vectors of 16 bytes; of no vectors where a shape on trial has no kernel.
NormBackwardShape norm_backward_shape(const NormProblem& problem, int64_t vectors);

// For a search: what this thread's calls have instead, whatever the problem, until null is given.
Status norm_try_backward_shape(const NormBackwardShape* shape);

}  // namespace tiercel

#endif  // KERNELS_NORM_NORM_BACKWARD_SHAPES_H_
