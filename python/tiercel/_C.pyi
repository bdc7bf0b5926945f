# SPDX-License-Identifier: Apache-2.0
# The types of the compiled module; private, the public functions are in tiercel.ops.
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypedDict

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

class _CopyTransposePlan(TypedDict):
    kernel: str
    tile_rows: int
    tile_columns: int
    vector_bytes: int
    grid_x: int
    grid_y: int
    block: int

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
def linear_act(x: Any, weight: Any, bias: Any, out: Any, activation: int, /) -> None: ...
def linear_act_plan(
    x: Any, weight: Any, bias: Any, out: Any, activation: int, /
) -> _LinearActPlan: ...
def linear_act_load(device: int, /) -> None: ...
def topk_softmax(
    scores: Any, weights: Any, indices: Any, softmax_first: bool, renormalize: bool, /
) -> None: ...
def topk_softmax_plan(
    scores: Any, weights: Any, indices: Any, softmax_first: bool, renormalize: bool, /
) -> _TopkSoftmaxPlan: ...
def topk_softmax_load(device: int, /) -> None: ...
def _clear_exchange_cache() -> None: ...
