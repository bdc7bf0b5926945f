// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/call_layout.h"

namespace tiercel::python {

bool IsContiguous(const TensorView& view) {
  int64_t step = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] == 0) return true;
    if (view.shape[i] != 1 && view.strides[i] != step) return false;
    step *= view.shape[i];
  }
  return true;
}

}  // namespace tiercel::python
