# SPDX-License-Identifier: Apache-2.0
"""The declarations of the quantising ops."""

from __future__ import annotations

from tiercel.core.spec import FLOATS, HALVES, Call, Dim, DType, Float, Numerics, Spec, Str, Tensor

# Rows and columns that share a scale; 0: all of them.
TILES = {"tensor": (0, 0), "row": (1, 0), "1x128": (1, 128), "128x128": (128, 128)}
_SCALE_TEXTS = {
    "tensor": "[1, 1]",
    "row": "[T, 1]",
    "1x128": "[T, K / 128]",
    "128x128": "[T / 128, K / 128]",
}


def scale_shape(rows: int, columns: int, granularity: str) -> tuple[int, int]:
    """The number of scales, down and across."""
    down, across = TILES[granularity]
    return (
        (rows + down - 1) // down if down else 1,
        (columns + across - 1) // across if across else 1,
    )


_X = Tensor("x", "T K", FLOATS, strided=True)
_Q = Tensor("q", "T K", "float8_e4m3fn")
# The given scale of a whole tensor.
_ONE_SCALE = Tensor("scale", "1 1", "float32", optional=True)

FP8_QUANTIZE = Spec(
    "fp8_quantize",
    _X,
    Str("granularity", "row", choices=tuple(TILES)),
    _ONE_SCALE,
    results=[
        _Q,
        Tensor(
            *("scale", "*", "float32"),
            shape=lambda call: scale_shape(*call.x.shape, call.granularity),
            shape_text=lambda call: _SCALE_TEXTS[call.granularity],
        ),
    ],
    limits="K a multiple of 8, 16-byte aligned rows",
    numerics=Numerics(0),
)
FP8_QUANTIZE_STATIC = Spec(
    "fp8_quantize_static",
    _X,
    Tensor("scale", "1 1", "float32"),
    results=[_Q],
    public="fp8_quantize",
)

# Granularities whose tiles have scales in both directions.
TURNED_GRANULARITIES = ("1x128", "128x128")


def _turned_scale_shape(call: Call) -> tuple[int, int]:
    rows, columns = call.x.shape
    down, across = scale_shape(rows, columns, "128x128")
    return (down, columns) if call.granularity == "1x128" else (across, down)


FP8_QUANTIZE_TRANSPOSE = Spec(
    "fp8_quantize_transpose",
    _X,
    Str("granularity", "1x128", choices=TURNED_GRANULARITIES),
    results=[
        _Q,
        Tensor(
            *("scale", "*", "float32"),
            shape=lambda call: scale_shape(*call.x.shape, call.granularity),
            shape_text=lambda call: _SCALE_TEXTS[call.granularity],
        ),
        Tensor("q_t", "K P", "float8_e4m3fn"),
        Tensor(
            *("scale_t", "*", "float32"),
            shape=_turned_scale_shape,
            shape_text=lambda call: (
                "[T / 128, K]" if call.granularity == "1x128" else "[K / 128, T / 128]"
            ),
        ),
    ],
    # T, rounded up
    dims={"P": lambda call: (call.x.shape[0] + 127) // 128 * 128},
    limits="K a multiple of 8, 16-byte aligned rows",
    numerics=Numerics(0),
)

# "tensor": a given scale.
FUSED_GRANULARITIES = ("tensor", "row", "1x128")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_FUSED_Q = Tensor("q", "T N", "float8_e4m3fn", written=True)
_FUSED_SCALE = Tensor("scale", "*", "float32", written=True)
_GRANULARITY = Str("granularity", "row", choices=FUSED_GRANULARITIES)


def _check_fused_scale(op: str, call: Call) -> None:
    from tiercel.core.checks import check_shape

    due = scale_shape(*call.q.shape, call.granularity)
    text = _SCALE_TEXTS[call.granularity].replace("K", "N")
    check_shape(op, "scale", call.scale, due, text)


def _check_gated(call: Call) -> None:
    if call.x.shape[1] % 2:
        raise ValueError(
            "act_and_mul_quant: `x` must have an even number of columns [T, 2N], "
            f"got {list(call.x.shape)}"
        )
    _check_fused_scale("act_and_mul_quant", call)


def _norm_quant(name: str, eps: float, *, biased: bool) -> Spec:
    parameters = ("weight", "bias") if biased else ("weight",)
    return Spec(
        name,
        Tensor("x", "T N", HALVES, strided=True),
        _FUSED_Q,
        _FUSED_SCALE,
        *(Tensor(each, "N", ("x", "float32"), optional=True) for each in parameters),
        _GRANULARITY,
        Float("eps", eps, at_least=0),
        Tensor("residual", "T N", "x", strided=True, optional=True, written=True),
        Tensor("normed", "T N", "x", optional=True, written=True),
        check=lambda call: _check_fused_scale(name, call),
        limits="N a multiple of 8 up to 16384, 16-byte aligned rows",
        numerics=Numerics(
            4e-6,
            of="terms" if biased else "result",
            sums="float32: lanes, then warps; with a residual, of the rounded sum",
            batch_invariant=False,
            varies="how many threads share a row, which is chosen by the number of rows",
        ),
    )


RMS_NORM_QUANT = _norm_quant("rms_norm_quant", 1e-6, biased=False)
LAYER_NORM_QUANT = _norm_quant("layer_norm_quant", 1e-5, biased=True)
ACT_AND_MUL_QUANT = Spec(
    "act_and_mul_quant",
    Tensor("x", "T C", HALVES, strided=True),
    _FUSED_Q,
    _FUSED_SCALE,
    Str("activation", "silu", choices=ACTIVATIONS),
    _GRANULARITY,
    dims={"N": Dim("x", 1, divisor=2)},
    check=_check_gated,
    limits="N a multiple of 8 up to 32768, 16-byte aligned rows",
    numerics=Numerics(2**-16, of="result"),
)

_GLOBAL_SCALE = Tensor("global_scale", "1", "float32", optional=True)


def _check_columns(op: str, name: str, tensor: Tensor, multiple: int) -> None:
    if tensor.shape[1] % multiple:  # type: ignore[index]
        shape = list(tensor.shape)  # type: ignore[call-overload]
        raise ValueError(f"{op}: `{name}` must have a multiple of {multiple} columns, got {shape}")


NVFP4_QUANTIZE = Spec(
    "nvfp4_quantize",
    _X,
    _GLOBAL_SCALE,
    results=[
        Tensor("q", "T K/2", "float4_e2m1fn_x2"),
        Tensor("scale", "T K/16", "float8_e4m3fn"),
    ],
    check=lambda call: _check_columns("nvfp4_quantize", "x", call.x, 16),
    limits="16-byte aligned rows",
    numerics=Numerics(0),
)
NVFP4_DEQUANTIZE = Spec(
    "nvfp4_dequantize",
    Tensor("q", "T K/2", "float4_e2m1fn_x2"),
    Tensor("scale", "T K/16", "float8_e4m3fn"),
    _GLOBAL_SCALE,
    DType("dtype", "bfloat16", choices=FLOATS),
    # Two products in float32, each rounded once.
    results=[Tensor("out", "T K", "dtype", rtol=3e-7)],
    dims={"K": lambda call: 2 * call.q.shape[1] if call.q.dim() == 2 else None},
    check=lambda call: _check_columns("nvfp4_dequantize", "q", call.q, 8),
    limits="16-byte aligned rows",
    numerics=Numerics(3e-7),
)
