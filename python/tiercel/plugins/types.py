# SPDX-License-Identifier: Apache-2.0
"""Type aliases for backends: a tensor and, as its annotation, what the contract says of it."""

from __future__ import annotations

from typing import Annotated, Protocol

import torch
from torch import Tensor

from tiercel.plugins.contracts import CONTRACTS

__all__ = [
    "Activated",
    "Activation",
    "ActivationInput",
    "ActivationResult",
    "Attended",
    "Attention",
    "AttentionVarlen",
    "Bias",
    "BlockExperts",
    "ChosenExperts",
    "CopyTranspose",
    "DownScale",
    "DownWeights",
    "ElementWeights",
    "ExpertMap",
    "ExpertOutputs",
    "ExpertWeights",
    "Factor",
    "Features",
    "Fp4Codes",
    "Fp4Matrix",
    "Fp4Scales",
    "Fp4Vector",
    "Fp4Weight",
    "Fp8Codes",
    "Fp8Quantize",
    "FusedMoe",
    "GateInput",
    "GatedActivation",
    "GatedGelu",
    "GatedResult",
    "Gelu",
    "Indices",
    "InnerFeatures",
    "InnerResult",
    "Keys",
    "LinearAct",
    "LocalExperts",
    "LogSums",
    "Matrices",
    "MixedTokens",
    "MoeAlignBlockSize",
    "MoeDown",
    "MoeSum",
    "MoeUp",
    "Norm",
    "NormBias",
    "NormWeight",
    "Normalised",
    "NumSlots",
    "Nvfp4Dequantize",
    "Nvfp4Gemv",
    "Nvfp4Linear",
    "Nvfp4Quantize",
    "OuterResult",
    "PackedAttended",
    "PackedKeys",
    "PackedLogSums",
    "PackedQueries",
    "PackedValues",
    "PermutedScales",
    "ProductColumn",
    "Queries",
    "RawScales",
    "Reduce",
    "Reduced",
    "Residual",
    "ResidualSum",
    "Rows",
    "Scores",
    "ScoresMap",
    "Softmax",
    "SoftmaxMask",
    "SoftmaxResult",
    "SoftmaxScores",
    "SortedTokens",
    "SummedOutputs",
    "TokenExperts",
    "TokenFeatures",
    "TokenWeights",
    "TopkSoftmax",
    "TopkSoftmaxAlign",
    "Transposed",
    "Unreduced",
    "UpScale",
    "UpWeights",
    "Values",
    "Weight",
    "Weights",
]

GELU_AND_MUL, SILU, SILU_AND_MUL = (CONTRACTS[n] for n in ("gelu_and_mul", "silu", "silu_and_mul"))
RMS_NORM, TOPK_SOFTMAX, SOFTMAX_ONLINE = (
    CONTRACTS[n] for n in ("rms_norm", "topk_softmax", "softmax_online")
)

REDUCE, COPY_TRANSPOSE = CONTRACTS["reduce"], CONTRACTS["copy_transpose"]
ATTENTION, ATTENTION_VARLEN = CONTRACTS["attention"], CONTRACTS["attention_varlen"]
LINEAR_ACT = CONTRACTS["linear_act"]

FP8_QUANTIZE, NVFP4_DEQUANTIZE, NVFP4_QUANTIZE = (
    CONTRACTS[n] for n in ("fp8_quantize", "nvfp4_dequantize", "nvfp4_quantize")
)
NVFP4_GEMV, NVFP4_LINEAR = CONTRACTS["nvfp4_gemv"], CONTRACTS["nvfp4_linear"]
MOE_ALIGN_BLOCK_SIZE, TOPK_SOFTMAX_ALIGN, MOE_SUM = (
    CONTRACTS[n] for n in ("moe_align_block_size", "topk_softmax_align", "moe_sum")
)
FUSED_MOE, MOE_UP, MOE_DOWN = (CONTRACTS[n] for n in ("fused_moe", "moe_up", "moe_down"))

# Routing: scores [T, E] float32, bfloat16 or float16, any strides; weights [T, k] float32;
# indices [T, k] of the dtype `indices_dtype`.
Scores = Annotated[Tensor, TOPK_SOFTMAX.spec("scores")]
Weights = Annotated[Tensor, TOPK_SOFTMAX.spec("weights")]
Indices = Annotated[Tensor, TOPK_SOFTMAX.spec("indices")]


class TopkSoftmax(Protocol):
    """A backend of topk_softmax."""

    def __call__(
        self,
        scores: Scores,
        k: int,
        softmax_first: bool,
        renormalize: bool,
        indices_dtype: torch.dtype,
    ) -> tuple[Weights, Indices]: ...


