// SPDX-License-Identifier: Apache-2.0
// The forward kernels, by function, dtype, result dtype and form.
#include "kernels/activation/activation_shifted.cuh"

namespace tiercel {
namespace {

#define TIERCEL_KERNEL(function, type, out, gated)                                    \
  {ActivationFunction::k##function,                                                   \
   DType::k##type,                                                                    \
   DType::k##out,                                                                     \
   gated,                                                                             \
   false,                                                                             \
   Kernel("activation_forward<" #function ", " #type ", " #out ", gated=" #gated ">", \
          reinterpret_cast<const void*>(                                              \
              activation_forward<function<type::kBytes == 4>, type, out, gated>))}
#define TIERCEL_SHIFTED(function, type, out)                                \
  {ActivationFunction::k##function,                                         \
   DType::k##type,                                                          \
   DType::k##out,                                                           \
   true,                                                                    \
   true,                                                                    \
   Kernel("activation_forward_shifted<" #function ", " #type ", " #out ">", \
          reinterpret_cast<const void*>(                                    \
              activation_forward_shifted<function<type::kBytes == 4>, type, out>))}
#define TIERCEL_FORMS(function, type, out)                                               \
  TIERCEL_KERNEL(function, type, out, true), TIERCEL_KERNEL(function, type, out, false), \
      TIERCEL_SHIFTED(function, type, out)
#define TIERCEL_TYPES(function)                                                                \
  TIERCEL_FORMS(function, Float32, Float32), TIERCEL_FORMS(function, BFloat16, BFloat16),      \
      TIERCEL_FORMS(function, Float16, Float16), TIERCEL_FORMS(function, Float32, Float8E4M3), \
      TIERCEL_FORMS(function, BFloat16, Float8E4M3), TIERCEL_FORMS(function, Float16, Float8E4M3)

const ActivationKernel kKernels[] = {TIERCEL_TYPES(Silu), TIERCEL_TYPES(Gelu),
                                     TIERCEL_TYPES(GeluTanh), TIERCEL_TYPES(Relu)};

}  // namespace

const ActivationKernel* activation_forward_kernels(int* count) {
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

}  // namespace tiercel
