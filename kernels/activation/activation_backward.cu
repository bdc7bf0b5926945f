// SPDX-License-Identifier: Apache-2.0
// The backward kernels, by function, dtype and form.
#include "kernels/activation/activation.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(function, type, gated)                                \
  {ActivationFunction::k##function,                                          \
   DType::k##type,                                                           \
   DType::k##type,                                                           \
   gated,                                                                    \
   false,                                                                    \
   Kernel("activation_backward<" #function ", " #type ", gated=" #gated ">", \
          reinterpret_cast<const void*>(                                     \
              activation_backward<function<type::kBytes == 4>, type, gated>))}
#define TIERCEL_FORMS(function, type) \
  TIERCEL_KERNEL(function, type, true), TIERCEL_KERNEL(function, type, false)
#define TIERCEL_TYPES(function)                                        \
  TIERCEL_FORMS(function, Float32), TIERCEL_FORMS(function, BFloat16), \
      TIERCEL_FORMS(function, Float16)

const ActivationKernel kKernels[] = {TIERCEL_TYPES(Silu), TIERCEL_TYPES(Gelu),
                                     TIERCEL_TYPES(GeluTanh), TIERCEL_TYPES(Relu)};

}  // namespace

const ActivationKernel* activation_backward_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