# Routing, sorted by expert: topk_ids [T, k] int32 or int64, expert_map [num_experts] int32 or None;
# sorted_token_ids [slots], expert_ids [blocks] and num_tokens_post_padded [1], all int32.
ChosenExperts = Annotated[Tensor, MOE_ALIGN_BLOCK_SIZE.spec("topk_ids")]
ExpertMap = Annotated["Tensor | None", MOE_ALIGN_BLOCK_SIZE.spec("expert_map")]
ScoresMap = Annotated["Tensor | None", TOPK_SOFTMAX_ALIGN.spec("expert_map")]
SortedTokens = Annotated[Tensor, MOE_ALIGN_BLOCK_SIZE.spec("sorted_token_ids")]
BlockExperts = Annotated[Tensor, MOE_ALIGN_BLOCK_SIZE.spec("expert_ids")]
NumSlots = Annotated[Tensor, MOE_ALIGN_BLOCK_SIZE.spec("num_tokens_post_padded")]


class MoeAlignBlockSize(Protocol):
    """A backend of moe_align_block_size."""

    def __call__(
        self,
        topk_ids: ChosenExperts,
        block_size: int,
        num_experts: int,
        expert_map: ExpertMap,
        pad_sorted_ids: bool,
        ignore_invalid_experts: bool,
    ) -> tuple[SortedTokens, BlockExperts, NumSlots]: ...


class TopkSoftmaxAlign(Protocol):
    """A backend of topk_softmax_align."""

    def __call__(
        self,
        scores: Scores,
        k: int,
        block_size: int,
        expert_map: ScoresMap,
        softmax_first: bool,
        renormalize: bool,
        indices_dtype: torch.dtype,
        pad_sorted_ids: bool,
        ignore_invalid_experts: bool,
    ) -> tuple[Weights, Indices, SortedTokens, BlockExperts, NumSlots]: ...


# Routing, added up: x [T, k, H] float32, bfloat16 or float16, any strides, weights [T, k] float32
# or None; out [T, H].
ExpertOutputs = Annotated[Tensor, MOE_SUM.spec("x")]
ExpertWeights = Annotated["Tensor | None", MOE_SUM.spec("weights")]
SummedOutputs = Annotated[Tensor, MOE_SUM.spec("out")]


class MoeSum(Protocol):
    """A backend of moe_sum."""

    def __call__(self, x: ExpertOutputs, weights: ExpertWeights) -> SummedOutputs: ...


# Experts: x [T, H] bfloat16 or float16, w_up [E, 2I, H], w_down [E, H, I]; between the halves
# [elements, I], of all ids' elements; topk_weights float32. The routing is moe_align_block_size's.
TokenFeatures = Annotated[Tensor, FUSED_MOE.spec("x")]
UpWeights = Annotated[Tensor, FUSED_MOE.spec("w_up")]
DownWeights = Annotated[Tensor, FUSED_MOE.spec("w_down")]
TokenWeights = Annotated[Tensor, FUSED_MOE.spec("topk_weights")]
TokenExperts = Annotated[Tensor, FUSED_MOE.spec("topk_ids")]
LocalExperts = Annotated["Tensor | None", FUSED_MOE.spec("expert_map")]
UpScale = Annotated["Tensor | None", FUSED_MOE.spec("w_up_scale")]
DownScale = Annotated["Tensor | None", FUSED_MOE.spec("w_down_scale")]
MixedTokens = Annotated[Tensor, FUSED_MOE.spec("out")]
InnerFeatures = Annotated[Tensor, MOE_DOWN.spec("x")]
ElementWeights = Annotated[Tensor, MOE_DOWN.spec("topk_weights")]
InnerResult = Annotated[Tensor, MOE_UP.spec("out")]
OuterResult = Annotated[Tensor, MOE_DOWN.spec("out")]


class FusedMoe(Protocol):
    """A backend of fused_moe."""

    def __call__(
        self,
        x: TokenFeatures,
        w_up: UpWeights,
        w_down: DownWeights,
        topk_weights: TokenWeights,
        topk_ids: TokenExperts,
        activation: str,
        expert_map: LocalExperts,
        w_up_scale: UpScale,
        w_down_scale: DownScale,
    ) -> MixedTokens: ...


class MoeUp(Protocol):
    """A backend of moe_up."""

    def __call__(
        self,
        x: TokenFeatures,
        w_up: UpWeights,
        sorted_token_ids: SortedTokens,
        expert_ids: BlockExperts,
        num_tokens_post_padded: NumSlots,
        top_k: int,
        block_size: int,
        activation: str,
    ) -> InnerResult: ...


