# SPDX-License-Identifier: Apache-2.0
"""The checks of the sinks' gradients and their launch: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C


def arguments(make, shape=(2, 300, 8, 64), dtype="bfloat16", **given):
    batch, rows, heads, _ = shape
    sums = (batch, heads, rows)
    shapes = {"grad": shape, "out": shape, "lse": sums, "grad_lse": sums}
    shapes |= {"sinks": (heads,), "dsinks": (heads,)}

    def tensor(name, size):
        return make(*size, dtype=dtype if name in ("grad", "out") else "float32")

    return [given[name] if name in given else tensor(name, size) for name, size in shapes.items()]


def plan(make, *shape, **given):
    return _C.attention_sinks_backward_plan(*arguments(make, *shape, **given), None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_of_the_rows(make, dtype):
    kernel = {"bfloat16": "BFloat16", "float16": "Float16"}[dtype]
    for batch, rows, parts in ((1, 1, 1), (2, 256, 1), (1, 513, 2), (4, 4096, 32), (9, 10**6, 64)):
        got = plan(make, (batch, rows, 8, 64), dtype=dtype)
        assert got["kernel"] == f"attention_sinks_backward<{kernel}>"
        assert got["parts"] == parts and got["grid"] == got["workspace"] == 8 * parts
    assert plan(make, grad_lse=None) == plan(make)


def test_nothing_to_launch(make):
    assert plan(make, (2, 5, 0, 64))["kernel"] == "none"
    assert plan(make, (0, 5, 2, 64))["grid"] == 2  # the sums of nothing


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (
            TypeError,
            "`grad` must have dtype bfloat16 or float16",
            {"grad": ((2, 300, 8, 64), "float32")},
        ),
        (ValueError, "`grad` must have 4 dimensions, got 3", {"grad": ((300, 8, 64), "bfloat16")}),
        (
            TypeError,
            "`out` must have dtype bfloat16, got float16",
            {"out": ((2, 300, 8, 64), "float16")},
        ),
        (
            ValueError,
            r"`out` must have shape \[B, S, H, D\]",
            {"out": ((2, 300, 8, 8), "bfloat16")},
        ),
        (ValueError, r"`lse` must have shape \[B, H, S\]", {"lse": ((2, 300, 8), "float32")}),
        (TypeError, "`grad_lse` must have dtype float32", {"grad_lse": ((2, 8, 300), "float16")}),
        (ValueError, r"`sinks` must have shape \[H\] = \[8\]", {"sinks": ((7,), "float32")}),
        (TypeError, "`sinks` must have dtype float32", {"sinks": ((8,), "bfloat16")}),
        (ValueError, r"`dsinks` must have shape \[H\] = \[8\]", {"dsinks": ((1, 8), "float32")}),
    ],
)
def test_bad_arguments(make, error, text, changes):
    given = {name: make(*shape, dtype=dtype) for name, (shape, dtype) in changes.items()}
    with pytest.raises(error, match=f"^attention_sinks_backward: {text}"):
        plan(make, **given)


@pytest.mark.parametrize(
    ("text", "shape", "given"),
    [
        ("`grad` must have a head dimension that is a multiple of 8", (2, 300, 8, 60), {}),
        ("`grad` must have a head dimension .* up to 256, got 264", (2, 300, 8, 264), {}),
        ("`grad` must have fewer than 2\\^30 rows of a head", (2**15, 2**15, 1, 8), {}),
        (
            "`out` must have rows that start at multiples of 16 bytes",
            (2, 300, 8, 64),
            {"out": ExchangeTensor(2, 300, 8, 64, dtype="bfloat16", address=ADDRESS + 8)},
        ),
        (
            "`grad` must have rows that start at multiples of 16 bytes",
            (2, 300, 8, 64),
            {
                "grad": ExchangeTensor(
                    2, 300, 8, 64, dtype="bfloat16", strides=(300 * 528, 528, 66, 1)
                )
            },
        ),
    ],
)
def test_what_there_is_no_kernel_for(make, text, shape, given):
    with pytest.raises(NotImplementedError, match=f"^attention_sinks_backward: {text}"):
        plan(make, shape, **given)


def test_a_workspace_is_asked_for(make):
    with pytest.raises(TypeError, match="`workspace` must be a tensor, got None"):
        _C.attention_sinks_backward(*arguments(make), None)
