// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/invariant.h"

#include <atomic>

namespace tiercel {
namespace {

std::atomic<bool> of_process{false};
thread_local int of_thread = -1;

}  // namespace

bool batch_invariant() {
  return of_thread < 0 ? of_process.load(std::memory_order_relaxed) : of_thread != 0;
}

void set_batch_invariant(bool on) { of_process.store(on, std::memory_order_relaxed); }

int set_thread_batch_invariant(int mode) {
  const int before = of_thread;
  of_thread = mode;
  return before;
}

}  // namespace tiercel
