# SPDX-License-Identifier: Apache-2.0
"""Our own backends as implementations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tiercel.workbench.bench.launch import Impl, Launch
from tiercel.workbench.bench.ops import OpBench


def impls(bench: OpBench, backends: Sequence[str]) -> list[Impl]:
    """``tiercel`` is the sm90 backend; the others are ``tiercel:NAME``. Of these,
    ``invariant`` is sm90 in the batch-invariant mode."""
    import tiercel
    from tiercel.ops import _register  # noqa: F401  (a gradient's operator may be asked for first)

    names = {b: "tiercel" if b == "sm90" else f"tiercel:{b}" for b in backends}
    return [
        Impl(name, tiercel.__version__, _preparer(bench, backend), ours=True)
        for backend, name in names.items()
    ]


def _in_the_mode(prepare: Callable[..., Launch]) -> Callable[..., Launch]:
    """The launch that `prepare` makes, launched and captured in the batch-invariant mode."""
    import tiercel

    def within(call: Callable[[], Any]) -> Callable[[], Any]:
        def called() -> Any:
            with tiercel.batch_invariant():
                return call()

        return called

    def prepared(case: Any, inputs: dict[str, Any]) -> Launch:
        launch = within(lambda: prepare(case, inputs))()
        host = launch.host and within(launch.host)
        changed: Launch = dataclasses.replace(launch, run=within(launch.run), host=host)
        return changed

    return prepared


def _preparer(bench: OpBench, backend: str) -> Any:
    import tiercel

    if backend == "invariant":
        return _in_the_mode(_preparer(bench, "sm90"))
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
