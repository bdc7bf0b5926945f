# SPDX-License-Identifier: Apache-2.0
# The types of the compiled module; private, the public functions are in tiercel.ops.
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypedDict

# dtype, the op's sizes, and by tokens the fields of a configuration
_TunedProblem = tuple[Any, ...]

class _DriverInfo(TypedDict):
    ok: bool
    version: int
    message: str

class _ActivationPlan(TypedDict):
    kernel: str
    rows: int
    columns: int
    aligned: bool
    grid: int
    block: int

class _SoftmaxPlan(TypedDict):
    kernel: str
    threads_per_row: int
    blocks_per_row: int
    vectors: bool
    grid: int
    block: int

class _TopkSoftmaxPlan(TypedDict):
    kernel: str
    rows_per_block: int
    lanes_per_row: int
    vector_bytes: int
    grid: int
    block: int

class _MoeMlpPlan(TypedDict):
    kernel: str
    tile_m: int
    tile_n: int
    cluster: int
    tiles: int
    grid: int
    block: int
    dynamic_smem: int

class _FewTokensPlan(TypedDict):
    kernel: str
    slots: int
    slot_bytes: int
    grid: int
    block: int
    dynamic_smem: int

class _MoeAlignPlan(TypedDict):
    kernel: str
    items: int
    cluster: int
    grid: int
    block: int
    dynamic_smem: int
    launches: int

class _MoeSumPlan(TypedDict):
    kernel: str
    vector_bytes: int
    grid: tuple[int, int]
    block: tuple[int, int]

class _TopkAlignPlan(TypedDict):
    kernel: str
    cluster: int
    block: int
    dynamic_smem: int

class _AttentionPlan(TypedDict):
    kernel: str
    tile_m: int
    tile_n: int
    band: int
    grid: int
    block: int
    dynamic_smem: int

class _AttentionFp8Plan(_AttentionPlan):
    workspace: int

class _AttentionBackwardPlan(TypedDict):
    kernel: str
    tile_m: int
    tile_n: int
    band: int
    descending: bool
    grid: int
    block: int
    dynamic_smem: int
    workspace: int

class _DecodePlan(TypedDict):
    kernel: str
    combine: str
    rows: int
    step: int
    cluster: int
    grid: int
    block: int
    workspace: int

class _MergePlan(TypedDict):
    kernel: str
    grid: int
    block: int

class _LinearActPlan(TypedDict):
    kernel: str
    tile_m: int
    tile_n: int
    pingpong: bool
    cluster: int
    splits: int
    group: int
    rows: int
    grid: int
    block: int
    dynamic_smem: int

class _NormPlan(TypedDict):
    kernel: str
    vector_bytes: int
    threads_per_row: int
    cluster: int
    grid: int
    block: int
    dynamic_smem: int
    stages: int
    ahead: int
    parts: int

class _Fp8QuantizePlan(TypedDict):
    kernel: str
    launches: int
    vectors: int
    grid: int
    block: int

class _Nvfp4Plan(TypedDict):
    kernel: str
    grid: int
    block: int

class _Nvfp4GemvPlan(TypedDict):
    kernel: str
    rows_per_block: int
    parts: int
    grid: int
    block: int
    dynamic_smem: int

class _Nvfp4LinearPlan(TypedDict):
    kernel: str
    cluster: int
    parts: int
    grid: int
    block: int
    dynamic_smem: int

class _CopyTransposePlan(TypedDict):
    kernel: str
    tile_rows: int
    tile_columns: int
    vector_bytes: int
    grid: int
    block: int

class _ReducePlan(TypedDict):
    kernel: str
    second: str
    vector_bytes: int
    parts: int
    cluster: int
    grid: int
    block: int
    workspace: int

class _RotaryPlan(TypedDict):
    kernel: str
    vector_bytes: int
    grid: int
    block: int

