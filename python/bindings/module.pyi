# SPDX-License-Identifier: Apache-2.0
# The types of the compiled module; private, the public functions are in tiercel.ops. This part has
# no table in python/bindings: tools/wheel/extension_stub.py appends the families' functions.
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypedDict

# Each is the dtype, the op's sizes, and by tokens the fields of a configuration.
_TunedProblems = Sequence[tuple[Any, ...]]

class _DriverInfo(TypedDict):
    ok: bool
    version: int
    message: str

def driver_info() -> _DriverInfo: ...
def device_capability(device: int) -> tuple[int, int]: ...
def claim_torch_ops() -> None: ...
def has_native(name: str, /) -> bool: ...
def native_ops() -> tuple[str, ...]: ...
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
    is_profiled: Callable[[], bool],
    /,
) -> None: ...
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
        absent: tuple[int, ...],
    ) -> None: ...
    def __call__(self, *args: Any) -> Any: ...
    def outputs(self, *args: Any) -> tuple[Any, ...] | None: ...

class EagerInto:
    def __init__(self, call: EagerCall, results: int, fallback: Callable[..., Any], /) -> None: ...
    def __call__(self, out: Any, *args: Any) -> Any: ...

class EagerFilled:
    def __init__(
        self,
        call: EagerCall,
        names: tuple[str, ...],
        defaults: tuple[Any, ...],
        outs: int,
        fallback: Callable[..., Any],
        /,
        *,
        stands_in: bool = False,
    ) -> None: ...
    def __call__(self, *args: Any, **named: Any) -> Any: ...

def set_overriding(value: bool, /) -> None: ...
def batch_invariant() -> bool: ...
def set_batch_invariant(on: bool, /) -> None: ...
def set_thread_batch_invariant(mode: int, /) -> int: ...
def _clear_exchange_cache() -> None: ...
def _stub() -> str: ...
