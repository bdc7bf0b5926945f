// SPDX-License-Identifier: Apache-2.0
#include "kernels/moe/moe_rows.h"
#include "python/bindings/functions.h"

namespace tiercel::python {
namespace {

// An empty batch has bounds all the same: the stream is that of a tensor that is never empty.
constexpr Field<MoePlacesCall> kPlacesFields[] = {
    Tensor<&MoePlacesCall::sorted_token_ids>("sorted_token_ids"),
    Tensor<&MoePlacesCall::expert_ids>("expert_ids"),
    Tensor<&MoePlacesCall::places>("places"),
    OfStream(Tensor<&MoePlacesCall::offsets>("offsets")),
};
constexpr Parameters<MoePlacesCall> kPlaces{"fused_moe", kPlacesFields};

constexpr Field<MoeSpreadCall> kSpreadFields[] = {
    Tensor<&MoeSpreadCall::x>("x"),
    Tensor<&MoeSpreadCall::places>("places"),
    Tensor<&MoeSpreadCall::out>("out"),
};
constexpr Parameters<MoeSpreadCall> kSpread{"fused_moe", kSpreadFields};

constexpr Field<MoeCollectCall> kCollectFields[] = {
    Tensor<&MoeCollectCall::x>("x"),
    Tensor<&MoeCollectCall::places>("places"),
    Optional<&MoeCollectCall::weights>("topk_weights"),
    OfStream(Tensor<&MoeCollectCall::out>("out")),
};
constexpr Parameters<MoeCollectCall> kCollect{"fused_moe", kCollectFields};

constexpr Field<MoeGateCall> kGateFields[] = {
    Tensor<&MoeGateCall::pre>("pre"),
    Tensor<&MoeGateCall::places>("places"),
    Tensor<&MoeGateCall::inner>("inner"),
    Index<MoeActivation::kGeluResidual, &MoeGateCall::activation>("activation"),
};
constexpr Parameters<MoeGateCall> kGate{"fused_moe", kGateFields};

constexpr Field<MoeGateBackwardCall> kGateBackwardFields[] = {
    Tensor<&MoeGateBackwardCall::grad>("grad"),
    Tensor<&MoeGateBackwardCall::pre>("pre"),
    Tensor<&MoeGateBackwardCall::places>("places"),
    Tensor<&MoeGateBackwardCall::weights>("topk_weights"),
    Tensor<&MoeGateBackwardCall::grad_pre>("grad_pre"),
    Tensor<&MoeGateBackwardCall::grad_weights>("grad_weights"),
    Index<MoeActivation::kGeluResidual, &MoeGateBackwardCall::activation>("activation"),
};
constexpr Parameters<MoeGateBackwardCall> kGateBackward{"fused_moe", kGateBackwardFields};

constexpr Function kFunctions[] = {
    LaunchOf<kPlaces, moe_places>("moe_places",
                                  "Launches the kernel; fills `places` and `offsets`."),
    LaunchOf<kSpread, moe_spread>("moe_spread", "Launches the kernel; fills `out`."),
    LaunchOf<kCollect, moe_collect>("moe_collect", "Launches the kernel; fills `out`."),
    LaunchOf<kGate, moe_gate>("moe_gate", "Launches the kernel; fills `inner`."),
    LaunchOf<kGateBackward, moe_gate_backward>(
        "moe_gate_backward",
        "Launches the kernel; fills `grad_pre` and `grad_weights`, and overwrites `grad`."),
    LoadOf<moe_rows_load>("moe_rows_load"),
};
const Family kFamily(kFunctions);

}  // namespace
}  // namespace tiercel::python