def driver_info() -> _DriverInfo: ...
def device_capability(device: int) -> tuple[int, int]: ...
def route(*tensors: Any) -> int: ...
def set_route_hooks(
    tensor: type,
    parameter: type,
    transforms: Callable[[], bool],
    forward_ad: ModuleType,
    dispatch_modes: Callable[[], int],
    function_modes: Callable[[], int],
    is_tracing: Callable[[], bool],
    is_grad_enabled: Callable[[], bool],
    /,
) -> None: ...
def fp8_quantize(x: Any, q: Any, scale: Any, partial: Any, granularity: int, /) -> None: ...
def fp8_quantize_plan(
    x: Any, q: Any, scale: Any, partial: Any, granularity: int, /
) -> _Fp8QuantizePlan: ...
def fp8_quantize_between(
    x: Any,
    q: Any,
    scale: Any,
    counters: Any,
    granularity: int,
    x_is_older: bool,
    starts_next: bool,
    /,
) -> None: ...
def fp8_quantize_static(x: Any, scale: Any, q: Any, /) -> None: ...
def fp8_quantize_load(device: int, /) -> None: ...
def activation(x: Any, up: Any, scale: Any, out: Any, function: int, gated: bool, /) -> None: ...
def activation_plan(
    x: Any, up: Any, scale: Any, out: Any, function: int, gated: bool, /
) -> _ActivationPlan: ...
def activation_backward(
    grad: Any, x: Any, up: Any, x_grad: Any, up_grad: Any, function: int, gated: bool, /
) -> None: ...
def activation_backward_plan(
    grad: Any, x: Any, up: Any, x_grad: Any, up_grad: Any, function: int, gated: bool, /
) -> _ActivationPlan: ...
def activation_load(device: int, function: int, gated: bool, /) -> None: ...
def copy_transpose(x: Any, out: Any, tile_size: int, /) -> None: ...
def copy_transpose_plan(x: Any, out: Any, tile_size: int, /) -> _CopyTransposePlan: ...
def copy_transpose_load(device: int, /) -> None: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    /,
) -> None: ...
def attention_plan(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    /,
) -> _AttentionPlan: ...
def attention_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    grad_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    workspace: Any,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    deterministic: bool,
    /,
) -> None: ...
def attention_backward_plan(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    grad_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    workspace: Any,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    deterministic: bool,
    /,
) -> _AttentionBackwardPlan: ...
def attention_backward_load(device: int, /) -> None: ...
def attention_fp8(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    workspace: Any,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    /,
) -> None: ...
def attention_fp8_plan(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    workspace: Any,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    /,
) -> _AttentionFp8Plan: ...
def attention_fp8_load(device: int, /) -> None: ...
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    out: Any,
    lse: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    /,
) -> None: ...
def attention_varlen_fp8(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    workspace: Any,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    /,
) -> None: ...
def attention_varlen_fp8_plan(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    workspace: Any,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    /,
) -> _AttentionFp8Plan: ...
def attention_varlen_plan(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    out: Any,
    lse: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    /,
) -> _AttentionPlan: ...
def attention_load(device: int, /) -> None: ...
def decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    seqused_k: Any,
    out: Any,
    prefix: Any,
    k_scale: Any,
    v_scale: Any,
    lse: Any,
    workspace: Any,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    max_keys: int,
    split: int,
    /,
) -> int: ...
def decode_attention_plan(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    seqused_k: Any,
    out: Any,
    prefix: Any,
    k_scale: Any,
    v_scale: Any,
    lse: Any,
    workspace: Any,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    max_keys: int,
    split: int,
    /,
) -> _DecodePlan: ...
def decode_attention_load(device: int, /) -> None: ...
def decode_attention_new(*args: Any) -> Any: ...
def decode_attention_new_lse(*args: Any) -> tuple[Any, Any]: ...
def decode_attention_out(*args: Any) -> None: ...
def decode_attention_out_lse(*args: Any) -> None: ...
def merge_attention_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any, /
) -> None: ...
def merge_attention_states_plan(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any, /
) -> _MergePlan: ...
def merge_attention_states_load(device: int, /) -> None: ...
def set_allocation_hooks(
    empty: Callable[..., Any],
    on_current_gpu: Callable[..., Any] | None,
    current_gpu: Callable[[], int] | None,
    float32: Any,
    /,
) -> None: ...
def empty(like: Any, sizes: tuple[int, ...], dtype: Any, /) -> Any: ...
def demangle(symbol: str) -> str: ...

class JitKernel:
    def __init__(
        self,
        image: bytes,
        symbol: str,
        name: str,
        parameters: list[tuple[int, int]],
        max_dynamic_smem: int,
    ) -> None: ...
    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        dynamic_smem: int,
        dependent: bool,
        labels: tuple[str, ...],
        arguments: tuple[Any, ...],
    ) -> None: ...
    def load(self, device: int) -> None: ...

