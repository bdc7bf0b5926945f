# SPDX-License-Identifier: Apache-2.0
"""Compiles a declared function of the CuTe DSL; needs no GPU. CUTE_DSL_ARCH is set before this."""

from __future__ import annotations

from typing import Any


def compile_function(function: Any, arch: str, more_options: str = "") -> Any:
    """What cute.compile makes of a declaration.Function; ``__cubin__`` is its machine code."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    def example(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(example(one) for one in argument)
        if hasattr(argument, "dtype"):
            align = argument.align
            return make_ptr(argument.dtype, 0, cute.AddressSpace.gmem, assumed_align=align)
        if argument is None:
            return None
        return 1.0 if argument.floating else 1

    arguments = [example(argument) for argument in function.arguments]
    options = f"--gpu-arch {arch} --keep-cubin {more_options}".strip()
    return cute.compile(function.function, *arguments, make_fake_stream(), options=options)
