# SPDX-License-Identifier: Apache-2.0
"""The activations' checks and their choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

SILU, GELU, GELU_TANH, RELU = range(4)


def plan(make, *shape, dtype="bfloat16", form="packed", function=SILU, **x):
    columns = shape[-1] // 2 if form == "packed" else shape[-1]
    inputs = make(*shape, dtype=dtype, **x)
    up = make(*shape, dtype=dtype) if form == "pair" else None
    out = make(*shape[:-1], columns, dtype=dtype)
    return _C.activation_plan(inputs, up, None, out, function, form != "plain")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("function", range(4))
@pytest.mark.parametrize("form", ["plain", "packed", "pair"])
def test_kernels_are_the_ones_asked_for(dtype, function, form):
    names = ["Silu", "Gelu", "GeluTanh", "Relu"]
    types = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16"}
    gated = "false" if form == "plain" else "true"
    for rows in (1, 10_000):
        kernel = plan(ExchangeTensor, rows, 4096, dtype=dtype, form=form, function=function)[
            "kernel"
        ]
        start = (
            f"activation_forward<{names[function]}, {types[dtype]}, {types[dtype]}, gated={gated}"
        )
        assert kernel.startswith(start)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 1000, 8192, 100_003])
@pytest.mark.parametrize("columns", [1, 2, 8, 77, 1000, 4096, 11_008])
def test_every_size_has_a_plan_that_covers_it(rows, columns):
    for form in ("plain", "packed", "pair"):
        got = plan(ExchangeTensor, rows, 2 * columns, form=form)
        # Unaligned rows may have part of one more.
        before = 7 if form != "plain" and not got["aligned"] else 0
        vectors = got["rows"] * -(-(got["columns"] + before) // 8)
        few = vectors <= 132 * 2048
        of_block = got["block"] * (2 if form == "plain" and not few else 1)
        assert 0 <= got["grid"] * of_block - vectors < of_block
        assert got["rows"] * got["columns"] == rows * columns * (1 if form == "packed" else 2)
        assert got["rows"] == (rows if form == "packed" else 1) or rows == 1


def test_rows(make):
    assert plan(make, 4, 5, 32)["rows"] == 20
    assert plan(make, 4, 5, 32, form="pair")["rows"] == 1  # contiguous: one long row
    assert plan(make, 4, 32, form="plain", strides=(64, 1))["rows"] == 4
    assert plan(make, 4, 32)["aligned"] is True
    assert plan(make, 4, 34)["aligned"] is False  # the factor starts off 16 bytes
    assert plan(make, 4, 32, address=ADDRESS + 2)["aligned"] is False
    assert plan(make, 4, 32, strides=(33, 1))["aligned"] is False
    with pytest.raises(NotImplementedError, match="^silu_and_mul: `x` must have rows at one dist"):
        plan(make, 4, 5, 32, strides=(200, 33, 1))
    with pytest.raises(NotImplementedError, match="^silu_and_mul: `x` must be contiguous in its l"):
        plan(make, 4, 32, strides=(64, 2))


def test_empty_launches_nothing(make):
    for shape in ((0, 32), (4, 0), (0, 3, 8), (3, 0, 8)):
        got = plan(make, *shape, address=0)
        assert (got["kernel"], got["grid"]) == ("none", 0)


def call(make, x=None, up=None, scale=None, out=None, function=SILU, gated=True):
    bf16 = {"dtype": "bfloat16"}
    return _C.activation_plan(
        make(4, 16, **bf16) if x is None else x,
        up,
        scale,
        make(4, 8 if gated and up is None else 16, **bf16) if out is None else out,
        function,
        gated,
    )


@pytest.mark.parametrize(
    ("error", "text", "tensors"),
    [
        (
            TypeError,
            "`x` must have dtype float32, bfloat16 or float16, got",
            {"x": ((4, 16), "int8")},
        ),
        (TypeError, "`up` must have dtype bfloat16, got float32", {"up": ((4, 16), "float32")}),
        (TypeError, "`out` must have dtype bfloat16, got float32", {"out": ((4, 8), "float32")}),
        (
            ValueError,
            r"`x` must have an even last dimension \[\.\.\., 2N\] .*, got \[4, 15\]",
            {"x": ((4, 15), "bfloat16")},
        ),
        (
            ValueError,
            r"`up` must have shape that of `x` = \[4, 16\], got \[4, 8\]",
            {"up": ((4, 8), "bfloat16")},
        ),
        (
            ValueError,
            r"`out` must have shape \[\.\.\., N\] = \[4, 8\], got \[4, 16\]",
            {"out": ((4, 16), "bfloat16")},
        ),
    ],
)
def test_bad_arguments(make, error, text, tensors):
    made = {name: make(*shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}
    with pytest.raises(error, match=f"^silu_and_mul: {text}"):
        call(make, **made)


def test_float8_needs_a_scale_of_one_element(make):
    scale = make(2, dtype="float32")
    with pytest.raises(TypeError, match="`out` must have dtype float8_e4m3fn, got bfloat16"):
        call(make, scale=make(1, dtype="float32"))
    with pytest.raises(TypeError, match="`out` must have dtype float8_e4m3fn"):
        call(make, scale=scale)


def test_devices(make):
    with pytest.raises(ValueError, match="^silu_and_mul: `x` must be a CUDA tensor, got a CPU"):
        call(make, x=make(4, 16, dtype="bfloat16", device="cpu"))
    with pytest.raises(ValueError, match="`out` must be on the device of `x`"):
        call(make, out=make(4, 8, dtype="bfloat16", device="cuda:1"))


def test_names_in_messages(make):
    for function, gated, name in (
        (GELU, True, "gelu_and_mul"),
        (GELU_TANH, False, "gelu"),
        (RELU, True, "relu_and_mul"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: `x`"):
            call(make, x=make(4, 16, dtype="int32"), function=function, gated=gated)
    with pytest.raises(ValueError, match="no function has the index 4"):
        call(make, function=4)


def test_backward(make):
    def backward(x, up, pair=False, grad=(4, 16), out=None):
        tensors = [make(*shape, dtype="bfloat16") for shape in (grad, x)]
        other = make(*up, dtype="bfloat16") if pair else None
        up_grad = make(*up, dtype="bfloat16") if pair else None
        x_grad = make(*x, dtype="bfloat16")
        made = None if out is None else make(*out, dtype="bfloat16")
        return _C.activation_backward_plan(*tensors, other, x_grad, up_grad, made, SILU, True)

    assert backward((4, 32), None)["kernel"].startswith(
        "activation_backward<Silu, BFloat16, gated=t"
    )
    assert backward((4, 16), (4, 16), True)["rows"] == 1
    with pytest.raises(ValueError, match=r"`grad` must have shape \[\.\.\., N\] = \[4, 16\]"):
        backward((4, 32), None, grad=(4, 32))
    assert backward((4, 16), (4, 16), True, out=(4, 16))["rows"] == 1
    with pytest.raises(ValueError, match=r"`out` must have shape \[\.\.\., N\] = \[4, 16\]"):
        backward((4, 32), None, out=(4, 32))
