// SPDX-License-Identifier: Apache-2.0
// Makes the device's primary context, the one that torch uses, current in the calling thread.
#ifndef KERNELS_SM90_CONTEXT_H_
#define KERNELS_SM90_CONTEXT_H_

#include "kernels/sm90/status.h"

namespace tiercel {

// After enter(), the device's primary context is current until destruction. A thread that autograd
// has just started has no current context. The driver must be ready (driver_status).
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