class MoeDown(Protocol):
    """A backend of moe_down."""

    def __call__(
        self,
        x: InnerFeatures,
        w_down: DownWeights,
        topk_weights: ElementWeights,
        sorted_token_ids: SortedTokens,
        expert_ids: BlockExperts,
        num_tokens_post_padded: NumSlots,
        block_size: int,
    ) -> OuterResult: ...


# Linear: x [M, K] bfloat16 or float16, weight [N, K], bias [N] or None, any strides; out [M, N].
Features = Annotated[Tensor, LINEAR_ACT.spec("x")]
Weight = Annotated[Tensor, LINEAR_ACT.spec("weight")]
Bias = Annotated["Tensor | None", LINEAR_ACT.spec("bias")]
Activated = Annotated[Tensor, LINEAR_ACT.spec("out")]


class LinearAct(Protocol):
    """A backend of linear_act; leading dimensions of ``x`` are made one before it."""

    def __call__(self, x: Features, weight: Weight, bias: Bias, activation: str) -> Activated: ...


# Norms: x [M, N] float32, bfloat16 or float16, any strides, residual the same; weight and bias [N]
# of its dtype or float32.
Rows = Annotated[Tensor, RMS_NORM.spec("x")]
NormWeight = Annotated["Tensor | None", RMS_NORM.spec("weight")]
NormBias = Annotated["Tensor | None", RMS_NORM.spec("bias")]
Residual = Annotated["Tensor | None", RMS_NORM.spec("residual")]
Normalised = Annotated[Tensor, RMS_NORM.spec("out")]
ResidualSum = Annotated[Tensor, RMS_NORM.spec("residual_out")]


# Sequences behind each other: q [Tq, H, D], k and v [Tk, Hk, D], starts [B + 1] int32; out as q,
# and lse [H, Tq] float32.
PackedQueries = Annotated[Tensor, ATTENTION_VARLEN.spec("q")]
PackedKeys = Annotated[Tensor, ATTENTION_VARLEN.spec("k")]
PackedValues = Annotated[Tensor, ATTENTION_VARLEN.spec("v")]
PackedAttended = Annotated[Tensor, ATTENTION_VARLEN.spec("out")]
PackedLogSums = Annotated[Tensor, ATTENTION_VARLEN.spec("lse")]


class AttentionVarlen(Protocol):
    """A backend of attention_varlen. A window is None or (left, right), where -1 is no limit."""

    def __call__(
        self,
        q: PackedQueries,
        k: PackedKeys,
        v: PackedValues,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        window: tuple[int, int] | None,
        scale: float | None,
        softcap: float | None,
        return_lse: bool,
    ) -> tuple[PackedAttended, PackedLogSums]: ...


class Norm(Protocol):
    """A backend of rms_norm or layer_norm; it returns the pair where there is a residual."""

    def __call__(
        self, x: Rows, weight: NormWeight, bias: NormBias, residual: Residual, eps: float
    ) -> Normalised | tuple[Normalised, ResidualSum]: ...


# Transpose: x [B, M, N] of 1-, 2- or 4-byte elements, any strides; out [B, N, M].
Matrices = Annotated[Tensor, COPY_TRANSPOSE.spec("x")]
Transposed = Annotated[Tensor, COPY_TRANSPOSE.spec("out")]


class CopyTranspose(Protocol):
    """A backend of copy_transpose; a single matrix comes as a batch of one."""

    def __call__(self, x: Matrices, tile_size: int | None) -> Transposed: ...


# Attention: q [B, Sq, H, D] bfloat16 or float16, k and v [B, Sk, Hk, D], any strides; out as q, and
# lse [B, H, Sq] float32.
Queries = Annotated[Tensor, ATTENTION.spec("q")]
Keys = Annotated[Tensor, ATTENTION.spec("k")]
Values = Annotated[Tensor, ATTENTION.spec("v")]
Attended = Annotated[Tensor, ATTENTION.spec("out")]
LogSums = Annotated[Tensor, ATTENTION.spec("lse")]


class Attention(Protocol):
    """A backend of attention. A window is None or (left, right), where -1 is no limit."""

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        causal: bool,
        window: tuple[int, int] | None,
        scale: float | None,
        softcap: float | None,
        return_lse: bool,
    ) -> tuple[Attended, LogSums]: ...


# Reduce: x [A, N, B] float32, bfloat16 or float16, any strides, over dimension 1; out [A, B] of the
# dtype `dtype`, that of x or float32.
Unreduced = Annotated[Tensor, REDUCE.spec("x")]
Reduced = Annotated[Tensor, REDUCE.spec("out")]


