// SPDX-License-Identifier: Apache-2.0
// The batch-invariant mode: the launchers choose nothing by the number of rows or sequences that
// changes the order of a sum.
#ifndef KERNELS_SM90_INVARIANT_H_
#define KERNELS_SM90_INVARIANT_H_

#include <cstdint>

namespace tiercel {

// True if the mode is on for this thread. Launchers and plans read it in each call.
bool batch_invariant();

// For all threads that have no mode of their own.
void set_batch_invariant(bool on);

// This thread's mode: 1 on, 0 off, -1 that of the process. Returns the one before.
int set_thread_batch_invariant(int mode);

// The number of rows to choose an order of sums by: in the mode it is the same for all calls, by
// default one that suits decoding.
inline int64_t rows_to_choose_by(int64_t rows, int64_t in_the_mode = 64) {
  return batch_invariant() ? in_the_mode : rows;
}

}  // namespace tiercel

#endif  // KERNELS_SM90_INVARIANT_H_
