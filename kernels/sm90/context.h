// SPDX-License-Identifier: Apache-2.0
// The device's primary context, which is torch's, current in the calling thread.
#ifndef KERNELS_SM90_CONTEXT_H_
#define KERNELS_SM90_CONTEXT_H_

#include "kernels/sm90/status.h"

namespace tiercel {

// Makes the device's primary context current for as long as it lives, when another or none is: a
// thread that autograd has just started has none. The driver must be ready (driver_status).
class ContextScope {
 public:
  ContextScope() = default;
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  ~ContextScope();

  Status enter(int device);

 private:
  bool pushed_ = false;
};

}  // namespace tiercel

#endif  // KERNELS_SM90_CONTEXT_H_