class EagerCall:
    run: Callable[..., Any]
    native: Callable[..., Any] | None
    def __init__(
        self,
        *,
        count: int,
        tensors: tuple[int, ...],
        mutated: tuple[int, ...],
        ready: set[int],
        run: Callable[..., Any],
        recover: Callable[..., Any],
        fallback: Callable[..., Any],
        increment_version: Callable[..., Any],
        native: Callable[..., Any] | None,
        slots: tuple[tuple[str, Any], ...],
        outputs: tuple[Any, ...],
        contiguous: tuple[int, ...],
        ranks: tuple[tuple[int, int], ...],
        equals: tuple[tuple[int, int, int], ...],
        returns: bool,
    ) -> None: ...
    def __call__(self, *args: Any) -> Any: ...

def set_overriding(value: bool, /) -> None: ...
def linear_act(
    x: Any, weight: Any, bias: Any, out: Any, activation: int, config: tuple[int, ...] = ..., /
) -> None: ...
def linear_act_plan(
    x: Any, weight: Any, bias: Any, out: Any, activation: int, config: tuple[int, ...] = ..., /
) -> _LinearActPlan: ...
def linear_act_extra(
    x: Any, weight: Any, bias: Any, residual: Any, out: Any, sums: Any, activation: int, /
) -> None: ...
def linear_act_extra_plan(
    x: Any, weight: Any, bias: Any, residual: Any, out: Any, sums: Any, activation: int, /
) -> _LinearActPlan: ...
def gated_linear(x: Any, weight: Any, bias: Any, out: Any, activation: int, /) -> None: ...
def gated_linear_plan(
    x: Any, weight: Any, bias: Any, out: Any, activation: int, /
) -> _LinearActPlan: ...
def fp8_linear(
    x: Any, weight: Any, x_scale: Any, weight_scale: Any, bias: Any, out: Any, activation: int, /
) -> None: ...
def fp8_linear_plan(
    x: Any, weight: Any, x_scale: Any, weight_scale: Any, bias: Any, out: Any, activation: int, /
) -> _LinearActPlan: ...
def linear_act_grad(grad: Any, other: Any, out: Any, of_weight: bool, /) -> None: ...
def linear_act_grad_plan(grad: Any, other: Any, out: Any, of_weight: bool, /) -> _LinearActPlan: ...
def linear_act_tuned(device: int, problems: Sequence[_TunedProblem], /) -> None: ...
def linear_act_load(device: int, /) -> None: ...
def moe_up(
    x: Any,
    w: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    weights: Any,
    out: Any,
    block_size: int,
    activation: int,
    topk_ids: Any,
    experts: int,
    x_scale: Any,
    w_scale: Any,
    config: tuple[int, int] | None = ...,
    out_scale: Any = ...,
    /,
) -> None: ...
def moe_up_plan(
    x: Any,
    w: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    weights: Any,
    out: Any,
    block_size: int,
    activation: int,
    topk_ids: Any,
    experts: int,
    x_scale: Any,
    w_scale: Any,
    config: tuple[int, int] | None = ...,
    out_scale: Any = ...,
    /,
) -> _MoeMlpPlan: ...
def moe_down(
    x: Any,
    w: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    weights: Any,
    out: Any,
    block_size: int,
    activation: int,
    topk_ids: Any,
    experts: int,
    x_scale: Any,
    w_scale: Any,
    config: tuple[int, int] | None = ...,
    out_scale: Any = ...,
    /,
) -> None: ...
def moe_down_plan(
    x: Any,
    w: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    weights: Any,
    out: Any,
    block_size: int,
    activation: int,
    topk_ids: Any,
    experts: int,
    x_scale: Any,
    w_scale: Any,
    config: tuple[int, int] | None = ...,
    out_scale: Any = ...,
    /,
) -> _MoeMlpPlan: ...
def fused_moe_few_tokens(
    x: Any,
    w_up: Any,
    w_down: Any,
    w_up_scale: Any,
    w_down_scale: Any,
    topk_weights: Any,
    topk_ids: Any,
    out: Any,
    activation: int,
    /,
) -> None: ...
def fused_moe_few_tokens_plan(
    x: Any,
    w_up: Any,
    w_down: Any,
    w_up_scale: Any,
    w_down_scale: Any,
    topk_weights: Any,
    topk_ids: Any,
    out: Any,
    activation: int,
    /,
) -> _FewTokensPlan: ...
def moe_load(device: int, /) -> None: ...
def fused_moe_tuned(device: int, problems: Sequence[_TunedProblem], /) -> None: ...
def fused_moe_config(
    device: int, problem: tuple[Any, ...], tokens: int, /
) -> tuple[int, int, int, int, int] | None: ...
def grouped_gemm(a: Any, b: Any, offsets: Any, out: Any, kind: int, /) -> None: ...
def grouped_gemm_plan(a: Any, b: Any, offsets: Any, out: Any, kind: int, /) -> dict[str, Any]: ...
def grouped_gemm_load(device: int, /) -> None: ...
def layer_norm(
    x: Any, weight: Any, bias: Any, residual: Any, out: Any, residual_out: Any, eps: float, /
) -> None: ...
def layer_norm_plan(
    x: Any, weight: Any, bias: Any, residual: Any, out: Any, residual_out: Any, eps: float, /
) -> _NormPlan: ...
def layer_norm_backward(
    x: Any,
    weight: Any,
    grad: Any,
    grad_residual: Any,
    grad_x: Any,
    grad_weight: Any,
    grad_bias: Any,
    workspace: Any,
    eps: float,
    config: tuple[int, ...] = ...,
    /,
) -> None: ...
def layer_norm_backward_plan(
    x: Any,
    weight: Any,
    grad: Any,
    grad_residual: Any,
    grad_x: Any,
    grad_weight: Any,
    grad_bias: Any,
    workspace: Any,
    eps: float,
    multiprocessors: int = ...,
    memory_gbps: int = ...,
    config: tuple[int, ...] = ...,
    /,
) -> _NormPlan: ...
def rms_norm(
    x: Any, weight: Any, bias: Any, residual: Any, out: Any, residual_out: Any, eps: float, /
) -> None: ...
def rms_norm_plan(
    x: Any, weight: Any, bias: Any, residual: Any, out: Any, residual_out: Any, eps: float, /
) -> _NormPlan: ...
def rms_norm_backward(
    x: Any,
    weight: Any,
    grad: Any,
    grad_residual: Any,
    grad_x: Any,
    grad_weight: Any,
    grad_bias: Any,
    workspace: Any,
    eps: float,
    config: tuple[int, ...] = ...,
    /,
) -> None: ...
def rms_norm_backward_plan(
    x: Any,
    weight: Any,
    grad: Any,
    grad_residual: Any,
    grad_x: Any,
    grad_weight: Any,
    grad_bias: Any,
    workspace: Any,
    eps: float,
    multiprocessors: int = ...,
    memory_gbps: int = ...,
    config: tuple[int, ...] = ...,
    /,
) -> _NormPlan: ...
def norm_load(device: int, /) -> None: ...
def layer_norm_backward_tuned(device: int, problems: Sequence[_TunedProblem], /) -> None: ...
def rms_norm_backward_tuned(device: int, problems: Sequence[_TunedProblem], /) -> None: ...
def norm_backward_ranges(
    memory_gbps_below: int,
    rows_per_multiprocessor: int,
    megabytes: int,
    tables: Sequence[tuple[bool, str, list[list[Any]]]] | None,
    /,
) -> None: ...
def nvfp4_dequantize(q: Any, scale: Any, global_scale: Any, out: Any, /) -> None: ...
def nvfp4_dequantize_plan(q: Any, scale: Any, global_scale: Any, out: Any, /) -> _Nvfp4Plan: ...
def nvfp4_dequantize_load(device: int, /) -> None: ...
def nvfp4_gemv(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    scale_a_permuted: Any,
    scale_b_permuted: Any,
    c: Any,
    /,
) -> None: ...
def nvfp4_gemv_plan(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    scale_a_permuted: Any,
    scale_b_permuted: Any,
    c: Any,
    /,
) -> _Nvfp4GemvPlan: ...
def nvfp4_gemv_load(device: int, /) -> None: ...
def nvfp4_linear(
    x: Any, weight: Any, scale: Any, global_scale: Any, out: Any, config: tuple[int, ...] = ..., /
) -> None: ...
def nvfp4_linear_plan(
    x: Any, weight: Any, scale: Any, global_scale: Any, out: Any, config: tuple[int, ...] = ..., /
) -> _Nvfp4LinearPlan: ...
def nvfp4_linear_tuned(device: int, problems: Sequence[_TunedProblem], /) -> None: ...
def nvfp4_linear_load(device: int, /) -> None: ...
def nvfp4_quantize(x: Any, global_scale: Any, q: Any, scale: Any, /) -> None: ...
def nvfp4_quantize_plan(x: Any, global_scale: Any, q: Any, scale: Any, /) -> _Nvfp4Plan: ...
def nvfp4_quantize_load(device: int, /) -> None: ...
def moe_align_block_size(
    topk_ids: Any,
    expert_map: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    workspace: Any,
    block_size: int,
    num_experts: int,
    ignore_invalid_experts: bool,
    /,
) -> None: ...
def moe_align_block_size_plan(
    topk_ids: Any,
    expert_map: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    workspace: Any,
    block_size: int,
    num_experts: int,
    ignore_invalid_experts: bool,
    /,
) -> _MoeAlignPlan: ...
def moe_align_block_size_workspace(numel: int, num_experts: int, /) -> int: ...
def moe_align_block_size_load(device: int, /) -> None: ...
def moe_sum(x: Any, weights: Any, out: Any, /) -> None: ...
def moe_sum_plan(x: Any, weights: Any, out: Any, /) -> _MoeSumPlan: ...
def moe_sum_load(device: int, /) -> None: ...
def softmax(x: Any, mask: Any, out: Any, scale: float | None, log: bool, /) -> None: ...
def softmax_plan(
    x: Any, mask: Any, out: Any, scale: float | None, log: bool, /
) -> _SoftmaxPlan: ...
def softmax_backward(
    grad: Any, y: Any, mask: Any, x_grad: Any, scale: float | None, log: bool, /
) -> None: ...
def softmax_backward_plan(
    grad: Any, y: Any, mask: Any, x_grad: Any, scale: float | None, log: bool, /
) -> _SoftmaxPlan: ...
def softmax_load(device: int, /) -> None: ...
def reduce(x: Any, out: Any, workspace: Any, dim: int, op: int, /) -> int: ...
def reduce_plan(x: Any, out: Any, workspace: Any, dim: int, op: int, /) -> _ReducePlan: ...
def reduce_load(device: int, /) -> None: ...
def rotary_embedding(
    positions: Any,
    q: Any,
    k: Any,
    cos_sin_cache: Any,
    q_out: Any,
    k_out: Any,
    interleaved: bool,
    /,
) -> None: ...
def rotary_embedding_plan(
    positions: Any,
    q: Any,
    k: Any,
    cos_sin_cache: Any,
    q_out: Any,
    k_out: Any,
    interleaved: bool,
    /,
) -> _RotaryPlan: ...
def rotary_embedding_load(device: int, /) -> None: ...
def kv_cache_write(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    key_scale: Any,
    value_scale: Any,
    /,
) -> None: ...
def kv_cache_write_plan(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    key_scale: Any,
    value_scale: Any,
    /,
) -> _RotaryPlan: ...
def kv_cache_write_load(device: int, /) -> None: ...
def topk_softmax(
    scores: Any, weights: Any, indices: Any, softmax_first: bool, renormalize: bool, /
) -> None: ...
def topk_softmax_plan(
    scores: Any, weights: Any, indices: Any, softmax_first: bool, renormalize: bool, /
) -> _TopkSoftmaxPlan: ...
def topk_softmax_load(device: int, /) -> None: ...
def topk_softmax_align(
    scores: Any,
    weights: Any,
    indices: Any,
    expert_map: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    block_size: int,
    softmax_first: bool,
    renormalize: bool,
    ignore_invalid_experts: bool,
    /,
) -> None: ...
def topk_softmax_align_plan(
    scores: Any,
    weights: Any,
    indices: Any,
    expert_map: Any,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    block_size: int,
    softmax_first: bool,
    renormalize: bool,
    ignore_invalid_experts: bool,
    /,
) -> _TopkAlignPlan: ...
def topk_softmax_align_load(device: int, /) -> None: ...
def _clear_exchange_cache() -> None: ...