class Reduce(Protocol):
    """A backend of reduce; other shapes are made this one: `dim` is 1, `keepdim` False."""

    def __call__(
        self, x: Unreduced, dim: int, op: str, keepdim: bool, dtype: torch.dtype
    ) -> Reduced: ...


# Activations: x and up [M, N] float32, bfloat16 or float16, any strides; out [M, N].
ActivationInput = Annotated[Tensor, SILU.spec("x")]
ActivationResult = Annotated[Tensor, SILU.spec("out")]
GateInput = Annotated[Tensor, SILU_AND_MUL.spec("x")]
Factor = Annotated[Tensor, GELU_AND_MUL.spec("up")]
GatedResult = Annotated[Tensor, SILU_AND_MUL.spec("out")]


class Activation(Protocol):
    """A backend of silu or relu."""

    def __call__(self, x: ActivationInput) -> ActivationResult: ...


class Gelu(Protocol):
    """A backend of gelu."""

    def __call__(self, x: ActivationInput, approximate: str) -> ActivationResult: ...


class GatedActivation(Protocol):
    """A backend of silu_and_mul or relu_and_mul; a packed tensor comes in two halves."""

    def __call__(self, x: GateInput, up: Factor) -> GatedResult: ...


class GatedGelu(Protocol):
    """A backend of gelu_and_mul."""

    def __call__(self, x: GateInput, up: Factor, approximate: str) -> GatedResult: ...


# Softmax: x [M, N] float32, bfloat16 or float16, mask [M, N] bool or float32 or None, any strides;
# out [M, N].
SoftmaxScores = Annotated[Tensor, SOFTMAX_ONLINE.spec("x")]
SoftmaxMask = Annotated["Tensor | None", SOFTMAX_ONLINE.spec("mask")]
SoftmaxResult = Annotated[Tensor, SOFTMAX_ONLINE.spec("out")]


class Softmax(Protocol):
    """A backend of softmax_online or log_softmax; ``dim`` is the last."""

    def __call__(
        self, x: SoftmaxScores, mask: SoftmaxMask, dim: int, scale: float | None
    ) -> SoftmaxResult: ...


# To 8-bit and 4-bit floats: q [T, K] e4m3, or [T, K / 2] pairs of e2m1 with scales [T, K / 16].
Fp8Codes = Annotated[Tensor, FP8_QUANTIZE.spec("q")]
Fp4Codes = Annotated[Tensor, NVFP4_QUANTIZE.spec("q")]
Fp4Scales = Annotated[Tensor, NVFP4_QUANTIZE.outputs[1]]


class Fp8Quantize(Protocol):
    """A backend of fp8_quantize; a scale that is given is returned."""

    def __call__(
        self, x: Tensor, granularity: str, scale: Tensor | None
    ) -> tuple[Fp8Codes, Tensor]: ...


class Nvfp4Quantize(Protocol):
    """A backend of nvfp4_quantize."""

    def __call__(self, x: Tensor, global_scale: Tensor | None) -> tuple[Fp4Codes, Fp4Scales]: ...


class Nvfp4Dequantize(Protocol):
    """A backend of nvfp4_dequantize."""

    def __call__(
        self, q: Fp4Codes, scale: Fp4Scales, global_scale: Tensor | None, dtype: torch.dtype
    ) -> Annotated[Tensor, NVFP4_DEQUANTIZE.spec("out")]: ...


# The seven tensors of nvfp4_gemv. k counts values; a tensor's shape shows k / 2.
Fp4Matrix = Annotated[Tensor, NVFP4_GEMV.spec("a")]
Fp4Vector = Annotated[Tensor, NVFP4_GEMV.spec("b")]
RawScales = Annotated[Tensor, NVFP4_GEMV.spec("scale_a")]
PermutedScales = Annotated[Tensor, NVFP4_GEMV.spec("scale_a_permuted")]
ProductColumn = Annotated[Tensor, NVFP4_GEMV.spec("c")]


class Nvfp4Gemv(Protocol):
    """A backend of nvfp4_gemv: writes ``c`` and returns it."""

    def __call__(
        self,
        a: Fp4Matrix,
        b: Fp4Vector,
        scale_a: RawScales,
        scale_b: RawScales,
        scale_a_permuted: PermutedScales,
        scale_b_permuted: PermutedScales,
        c: ProductColumn,
    ) -> ProductColumn: ...


Fp4Weight = Annotated[Tensor, NVFP4_LINEAR.spec("weight")]


class Nvfp4Linear(Protocol):
    """A backend of nvfp4_linear."""

    def __call__(
        self, x: Tensor, weight: Fp4Weight, scale: Fp4Scales, global_scale: Tensor | None
    ) -> Annotated[Tensor, NVFP4_LINEAR.spec("out")]: ...
