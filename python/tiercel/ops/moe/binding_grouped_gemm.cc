// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/grouped_gemm.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

constexpr Field<GroupedGemmCall> kFields[] = {
    Tensor<&GroupedGemmCall::a>("a"),
    Tensor<&GroupedGemmCall::b>("b"),
    Tensor<&GroupedGemmCall::offsets>("offsets"),
    Tensor<&GroupedGemmCall::out>("out"),
    Index<GroupedKind::kGradWeight, &GroupedGemmCall::kind>("kind"),
};
constexpr Parameters<GroupedGemmCall> kGroupedGemm{"grouped_gemm", kFields};

// x of three dimensions has its groups' counts in place of offsets.
constexpr Field<GroupedGemmCall> kFp8Fields[] = {
    Tensor<&GroupedGemmCall::a>("x"),
    Tensor<&GroupedGemmCall::b>("w"),
    Tensor<&GroupedGemmCall::offsets>("offsets"),
    Tensor<&GroupedGemmCall::x_scale>("x_scale"),
    Tensor<&GroupedGemmCall::w_scale>("w_scale"),
    Tensor<&GroupedGemmCall::out>("out"),
    Value<&GroupedGemmCall::expected_rows>("expected_rows"),
};
constexpr Parameters<GroupedGemmCall> kFp8{"grouped_gemm", kFp8Fields};

constexpr PlanField<GroupedGemmPlan> kPlanFields[] = {
    Entry<&GroupedGemmPlan::kernel>("kernel"),
    Entry<&GroupedGemmPlan::tile_m>("tile_m"),
    Entry<&GroupedGemmPlan::tile_n>("tile_n"),
    Entry<&GroupedGemmPlan::tiles>("tiles"),
    Entry<&GroupedGemmPlan::grid>("grid"),
    Entry<&GroupedGemmPlan::block>("block"),
    Entry<&GroupedGemmPlan::dynamic_smem>("dynamic_smem"),
};
constexpr PlanDict<GroupedGemmPlan> kPlan{"GroupedGemmPlan", kPlanFields};

constexpr Function kFunctions[] = {
    LaunchOf<kGroupedGemm, grouped_gemm>("grouped_gemm",
                                         "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kGroupedGemm, grouped_gemm_plan, kPlan>("grouped_gemm_plan"),
    LaunchOf<kFp8, grouped_gemm>("grouped_gemm_fp8",
                                 "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kFp8, grouped_gemm_plan, kPlan>("grouped_gemm_fp8_plan"),
    LoadOf<grouped_gemm_load>("grouped_gemm_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
