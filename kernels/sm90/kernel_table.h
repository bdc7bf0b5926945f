// SPDX-License-Identifier: Apache-2.0
// A family's kernels of one kind, as its device code lists them.
#ifndef KERNELS_SM90_KERNEL_TABLE_H_
#define KERNELS_SM90_KERNEL_TABLE_H_

#include "kernels/sm90/status.h"

namespace tiercel {

// A view of a static array of T, which has a member `kernel` and the values that a heuristic
// chooses by. Device code hands the array over as `const T* list(int* count)`.
template <typename T>
class KernelTable {
 public:
  explicit KernelTable(const T* (*list)(int* count)) : begin_(list(&count_)) {}

  const T* begin() const { return begin_; }
  const T* end() const { return begin_ + count_; }

  // The first for which `fits` returns true, or null.
  template <typename Fits>
  const T* find(Fits fits) const {
    for (const T& one : *this) {
      if (fits(one)) return &one;
    }
    return nullptr;
  }

  Status load_all(int device) const {
    for (const T& one : *this) TIERCEL_RETURN_IF_ERROR(one.kernel.load(device));
    return Status();
  }

 private:
  int count_ = 0;  // before begin_, which sets it
  const T* begin_;
};

}  // namespace tiercel

#endif  // KERNELS_SM90_KERNEL_TABLE_H_
