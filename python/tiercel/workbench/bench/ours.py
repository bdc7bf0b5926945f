# SPDX-License-Identifier: Apache-2.0
"""Our own backends as implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.workbench.bench.launch import Impl, Launch
from tiercel.workbench.bench.ops import OpBench


def impls(bench: OpBench, backends: Sequence[str]) -> list[Impl]:
    """``tiercel`` is the sm90 backend; the others are ``tiercel:NAME``."""
    import tiercel
    from tiercel.ops import _register  # noqa: F401  (a gradient's operator may be asked for first)

    names = {b: "tiercel" if b == "sm90" else f"tiercel:{b}" for b in backends}
    return [
        Impl(name, tiercel.__version__, _preparer(bench, backend), ours=True)
        for backend, name in names.items()
    ]


def _preparer(bench: OpBench, backend: str) -> Any:
    import tiercel

    if bench.ours is not None:
        made = bench.ours
        return lambda case, inputs: made(case, inputs, backend)
    function = getattr(tiercel, bench.op)

    def prepare(case: Any, inputs: dict[str, Any]) -> Launch:
        args, options = bench.call(case, inputs)
        # A backend that was asked for and does not apply is an error: ref never stands in.
        explanation = tiercel.explain(bench.op, *args, **options, backend=backend)
        if explanation.backend != backend:
            raise RuntimeError(f"runs on {explanation.backend}: {explanation.reason}")
        default = tiercel.explain(bench.op, *args, **options).backend == backend
        as_written = options if default else {**options, "backend": backend}
        out = bench.out(case, inputs)

        def into_out() -> Any:
            return _as_tuple(function(*args, **options, out=out, backend=backend))

        def allocating() -> Any:
            return _as_tuple(function(*args, **options, backend=backend))

        return Launch(
            run=allocating if out is None else into_out,
            host=lambda: function(*args, **as_written),
            strict=True,
            details={"kernel": explanation.configuration.get("kernel", explanation.backend)},
        )

    return prepare


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
