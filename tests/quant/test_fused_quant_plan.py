# SPDX-License-Identifier: Apache-2.0
"""The checks and the choice of kernel of rms_norm_quant, layer_norm_quant and act_and_mul_quant:
without PyTorch and without a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

TENSOR, ROW, GROUP, BLOCK = range(4)
E4M3 = "float8_e4m3fn"
SHAPES = [lambda t, n: (1, 1), lambda t, n: (t, 1), lambda t, n: (t, -(-n // 128))]


def norm(make, rows=6, columns=256, granularity=ROW, dtype="bfloat16", **changes):
    given = {
        "x": make(rows, columns, dtype=dtype),
        "q": make(rows, columns, dtype=E4M3),
        "scale": make(*SHAPES[granularity % 3](rows, columns)),
        "weight": make(columns),
        "granularity": granularity,
        "eps": 1e-6,
        "residual": make(rows, columns, dtype=dtype),
        "normed": make(rows, columns, dtype=dtype),
    } | changes
    return list(given.values())


def layer_norm(make, rows=6, columns=256, granularity=ROW, dtype="bfloat16", **changes):
    bias = changes.pop("bias", make(columns, dtype=dtype))
    given = norm(make, rows, columns, granularity, dtype, **changes)
    return [*given[:4], bias, *given[4:]]


def gated(make, rows=6, columns=256, granularity=ROW, dtype="bfloat16", **changes):
    given = {
        "x": make(rows, 2 * columns, dtype=dtype),
        "q": make(rows, columns, dtype=E4M3),
        "scale": make(*SHAPES[granularity % 3](rows, columns)),
        "activation": 0,
        "granularity": granularity,
    } | changes
    return list(given.values())


NORMS = ("rms_norm_quant", "layer_norm_quant")
OPS = {
    "rms_norm_quant": (norm, _C.rms_norm_quant_plan, _C.rms_norm_quant),
    "layer_norm_quant": (layer_norm, _C.layer_norm_quant_plan, _C.layer_norm_quant),
    "act_and_mul_quant": (gated, _C.act_and_mul_quant_plan, _C.act_and_mul_quant),
}


@pytest.fixture(params=OPS)
def op(request):
    return request.param


@pytest.mark.parametrize("rows", [1, 264, 265, 70_000])
@pytest.mark.parametrize("columns", [8, 128, 4096, 7168, 8200, 16384, 32768])
def test_a_block_holds_a_row(op, rows, columns):
    arguments, plan, _ = OPS[op]
    if op in NORMS and columns > 16384:
        return
    for granularity in (TENSOR, ROW, GROUP):
        got = plan(*arguments(ExchangeTensor, rows, columns, granularity))
        assert got["grid"] == rows and got["block"] % 32 == 0 and got["block"] <= 1024
        assert got["block"] * got["vectors"] * 8 >= columns
        few = rows <= 264 and columns <= 8192
        assert got["vectors"] == (1 if few else 2 if columns <= 16384 else 4)


def test_an_empty_batch_launches_nothing(op, make):
    arguments, plan, _ = OPS[op]
    assert plan(*arguments(make, rows=0))["kernel"] == "none"


@pytest.mark.parametrize("activation", range(4))
def test_each_activation_has_kernels(make, activation):
    name = ("Silu", "Gelu", "GeluTanh", "Relu")[activation]
    got = _C.act_and_mul_quant_plan(*gated(make, activation=activation))
    assert got["kernel"].startswith(f"fused_quant<{name}, BFloat16")


@pytest.mark.parametrize("op", NORMS)
def test_optional_tensors(make, op):
    arguments, plan, _ = OPS[op]
    full = plan(*arguments(make))
    for name in ("weight", "residual", "normed", *["bias"] * (op == "layer_norm_quant")):
        assert plan(*arguments(make, **{name: None})) == full


def test_each_norm_has_kernels(make):
    for name, producer in zip(NORMS, ("RmsNorm", "LayerNorm"), strict=True):
        arguments, plan, _ = OPS[name]
        assert plan(*arguments(make))["kernel"].startswith(f"fused_quant<{producer}, BFloat16")


LEFT_TO_REF = {
    "rms_norm_quant": [
        lambda make: {"columns": 260},
        lambda make: {"columns": 16392},
        lambda make: {"x": make(6, 256, dtype="bfloat16", address=ADDRESS + 2)},
        lambda make: {"x": make(6, 256, dtype="bfloat16", strides=(512, 2))},
        lambda make: {"weight": make(256, address=ADDRESS + 4)},
        lambda make: {"residual": make(6, 256, dtype="bfloat16", strides=(257, 1))},
        lambda make: {"normed": make(6, 256, dtype="bfloat16", address=ADDRESS + 8)},
        lambda make: {"q": make(6, 256, dtype=E4M3, address=ADDRESS + 4)},
        lambda make: {"rows": 2**31},
    ],
    "act_and_mul_quant": [
        lambda make: {"columns": 260},
        lambda make: {"columns": 32776},
        lambda make: {"x": make(6, 512, dtype="bfloat16", address=ADDRESS + 2)},
        lambda make: {"q": make(6, 256, dtype=E4M3, address=ADDRESS + 4)},
        lambda make: {"rows": 2**31},
    ],
}

LEFT_TO_REF["layer_norm_quant"] = [
    *LEFT_TO_REF["rms_norm_quant"],
    lambda make: {"bias": make(256, address=ADDRESS + 4)},
]


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, all_ in LEFT_TO_REF.items() for i in range(len(all_))]
)
def test_left_to_ref(make, name, number):
    arguments, plan, _ = OPS[name]
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        plan(*arguments(make, **LEFT_TO_REF[name][number](make)))


BAD = [
    ({"x": (6, 256, "float32")}, TypeError, "`x` must have dtype bfloat16 or float16, got float32"),
    (
        {"x": (256, "bfloat16")},
        ValueError,
        "`x` must have 2 dimensions, got 1 (shape [256])",
    ),
    ({"q": (6, 256, "uint8")}, TypeError, "`q` must have dtype float8_e4m3fn, got uint8"),
    ({"q": (5, 256, E4M3)}, ValueError, "`q` must have shape [T, N] = [6, 256], got [5, 256]"),
    ({"scale": (6, 2)}, ValueError, "`scale` must have shape [T, 1] = [6, 1], got [6, 2]"),
    ({"scale": (6, 1, "float16")}, TypeError, "`scale` must have dtype float32, got float16"),
    (
        {"scale": (6, 1), "granularity": GROUP},
        ValueError,
        "`scale` must have shape [T, N / 128] = [6, 2], got [6, 1]",
    ),
    (
        {"scale": (6, 1), "granularity": TENSOR},
        ValueError,
        "`scale` must have shape [1, 1] = [1, 1], got [6, 1]",
    ),
]
BAD_NORM = [
    ({"weight": (255,)}, ValueError, "`weight` must have shape [N] = [256], got [255]"),
    (
        {"weight": (256, "float16")},
        TypeError,
        "`weight` must have dtype bfloat16 or float32, got float16",
    ),
    (
        {"residual": (5, 256, "bfloat16")},
        ValueError,
        "`residual` must have shape [T, N] = [6, 256], got [5, 256]",
    ),
    (
        {"normed": (6, 256, "float16")},
        TypeError,
        "`normed` must have dtype bfloat16, got float16",
    ),
]


def made(make, changes):
    """Tensors of (*shape, dtype), the dtype float32 where none is named."""
    found = {}
    for name, value in changes.items():
        if isinstance(value, tuple):
            dtype = value[-1] if isinstance(value[-1], str) else "float32"
            value = make(*(size for size in value if not isinstance(size, str)), dtype=dtype)
        found[name] = value
    return found


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_arguments_are_named(op, make, changes, error, text):
    refuse(op, make, changes, error, text)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize(("changes", "error", "text"), BAD_NORM)
def test_bad_arguments_of_a_norm_are_named(op, make, changes, error, text):
    refuse(op, make, changes, error, text)


BAD_BIAS = [
    ({"bias": (255,)}, ValueError, "`bias` must have shape [N] = [256], got [255]"),
    (
        {"bias": (256, "float16")},
        TypeError,
        "`bias` must have dtype bfloat16 or float32, got float16",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD_BIAS)
def test_a_bad_bias_is_named(make, changes, error, text):
    refuse("layer_norm_quant", make, changes, error, text)


def refuse(op, make, changes, error, text):
    arguments, plan, launch = OPS[op]
    if op == "act_and_mul_quant" and changes.get("x") == (6, 256, "float32"):
        changes = {"x": (6, 512, "float32")}
    with pytest.raises(error) as info:
        plan(*arguments(make, **made(make, changes)))
    assert str(info.value) == f"{op}: {text}"
    with pytest.raises(error):
        launch(*arguments(ExchangeTensor, **made(ExchangeTensor, changes)))


def test_gates_and_factors_are_as_many(make):
    with pytest.raises(ValueError, match=r"`x` must have an even number of columns \[T, 2N\]"):
        _C.act_and_mul_quant_plan(*gated(make, x=make(6, 511, dtype="bfloat16")))


def test_there_is_no_scale_per_tile(op, make):
    arguments, plan, _ = OPS[op]
    with pytest.raises(ValueError, match="no granularity has the index 3"):
        plan(*arguments(make, granularity=BLOCK))
