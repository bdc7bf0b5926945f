# SPDX-License-Identifier: Apache-2.0
"""linear_act's checks and its choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor

import tiercel
from tiercel import _C

NONE, RELU, SILU, GELU, GELU_TANH = range(5)


def plan(make, m, n, k, *, bias=True, activation=GELU, dtype="bfloat16", **x):
    return _C.linear_act_plan(
        make(m, k, dtype=dtype, **x),
        make(n, k, dtype=dtype),
        make(n, dtype=dtype) if bias else None,
        None,
        make(m, n, dtype=dtype),
        None,
        activation,
    )


SIZES = [1, 2, 7, 8, 16, 63, 64, 65, 128, 129, 192, 256, 500, 1000, 1024, 3001, 8192, 100_003]


@pytest.mark.parametrize("m", SIZES)
def test_every_size_has_a_plan_that_covers_it(m):
    for n in (8, 64, 72, 256, 1032, 4096, 14336):
        for k in (8, 64, 200, 4096, 14336):
            got = plan(ExchangeTensor, m, n, k)
            assert got["block"] in (256, 384)
            assert got["dynamic_smem"] <= 232448  # what a block may have on Hopper
            assert got["grid"] % got["cluster"] == 0  # else the launch fails
            assert 1 <= got["cluster"] <= 8
            if "split_k" in got["kernel"]:
                row_tiles = -(-m // got["tile_m"])
                assert got["grid"] == row_tiles * -(-n // got["tile_n"]) * got["splits"]
                assert got["splits"] == got["cluster"] <= -(-k // 64)
            else:
                assert got["splits"] == 1
                assert 1 <= got["grid"] <= 132  # persistent: at most a block a multiprocessor


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", range(5))
def test_kernels_are_the_ones_asked_for(dtype, activation):
    names = ["none", "relu", "silu", "gelu", "gelu_tanh"]
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    for m in (1, 128, 1024):
        kernel = plan(ExchangeTensor, m, 4096, 4096, dtype=dtype, activation=activation)["kernel"]
        tile = kernel.removeprefix(f"linear_act_{short}_{names[activation]}_")
        assert tile[0].isdigit(), kernel


@pytest.mark.parametrize(
    ("m", "n", "k", "kernel"),
    [
        (1, 4096, 4096, "64x32_split_k"),
        (16, 14336, 4096, "64x112_split_k"),
        (77, 11008, 4096, "128x96_split_k"),
        (128, 4096, 14336, "128x64_split_k"),
        (256, 5120, 5120, "128x96_split_k"),
        (300, 3072, 768, "128x96_split_k"),
        (1001, 1000, 1032, "128x128_pingpong"),
        (768, 4096, 4096, "128x192"),
        (1024, 4096, 4096, "128x256"),
        (1024, 14336, 4096, "128x128_pingpong"),
        (8192, 4096, 4096, "128x128_pingpong"),
    ],
)
def test_choices_that_were_measured(m, n, k, kernel):
    assert plan(ExchangeTensor, m, n, k)["kernel"] == "linear_act_bf16_gelu_" + kernel


def test_small_batches_use_the_whole_chip():
    for m in (1, 16, 64):
        for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)):
            assert plan(ExchangeTensor, m, n, k)["grid"] >= 112


def test_bias_and_rows_apart(make):
    assert plan(make, 64, 64, 64, bias=False)["grid"] >= 1
    assert plan(make, 64, 64, 64, strides=(128, 1))["grid"] >= 1


def test_empty_batch_launches_nothing(make):
    got = plan(make, 0, 64, 64, address=0)
    assert (got["kernel"], got["grid"]) == ("none", 0)


def call(make, x=None, weight=None, bias=None, out=None, activation=GELU):
    bf16 = {"dtype": "bfloat16"}
    return _C.linear_act_plan(
        make(4, 16, **bf16) if x is None else x,
        make(8, 16, **bf16) if weight is None else weight,
        make(8, **bf16) if bias is None else bias,
        None,
        make(4, 8, **bf16) if out is None else out,
        None,
        activation,
    )


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "`x` must have dtype bfloat16 or float16, got float32", {"x": (4, 16)}),
        (TypeError, "`weight` must have dtype bfloat16, got float32", {"weight": (8, 16)}),
        (TypeError, "`bias` must have dtype bfloat16, got float32", {"bias": (8,)}),
        (TypeError, "`out` must have dtype bfloat16, got float32", {"out": (4, 8)}),
    ],
)
def test_wrong_dtypes(make, error, text, arguments):
    tensors = {name: make(*shape) for name, shape in arguments.items()}
    with pytest.raises(error, match=f"^linear_act: {text}"):
        call(make, **tensors)


@pytest.mark.parametrize(
    ("error", "text", "name", "shape"),
    [
        (ValueError, r"`x` must have 2 dimensions, got 1 \(shape \[16\]\)", "x", (16,)),
        (
            ValueError,
            r"`weight` must have shape \[N, K\] = \[8, 16\], got \[8, 24\]",
            "weight",
            (8, 24),
        ),
        (ValueError, r"`bias` must have shape \[N\] = \[8\], got \[9\]", "bias", (9,)),
        (ValueError, r"`out` must have shape \[M, N\] = \[4, 8\], got \[4, 9\]", "out", (4, 9)),
    ],
)
def test_wrong_shapes(make, error, text, name, shape):
    with pytest.raises(error, match=f"^linear_act: {text}"):
        call(make, **{name: make(*shape, dtype="bfloat16")})


def test_what_the_copy_engine_cannot_do(make):
    for n, k, text in ((12, 16, "`weight`.* N, got 12"), (8, 20, "`x`.* K, got 20")):
        with pytest.raises(NotImplementedError, match=f"^linear_act: {text}"):
            plan(make, 4, n, k)
    with pytest.raises(NotImplementedError, match="`x` must start at a multiple of 16 bytes"):
        plan(make, 4, 8, 16, address=ADDRESS + 8)
    with pytest.raises(NotImplementedError, match="`x` must have row strides"):
        plan(make, 4, 8, 16, strides=(18, 1))
    with pytest.raises(NotImplementedError, match="`x` must be contiguous in its last"):
        plan(make, 4, 8, 16, strides=(128, 8))


def test_unknown_activation(make):
    with pytest.raises(ValueError, match="no activation has the index 5"):
        call(make, activation=5)


def tensors(make, **changes):
    shapes = {"x": (4, 16), "weight": (8, 16), "bias": (8,), "residual": (4, 8), "out": (4, 8)}
    shapes |= {"sums": (4, 8)} | changes
    return {
        name: shape if shape is None else make(*shape, dtype="bfloat16")
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("m", SIZES)
def test_residual_and_sums_have_a_plan(m):
    for n, k in ((8, 8), (1032, 200), (4096, 4096)):
        given = tensors(
            ExchangeTensor,
            x=(m, k),
            weight=(n, k),
            bias=(n,),
            residual=(m, n),
            out=(m, n),
            sums=(m, n),
        )
        got = _C.linear_act_plan(*given.values(), SILU)
        assert "split_k" in got["kernel"] or got["kernel"].startswith("linear_act_extra_bf16_silu")
        assert got["grid"] % got["cluster"] == 0


@pytest.mark.parametrize(
    ("text", "changes", "activation"),
    [
        (r"`residual` must have shape \[M, N\] = \[4, 8\], got \[8\]", {"residual": (8,)}, SILU),
        (r"`sums` must have shape \[M, N\] = \[4, 8\], got \[4, 9\]", {"sums": (4, 9)}, SILU),
        ("`sums` are the result where there is no activation", {}, NONE),
    ],
)
def test_wrong_residual_or_sums(make, text, changes, activation):
    with pytest.raises(ValueError, match=f"^linear_act: {text}"):
        _C.linear_act_plan(*tensors(make, **changes).values(), activation)
    assert _C.linear_act_plan(*tensors(make, sums=None).values(), NONE)["grid"] > 0


def gated(make, m=4, n=8, k=16, rows=None, activation=SILU, bias=None):
    bf16 = {"dtype": "bfloat16"}
    weight = make(2 * n if rows is None else rows, k, **bf16)
    bias = make(2 * n if bias is None else bias, **bf16)
    return _C.gated_linear_plan(make(m, k, **bf16), weight, bias, make(m, n, **bf16), activation)


@pytest.mark.parametrize("m", [1, 32, 64])
def test_a_gated_layer_in_one_wave(m):
    got = gated(ExchangeTensor, m, 12288, 4096)
    assert "silu_64x96_split_k" in got["kernel"]
    assert (got["grid"], got["splits"]) == (256, 1)


@pytest.mark.parametrize("m", SIZES)
def test_every_size_of_a_gated_layer_has_a_plan(m):
    for n, k in ((8, 8), (1032, 200), (14336, 4096)):
        got = gated(ExchangeTensor, m, n, k)
        assert got["kernel"].startswith("gated_linear_bf16_silu")
        assert got["grid"] % got["cluster"] == 0
        if "split_k" in got["kernel"]:
            row_tiles = -(-m // got["tile_m"])
            assert got["grid"] == row_tiles * -(-n // (got["tile_n"] // 2)) * got["splits"]


def test_wrong_gated_layers(make):
    for error, text, changes in (
        (ValueError, r"`weight` must have an even number of rows \[2N, K\]", {"rows": 17}),
        (ValueError, r"`out` must have shape \[M, N\] = \[4, 16\], got \[4, 8\]", {"rows": 32}),
        (ValueError, r"`bias` must have shape \[2N\] = \[16\], got \[8\]", {"bias": 8}),
        (NotImplementedError, "`weight` must have a multiple of 8 as its dimension N", {"n": 12}),
        (ValueError, "no activation has the index 9", {"activation": 9}),
        (NotImplementedError, "gates are silu, gelu and gelu_tanh", {"activation": NONE}),
    ):
        with pytest.raises(error, match=f"^gated_linear: {text}"):
            gated(make, **changes)


@pytest.mark.parametrize("of_weight", [False, True])
def test_products_of_the_backward_have_a_plan(make, of_weight):
    for m in (1, 7, 128, 1000, 8192):
        for n, k in ((8, 8), (1032, 200), (14336, 4096)):
            other, out = ((m, k), (n, k)) if of_weight else ((n, k), (m, k))
            bf16 = {"dtype": "bfloat16"}
            got = _C.linear_act_grad_plan(
                make(m, n, **bf16), make(*other, **bf16), make(*out, **bf16), of_weight
            )
            which = "weight" if of_weight else "x"
            assert got["kernel"].startswith(f"linear_act_grad_{which}_bf16")
            assert got["grid"] % got["cluster"] == 0
    text = r"`x` must have shape \[M, K\]" if of_weight else r"`weight` must have shape \[N, K\]"
    wrong = [make(*shape, dtype="bfloat16") for shape in ((4, 8), (9, 16), (4, 16))]
    with pytest.raises(ValueError, match=text):
        _C.linear_act_grad_plan(*wrong, of_weight)


def fp8(make, m=4, n=8, k=16, activation=SILU, **changes):
    float8, bf16, f32 = {"dtype": "float8_e4m3fn"}, {"dtype": "bfloat16"}, {"dtype": "float32"}
    given = {
        "x": make(m, k, **float8),
        "weight": make(n, k, **float8),
        "x_scale": make(m, **f32),
        "weight_scale": make(n, **f32),
        "bias": make(n, **bf16),
        "out": make(m, n, **bf16),
    }
    return _C.fp8_linear_plan(*(given | changes).values(), activation)


@pytest.mark.parametrize("m", SIZES)
def test_float8_layers_have_a_plan(m):
    for n, k in ((8, 16), (1032, 208), (14336, 4096)):
        got = fp8(ExchangeTensor, m, n, k)
        assert got["kernel"].startswith("linear_act_fp8_silu")
        assert got["grid"] % got["cluster"] == 0 and got["splits"] <= -(-k // 128)


def test_wrong_float8_layers(make):
    three = make(3, dtype="float32")
    for error, text, changes in (
        (NotImplementedError, "`x` must have a multiple of 16 as its dimension K", {"k": 24}),
        (NotImplementedError, "`weight` must have a multiple of 8 as its dimension N", {"n": 12}),
        (NotImplementedError, "activations are silu, gelu and gelu_tanh", {"activation": RELU}),
        (ValueError, "`x_scale` must have 1 or M = 4 elements, got 3", {"x_scale": three}),
        (TypeError, "`out` must have dtype bfloat16, got float32", {"out": make(4, 8)}),
        (TypeError, "`bias` must have dtype bfloat16, got float32", {"bias": make(8)}),
        (TypeError, "`x` must have dtype float8_e4m3fn, got float32", {"x": make(4, 16)}),
    ):
        with pytest.raises(error, match=f"^fp8_linear: {text}"):
            fp8(make, **changes)


def blocks(make, m, n, k, **changes):
    down, across = -(-n // 128), -(-k // 128)
    scales = {
        "x_scale": make(m, across, dtype="float32"),
        "weight_scale": make(down, across, dtype="float32"),
    }
    return fp8(make, m, n, k, **(scales | changes))


@pytest.mark.parametrize("m", SIZES)
def test_scales_of_blocks_have_a_plan(m):
    for n, k in ((8, 144), (136, 16), (1032, 208), (7168, 16384)):
        got = blocks(ExchangeTensor, m, n, k)
        assert got["kernel"].startswith("linear_act_blocks_fp8"), got
        assert got["grid"] % got["cluster"] == 0 and got["splits"] <= -(-k // 128)
        assert got["dynamic_smem"] <= 232448
    # Read as scales of rows, they mean the same.
    assert blocks(ExchangeTensor, m, 128, 128)["kernel"].startswith("linear_act_fp8_silu")


@pytest.mark.parametrize(
    ("m", "n", "k", "kernel", "splits"),
    [
        (1, 4096, 12288, "64x64_split_k", 3),
        (16, 7168, 16384, "64x64_split_k", 2),
        (64, 24576, 4096, "64x96_split_k", 1),
        (128, 7168, 16384, "128x64_split_k", 1),
        (256, 7168, 16384, "128x128", 1),
        (128, 24576, 4096, "128x192_alone", 1),
        (128, 36864, 7168, "128x144", 1),
        (4096, 2112, 7168, "128x192", 1),
        (4096, 24576, 4096, "128x256", 1),
    ],
)
def test_choices_for_scales_of_blocks(m, n, k, kernel, splits):
    got = blocks(ExchangeTensor, m, n, k)
    assert got["kernel"] == "linear_act_blocks_fp8_" + kernel and got["splits"] == splits


def test_tiles_of_96_columns_for_scales_of_blocks():
    """They fill one wave of two blocks a multiprocessor; never in the batch-invariant mode,
    since tiles of other widths than 64 have other bits."""
    for m in (1, 16, 64):
        got = blocks(ExchangeTensor, m, 24576, 4096)
        assert (got["tile_n"], got["grid"]) == (96, 256)
        for n, k in ((36864, 7168), (51200, 5120), (7168, 16384), (2112, 7168)):
            assert blocks(ExchangeTensor, m, n, k)["tile_n"] == 64
        with tiercel.batch_invariant():
            assert blocks(ExchangeTensor, m, 24576, 4096)["tile_n"] == 64


def test_wrong_scales_of_blocks(make):
    f32 = {"dtype": "float32"}
    rows = r"`x_scale` must have shape \[M, K / 128\] = \[4, 3\], got \[4, 1\]"
    columns = r"`weight_scale` must have shape \[N / 128, K / 128\] = \[2, 3\], got \[136, 1\]"
    for error, text, changes in (
        (ValueError, rows, {"x_scale": make(4, 1, **f32)}),
        (ValueError, columns, {"weight_scale": make(136, 1, **f32)}),
        (ValueError, "`weight_scale` must be contig", {"weight_scale": make(2, 3, strides=(4, 1))}),
        (TypeError, "`x_scale` must have dtype float32", {"x_scale": make(4, 3, dtype="bfloat16")}),
    ):
        with pytest.raises(error, match=f"^fp8_linear: {text}"):
            blocks(make, 4, 136, 272, **changes)
    assert blocks(make, 4, 136, 272, x_scale=make(4, 3, strides=(1, 4)))["grid"] >= 1
    far = make(4, 3, strides=(1, 2**31))
    with pytest.raises(NotImplementedError, match="`x_scale` must have strides from 0"):
        blocks(make, 4, 136, 272, x_scale=far)
