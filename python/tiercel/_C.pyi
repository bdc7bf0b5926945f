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

class _NormPlan(TypedDict):
    kernel: str
    vector_bytes: int
    threads_per_row: int
    cluster: int
    grid: int
    block: int
    dynamic_smem: int
    stages: int
    parts: int

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
def linear_act(x: Any, weight: Any, bias: Any, out: Any, activation: int, /) -> None: ...
def linear_act_plan(
    x: Any, weight: Any, bias: Any, out: Any, activation: int, /
) -> _LinearActPlan: ...
def linear_act_load(device: int, /) -> None: ...
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
    /,
) -> _NormPlan: ...
def norm_load(device: int, /) -> None: ...
def topk_softmax(
    scores: Any, weights: Any, indices: Any, softmax_first: bool, renormalize: bool, /
) -> None: ...
def topk_softmax_plan(
    scores: Any, weights: Any, indices: Any, softmax_first: bool, renormalize: bool, /
) -> _TopkSoftmaxPlan: ...
def topk_softmax_load(device: int, /) -> None: ...
def _clear_exchange_cache() -> None: ...
