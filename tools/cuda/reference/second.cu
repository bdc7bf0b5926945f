// SPDX-License-Identifier: Apache-2.0
#include "tools/cuda/reference/reference.cuh"

const void* tiercel_reference_second =
    tiercel::reference_kernels(std::make_integer_sequence<int, 12>());
