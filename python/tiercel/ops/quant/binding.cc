// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/fp8_quantize.h"
#include "kernels/quant/fp8_transpose.h"
#include "kernels/quant/fused_quant.h"
#include "kernels/quant/nvfp4.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

// An empty x has no memory and so no stream, yet its scale is written.
constexpr Field<Fp8QuantizeCall> kFp8Fields[] = {
    Tensor<&Fp8QuantizeCall::x>("x"),
    Tensor<&Fp8QuantizeCall::q>("q"),
    OfStream(Tensor<&Fp8QuantizeCall::scale>("scale")),
    Optional<&Fp8QuantizeCall::partial>("partial"),
    Index<Fp8Granularity::kBlock, &Fp8QuantizeCall::granularity>("granularity"),
};
constexpr Parameters<Fp8QuantizeCall> kFp8{"fp8_quantize", kFp8Fields};

constexpr Field<Fp8QuantizeCall> kFp8BetweenFields[] = {
    Tensor<&Fp8QuantizeCall::x>("x"),
    Tensor<&Fp8QuantizeCall::q>("q"),
    OfStream(Tensor<&Fp8QuantizeCall::scale>("scale")),
    Optional<&Fp8QuantizeCall::counters>("counters"),
    Index<Fp8Granularity::kBlock, &Fp8QuantizeCall::granularity>("granularity"),
    Value<&Fp8QuantizeCall::x_is_older>("x_is_older"),
    Value<&Fp8QuantizeCall::starts_next>("starts_next"),
};
constexpr Parameters<Fp8QuantizeCall> kFp8Between{"fp8_quantize", kFp8BetweenFields};

constexpr Field<Fp8QuantizeCall> kFp8StaticFields[] = {
    Tensor<&Fp8QuantizeCall::x>("x"),
    Tensor<&Fp8QuantizeCall::scale>("scale"),
    Tensor<&Fp8QuantizeCall::q>("q"),
};
constexpr Parameters<Fp8QuantizeCall> kFp8Static{"fp8_quantize", kFp8StaticFields};

constexpr PlanField<Fp8QuantizePlan> kFp8PlanFields[] = {
    Entry<&Fp8QuantizePlan::kernel>("kernel"),   Entry<&Fp8QuantizePlan::launches>("launches"),
    Entry<&Fp8QuantizePlan::vectors>("vectors"), Entry<&Fp8QuantizePlan::grid>("grid"),
    Entry<&Fp8QuantizePlan::block>("block"),
};
constexpr PlanDict<Fp8QuantizePlan> kFp8Plan{"Fp8QuantizePlan", kFp8PlanFields};

constexpr Field<Fp8TransposeCall> kFp8TransposeFields[] = {
    Tensor<&Fp8TransposeCall::x>("x"),
    OfStream(Tensor<&Fp8TransposeCall::q>("q")),
    Tensor<&Fp8TransposeCall::scale>("scale"),
    Tensor<&Fp8TransposeCall::q_t>("q_t"),
    Tensor<&Fp8TransposeCall::scale_t>("scale_t"),
    Index<Fp8Granularity::kBlock, &Fp8TransposeCall::granularity>("granularity"),
};
constexpr Parameters<Fp8TransposeCall> kFp8Transpose{"fp8_quantize_transpose", kFp8TransposeFields};

constexpr PlanField<Fp8TransposePlan> kFp8TransposePlanFields[] = {
    Entry<&Fp8TransposePlan::kernel>("kernel"),
    Entry<&Fp8TransposePlan::grid>("grid"),
    Entry<&Fp8TransposePlan::block>("block"),
};
constexpr PlanDict<Fp8TransposePlan> kFp8TransposePlan{"Fp8TransposePlan", kFp8TransposePlanFields};

constexpr Field<FusedQuantCall> kNormQuantFields[] = {
    OfStream(Tensor<&FusedQuantCall::x>("x")),
    Tensor<&FusedQuantCall::q>("q"),
    Tensor<&FusedQuantCall::scale>("scale"),
    Optional<&FusedQuantCall::weight>("weight"),
    Index<Fp8Granularity::kGroup, &FusedQuantCall::granularity>("granularity"),
    Value<&FusedQuantCall::eps>("eps"),
    Optional<&FusedQuantCall::residual>("residual"),
    Optional<&FusedQuantCall::normed>("normed"),
};
constexpr Parameters<FusedQuantCall> kNormQuant{"rms_norm_quant", kNormQuantFields};

constexpr Field<FusedQuantCall> kLayerQuantFields[] = {
    OfStream(Tensor<&FusedQuantCall::x>("x")),
    Tensor<&FusedQuantCall::q>("q"),
    Tensor<&FusedQuantCall::scale>("scale"),
    Optional<&FusedQuantCall::weight>("weight"),
    Optional<&FusedQuantCall::bias>("bias"),
    Index<Fp8Granularity::kGroup, &FusedQuantCall::granularity>("granularity"),
    Value<&FusedQuantCall::eps>("eps"),
    Optional<&FusedQuantCall::residual>("residual"),
    Optional<&FusedQuantCall::normed>("normed"),
};
constexpr Parameters<FusedQuantCall> kLayerQuant{"layer_norm_quant", kLayerQuantFields};

