// SPDX-License-Identifier: Apache-2.0
#include "kernels/transpose/copy_transpose.h"
#include "kernels/transpose/copy_transpose_kernels.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<CopyTransposeCall> kFields[] = {
    Tensor<&CopyTransposeCall::x>("x"),
    Tensor<&CopyTransposeCall::out>("out"),
    Value<&CopyTransposeCall::tile_size>("tile_size"),
};
constexpr Parameters<CopyTransposeCall> kCopyTranspose{"copy_transpose", kFields};

constexpr PlanField<CopyTransposePlan> kPlanFields[] = {
    Entry<&CopyTransposePlan::kernel>("kernel"),
    Entry<&CopyTransposePlan::tile_rows>("tile_rows"),
    Entry<&CopyTransposePlan::tile_columns>("tile_columns"),
    Entry<&CopyTransposePlan::vector_bytes>("vector_bytes"),
    Entry<&CopyTransposePlan::grid>("grid"),
    Entry<&CopyTransposePlan::block>("block"),
};
constexpr PlanDict<CopyTransposePlan> kPlan{"CopyTransposePlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kCopyTranspose, copy_transpose>(
        "copy_transpose", "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kCopyTranspose, copy_transpose_plan, kPlan>("copy_transpose_plan"),
    LoadOf<copy_transpose_kernels>("copy_transpose_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
