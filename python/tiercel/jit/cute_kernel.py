# SPDX-License-Identifier: Apache-2.0
"""Kernels of the CuTe DSL: compiled through the cache, launched like the precompiled ones."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercel import _C, cache
from tiercel.jit.dsl import description
from tiercel.jit.dsl.declaration import L2_PROMOTIONS, SWIZZLES, evaluate
from tiercel.jit.toolchain import CompileError

ARCH = "sm_90a"
_PACKAGE = "nvidia-cutlass-dsl"
_FAMILIES = Path(__file__).parent / "kernels"
_DSL = Path(__file__).parent / "dsl"


def enabled() -> bool:
    """True if TIERCEL_JIT=1 allows operators to compile kernels that the wheel lacks."""
    return os.environ.get("TIERCEL_JIT", "0").lower() not in ("", "0", "false", "no", "off")


@functools.cache
def dsl_version() -> str | None:
    """The installed DSL's version, without importing it."""
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


class CuteKernel:
    """A compiled function of the DSL with one launch; calling it launches it."""

    def __init__(self, data: bytes) -> None:
        self._about, image = description.unpack(data)
        about = self._about
        self.name: str = about["name"]
        self._parameters = about["parameters"]
        self._labels = tuple(parameter["name"] for parameter in self._parameters)
        layout = [tuple(place) for place in about["layout"]]
        smem = about["smem"]
        self._kernel = _C.JitKernel(image, about["symbol"], self.name, layout, smem)

    def __call__(self, boxes: Mapping[str, Sequence[int]] | None = None, **values: Any) -> None:
        """Launches on the tensors' device and PyTorch's current stream.

        Args:
            boxes: Other boxes than the declared ones, by tensor: smaller, for edges.
            **values: Tensors (None for a null pointer) and scalars by their declared names, also
                those that only the grid's expressions need.

        Raises:
            TypeError: One is missing, or is not a tensor, an int or a float where it has to be.
            ValueError: The copy engine cannot take a tensor, or devices differ.
            RuntimeError: The launch failed.
        """
        about = self._about
        scalars = {name: value for name, value in values.items() if isinstance(value, int)}
        try:
            arguments = tuple([self._argument(p, values, boxes or {}) for p in self._parameters])
            grid = tuple(evaluate(size, scalars) for size in about["grid"])
            cluster = tuple(evaluate(size, scalars) for size in about["cluster"])
        except (KeyError, NameError) as error:
            raise TypeError(f"{self.name}: a value is missing: {error}") from None
        more = (about["smem"], about["dependent"], self._labels, arguments)
        self._kernel.launch(grid, tuple(about["block"]), cluster, *more)

    def _argument(self, parameter: Any, values: Mapping[str, Any], boxes: Any) -> Any:
        name, kind = parameter["name"], parameter["kind"]
        value = values[name]
        if kind == "scalar":
            if not isinstance(value, int):
                raise TypeError(f"{self.name}: `{name}` must be an int, got {_type_of(value)}")
            return struct.pack("<i", value)
        if kind == "float":
            if not isinstance(value, (int, float)):
                raise TypeError(f"{self.name}: `{name}` must be a float, got {_type_of(value)}")
            return struct.pack("<f", value)
        if kind == "pointer":
            return bytes(8) if value is None else value
        swizzle = SWIZZLES.index(parameter["swizzle"])
        promotion = L2_PROMOTIONS.index(parameter["l2_promotion"])
        return value, tuple(boxes.get(name, parameter["box"])), swizzle, promotion


def _type_of(value: object) -> str:
    return type(value).__name__


def cute(function: Any, *, key: Sequence[object] = (), arch: str = ARCH) -> CuteKernel:
    """A kernel of the CuTe DSL, compiled once: later processes take it from the cache.

    The kernel's author imports the DSL, after setting ``CUTE_DSL_ARCH=sm_90a``. Launches go through
    Tiercel's launcher: any stream, captures, several GPUs, without the DSL's host code.

    Args:
        function: A :class:`tiercel.jit.dsl.declaration.Function`: what to compile and what its one
            launch looks like. See
            https://github.com/tiercel/tiercel/blob/main/docs/cute-dsl.md.
        key: Whatever else the code depends on, besides the kernel class's source file and its
            attributes.
        arch: The architecture to compile for.

    Raises:
        ValueError: The compiled kernel does not have the declared parameters or block.

    Example:
        >>> kernel = tiercel.jit.cute(declaration)
        >>> kernel(x=x, y=y, m=m, n=n)
    """
    from tiercel.jit.dsl.build import compile_function

    kernel = function.function
    attributes = sorted(f"{n}={_stable(v)}" for n, v in getattr(kernel, "__dict__", {}).items())
    fields = {
        "kind": "cute",
        "name": function.name,
        "source": cache.digest(Path(inspect.getfile(type(kernel)))),
        "attributes": attributes,
        "launches": [_stable(launch) for launch in function.launches],
        "arguments": [_stable(argument) for argument in function.arguments],
        "key": [_stable(one) for one in key],
        "arch": arch,
        "dsl": dsl_version(),
    }

    def build(path: Path) -> None:
        image = compile_function(function, arch).__cubin__
        path.write_bytes(description.pack(description.describe(function, image), image))

    return CuteKernel(cache.read_or_build(fields, build))


def _stable(value: object) -> str:
    """repr without addresses, so that the next process has the same key."""
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(f"tiercel.jit.cute: {text} is no part of a key; give it a repr")
    return text


_lock = threading.Lock()
_variants: dict[tuple[Any, ...], CuteKernel] = {}


def variant(family: str, main: str, **spec: Any) -> CuteKernel:
    """A variant of a family's own kernels that is not among the precompiled ones.

    Raises:
        NotImplementedError: TIERCEL_JIT is not set, or the DSL is not installed.
        CompileError: The DSL refused it.
    """
    at = (family, *sorted(spec.items()))
    found = _variants.get(at)
    if found is None:
        problem = why_not()
        if problem is not None:
            raise NotImplementedError(problem)
        with _lock:
            found = _variants.get(at)
            if found is None:
                found = _variants[at] = CuteKernel(_compiled(family, main, spec))
    return found


def why_not() -> str | None:
    """Why nothing is compiled here, or None."""
    if not enabled():
        return "it is not precompiled; TIERCEL_JIT=1 compiles it where nvidia-cutlass-dsl is"
    if dsl_version() is None:
        return "compiling it needs nvidia-cutlass-dsl: pip install 'tiercel[jit]'"
    return None


def _compiled(family: str, main: str, spec: Mapping[str, Any]) -> bytes:
    folder = _FAMILIES / family
    fields = {
        "kind": "cute family",
        "sources": [cache.digest(p) for p in sorted([*folder.glob("*.py"), *_DSL.glob("*.py")])],
        "main": main,
        "spec": dict(spec),
        "arch": ARCH,
        "dsl": dsl_version(),
    }

    def build(path: Path) -> None:
        import json

        # A process of its own: the DSL is slow to import, and wants its target before that.
        command = [sys.executable, str(_DSL / "worker.py"), str(folder), main, ARCH, str(path)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        env.pop("PYTHONSAFEPATH", None)
        text = json.dumps(dict(spec))
        result = subprocess.run(command, input=text, capture_output=True, text=True, env=env)
        if result.returncode:
            raise CompileError(f"the CuTe DSL failed for {family} {spec}:\n{result.stderr.strip()}")

    return cache.read_or_build(fields, build)