constexpr Field<FusedQuantCall> kGatedQuantFields[] = {
    OfStream(Tensor<&FusedQuantCall::x>("x")),
    Tensor<&FusedQuantCall::q>("q"),
    Tensor<&FusedQuantCall::scale>("scale"),
    Index<GatedFunction::kRelu, &FusedQuantCall::function>("activation"),
    Index<Fp8Granularity::kGroup, &FusedQuantCall::granularity>("granularity"),
};
constexpr Parameters<FusedQuantCall> kGatedQuant{"act_and_mul_quant", kGatedQuantFields};

constexpr PlanField<FusedQuantPlan> kFusedQuantPlanFields[] = {
    Entry<&FusedQuantPlan::kernel>("kernel"),
    Entry<&FusedQuantPlan::vectors>("vectors"),
    Entry<&FusedQuantPlan::grid>("grid"),
    Entry<&FusedQuantPlan::block>("block"),
};
constexpr PlanDict<FusedQuantPlan> kFusedQuantPlan{"FusedQuantPlan", kFusedQuantPlanFields};

constexpr Field<Nvfp4Call> kQuantizeFields[] = {
    Tensor<&Nvfp4Call::values>("x"),
    Optional<&Nvfp4Call::global_scale>("global_scale"),
    Tensor<&Nvfp4Call::q>("q"),
    Tensor<&Nvfp4Call::scale>("scale"),
};
constexpr Parameters<Nvfp4Call> kQuantize{"nvfp4_quantize", kQuantizeFields};

constexpr Field<Nvfp4Call> kDequantizeFields[] = {
    Tensor<&Nvfp4Call::q>("q"),
    Tensor<&Nvfp4Call::scale>("scale"),
    Optional<&Nvfp4Call::global_scale>("global_scale"),
    OfStream(Tensor<&Nvfp4Call::values>("out")),
};
constexpr Parameters<Nvfp4Call> kDequantize{"nvfp4_dequantize", kDequantizeFields};

constexpr PlanField<Nvfp4Plan> kNvfp4PlanFields[] = {
    Entry<&Nvfp4Plan::kernel>("kernel"),
    Entry<&Nvfp4Plan::grid>("grid"),
    Entry<&Nvfp4Plan::block>("block"),
};
constexpr PlanDict<Nvfp4Plan> kNvfp4Plan{"Nvfp4Plan", kNvfp4PlanFields};

constexpr char kFills[] = "Launches the kernels on the current stream; fills `q` and `scale`.";

constexpr Function kFunctions[] = {
    LaunchOf<kFp8, fp8_quantize>("fp8_quantize", kFills),
    PlanOf<kFp8, fp8_quantize_plan, kFp8Plan>("fp8_quantize_plan"),
    LaunchOf<kFp8Between, fp8_quantize_between>(
        "fp8_quantize_between",
        "Quantises by row or group, overlapping with the launches before and after it."),
    LaunchOf<kFp8Static, fp8_quantize_static>("fp8_quantize_static",
                                              "Quantises with the given scale; fills `q`."),
    LoadOf<fp8_quantize_load>("fp8_quantize_load"),
    LaunchOf<kFp8Transpose, fp8_quantize_transpose>(
        "fp8_quantize_transpose",
        "Launches the kernel on the current stream; fills `q`, `scale`, `q_t` and `scale_t`."),
    PlanOf<kFp8Transpose, fp8_quantize_transpose_plan, kFp8TransposePlan>(
        "fp8_quantize_transpose_plan"),
    LoadOf<fp8_quantize_transpose_load>("fp8_quantize_transpose_load"),
    LaunchOf<kNormQuant, rms_norm_quant>("rms_norm_quant", kFills),
    PlanOf<kNormQuant, rms_norm_quant_plan, kFusedQuantPlan>("rms_norm_quant_plan"),
    LaunchOf<kLayerQuant, layer_norm_quant>("layer_norm_quant", kFills),
    PlanOf<kLayerQuant, layer_norm_quant_plan, kFusedQuantPlan>("layer_norm_quant_plan"),
    LaunchOf<kGatedQuant, act_and_mul_quant>("act_and_mul_quant", kFills),
    PlanOf<kGatedQuant, act_and_mul_quant_plan, kFusedQuantPlan>("act_and_mul_quant_plan"),
    LoadOf<fused_quant_load>("fused_quant_load"),
    LaunchOf<kQuantize, nvfp4_quantize>("nvfp4_quantize", kFills),
    PlanOf<kQuantize, nvfp4_quantize_plan, kNvfp4Plan>("nvfp4_quantize_plan"),
    LoadOf<nvfp4_quantize_load>("nvfp4_quantize_load"),
    LaunchOf<kDequantize, nvfp4_dequantize>(
        "nvfp4_dequantize", "Launches the kernel on the current stream; fills `out`."),
    PlanOf<kDequantize, nvfp4_dequantize_plan, kNvfp4Plan>("nvfp4_dequantize_plan"),
    LoadOf<nvfp4_dequantize_load>("nvfp4_dequantize_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
