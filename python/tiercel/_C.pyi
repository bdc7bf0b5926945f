# SPDX-License-Identifier: Apache-2.0
# The types of the compiled module; private, the public functions are in tiercel.ops.
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypedDict

class _DriverInfo(TypedDict):
    ok: bool
    version: int
    message: str

class _TopkSoftmaxPlan(TypedDict):
    kernel: str
    rows_per_block: int
    lanes_per_row: int
    vector_bytes: int
    grid: int
    block: int

class _LinearActPlan(TypedDict):
    kernel: str
    tile_m: int
    tile_n: int
    pingpong: bool
    cluster: int
    splits: int
    grid: int
    block: int
    dynamic_smem: int

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

def driver_info() -> _DriverInfo: ...
def device_capability(device: int) -> tuple[int, int]: ...
def route(*tensors: Any) -> int: ...
def set_route_hooks(
    tensor: type,
    parameter: type,
    functorch_level: Callable[[], object],
    forward_ad: ModuleType,
    dispatch_modes: Callable[[], int],
    function_modes: Callable[[], int],
    tracing_state: Callable[[], object],
    is_grad_enabled: Callable[[], bool],
) -> None: ...
def fp8_quantize(x: Any, q: Any, scale: Any, partial: Any, granularity: int, /) -> None: ...
def fp8_quantize_plan(
    x: Any, q: Any, scale: Any, partial: Any, granularity: int, /
) -> _Fp8QuantizePlan: ...
def fp8_quantize_static(x: Any, scale: Any, q: Any, /) -> None: ...
def fp8_quantize_load(device: int, /) -> None: ...
def linear_act(x: Any, weight: Any, bias: Any, out: Any, activation: int, /) -> None: ...
def linear_act_plan(
    x: Any, weight: Any, bias: Any, out: Any, activation: int, /
) -> _LinearActPlan: ...
def linear_act_load(device: int, /) -> None: ...
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
def nvfp4_linear(x: Any, weight: Any, scale: Any, global_scale: Any, out: Any, /) -> None: ...
def nvfp4_linear_plan(
    x: Any, weight: Any, scale: Any, global_scale: Any, out: Any, /
) -> _Nvfp4LinearPlan: ...
def nvfp4_linear_load(device: int, /) -> None: ...
def nvfp4_quantize(x: Any, global_scale: Any, q: Any, scale: Any, /) -> None: ...
def nvfp4_quantize_plan(x: Any, global_scale: Any, q: Any, scale: Any, /) -> _Nvfp4Plan: ...
def nvfp4_quantize_load(device: int, /) -> None: ...
def topk_softmax(
    scores: Any, weights: Any, indices: Any, softmax_first: bool, renormalize: bool, /
) -> None: ...
def topk_softmax_plan(
    scores: Any, weights: Any, indices: Any, softmax_first: bool, renormalize: bool, /
) -> _TopkSoftmaxPlan: ...
def topk_softmax_load(device: int, /) -> None: ...
def _clear_exchange_cache() -> None: ...
