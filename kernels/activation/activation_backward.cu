// SPDX-License-Identifier: Apache-2.0
// The backward kernels, by function, dtype and form.
#include "kernels/activation/activation.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(function, type, gated, unrolled)                                         \
  {ActivationFunction::k##function,                                                             \
   DType::k##type,                                                                              \
   DType::k##type,                                                                              \
   gated,                                                                                       \
   true,                                                                                        \
   unrolled,                                                                                    \
   Kernel("activation_backward<" #function ", " #type ", gated=" #gated ", unrolled=" #unrolled \
          ">",                                                                                  \
          reinterpret_cast<const void*>(                                                        \
              activation_backward<function<type::kBytes == 4>, type, gated, unrolled>))}
#define TIERCEL_UNROLLED(function, type, gated) \
  TIERCEL_KERNEL(function, type, gated, 1), TIERCEL_KERNEL(function, type, gated, 2)
#define TIERCEL_FORMS(function, type) \
  TIERCEL_UNROLLED(function, type, true), TIERCEL_UNROLLED(function, type, false)
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
