# SPDX-License-Identifier: Apache-2.0
"""The norms' checks and their choice of kernel: neither needs PyTorch or a GPU."""

import re

import pytest
from support.dlpack_tensor import ADDRESS, ExchangeTensor
from support.norm_plan import BYTES, OPS, backward

from tiercel import _C


def forward(
    rows, columns, dtype="bfloat16", *, op="rms_norm", residual=False, make=ExchangeTensor, **x
):
    return getattr(_C, f"{op}_plan")(
        make(rows, columns, dtype=dtype, **x),
        make(columns, dtype=dtype),
        None,
        make(rows, columns, dtype=dtype) if residual else None,
        make(rows, columns, dtype=dtype),
        make(rows, columns, dtype=dtype) if residual else None,
        1e-5,
    )


COLUMNS = [1, 7, 64, 65, 128, 200, 512, 1000, 1024, 1032, 2560, 4095, 4096, 5120, 8192, 16384]
LONG = [16391, 20000, 32768, 57344, 65536, 100_000, 131_072]


def vectors_of(got, columns, dtype):
    elements = got["vector_bytes"] // BYTES[dtype]
    return -(-columns // elements)


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("columns", COLUMNS + LONG)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("residual", [False, True])
def test_every_forward_plan_covers_its_rows(op, columns, dtype, residual):
    shares = (100, 500, 900, 1300, 1700, 2500, 4000)  # vectors a multiprocessor
    vectors = -(-columns * BYTES[dtype] // 16)
    for rows in (1, 16, 100_003, *(-(-share * 132 // vectors) for share in shares)):
        got = forward(rows, columns, dtype, op=op, residual=residual)
        per_thread = int(re.search("vectors=([0-9]+)", got["kernel"])[1])
        threads, cluster = got["threads_per_row"], got["cluster"]
        assert per_thread * threads * cluster >= vectors_of(got, columns, dtype)
        assert got["block"] <= 512 and got["block"] % 32 == 0
        assert cluster in (1, 2, 4, 8) and got["grid"] % cluster == 0
        at_once = re.search("rows=([0-9]+)", got["kernel"])  # rows a thread, of short ones
        rows_per_block = got["block"] // threads * int(at_once[1] if at_once else 1)
        assert got["grid"] // cluster == -(-rows // rows_per_block)
        aligned = columns * BYTES[dtype] % 16 == 0
        assert got["vector_bytes"] == (16 if aligned else BYTES[dtype])


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("columns", COLUMNS + LONG)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("residual", [False, True])
def test_every_backward_plan_covers_its_rows(op, columns, dtype, residual):
    if residual and columns * BYTES[dtype] > 98304 * 4:
        pytest.skip("the op adds the gradient of the sum itself")
    for rows in (1, 16, 1000, 100_003):
        got = backward(rows, columns, dtype, op=op, residual=residual)
        per_thread = int(re.search("vectors=([0-9]+)", got["kernel"])[1])
        threads, cluster = got["threads_per_row"], got["cluster"]
        vectors = -(-columns * BYTES[dtype] // 16)
        assert per_thread * threads * cluster >= vectors
        assert got["block"] <= 512 and got["grid"] % cluster == 0
        assert got["dynamic_smem"] <= 232448 - 10240  # what a block may have, less its static share
        assert 1 <= got["stages"] <= 8
        assert got["parts"] == got["grid"] // cluster <= 132


def test_most_calls_have_kernels_of_their_own():
    assert "norm_plain" in forward(16384, 4096)["kernel"]
    assert "norm_plain" in forward(16, 1024, "float16", op="layer_norm")["kernel"]
    assert "lanes=32" in forward(32768, 1024)["kernel"]
    assert "norm_long" in forward(4096, 16384, op="layer_norm")["kernel"]
    assert "norm_long" in forward(4096, 16384, "float32", op="layer_norm")["kernel"]
    assert "norm_plain" in forward(16384, 4096, residual=True)["kernel"]
    for kind in ({"residual": True, "op": "layer_norm"}, {"address": ADDRESS + 2}):
        assert "norm_forward" in forward(16384, 4096, **kind)["kernel"]


# By how many vectors a multiprocessor has, lanes (0: a block has a row), vectors a thread, and how
# many threads' rows are asked for ahead. From one line to the next the first number of rows that
# has it.
PLAIN = [
    ("rms_norm", False, 1024, [(1, 0, 1, 2048), (2114, 0, 2, 512), (3170, 32, 4, 512)]),
    ("rms_norm", False, 8192, [(1, 0, 2, 2048), (265, 0, 2, 512), (397, 0, 4, 512)]),
    (
        "rms_norm",
        False,
        512,
        [(1, 0, 1, 2048), (133, 32, 2, 1024), (2115, 32, 2, 512), (4227, 32, 2, 1024)],
    ),
    (
        "rms_norm",
        True,
        1024,
        [(1, 0, 2, 2048), (133, 32, 4, 1024), (794, 0, 2, 512), (3170, 32, 4, 512)],
    ),
    (
        "rms_norm",
        True,
        4096,
        [(1, 0, 2, 2048), (199, 0, 4, 2048), (397, 0, 2, 512), (793, 0, 4, 512)],
    ),
    (
        "layer_norm",
        False,
        1024,
        [(1, 0, 1, 2048), (133, 32, 4, 1024), (1058, 0, 1, 2048), (1586, 0, 2, 512)]
        + [(2114, 32, 4, 512)],
    ),
    (
        "layer_norm",
        False,
        4096,
        [(1, 0, 2, 2048), (265, 0, 1, 2048), (397, 0, 2, 512), (529, 0, 4, 512)],
    ),
]


@pytest.mark.parametrize(("op", "residual", "columns", "lines"), PLAIN)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_plain_shapes_go_by_vectors_a_multiprocessor(op, residual, columns, lines, dtype):
    for number, (rows, lanes, vectors, threads) in enumerate(lines):
        last = lines[number + 1][0] - 1 if number + 1 < len(lines) else 1_000_000
        for some in (rows, last):
            got = forward(some, columns, dtype, op=op, residual=residual)
            assert f"lanes={lanes}, vectors={vectors}, " in got["kernel"], some
            assert got["ahead"] == threads // got["block"], some


@pytest.mark.parametrize(
    ("rows", "parts"), [(16384, 128), (16000, 128), (13100, 131), (16381, 132)]
)
def test_blocks_that_divide_the_rows_evenly(rows, parts):
    got = backward(rows, 4096, op="layer_norm")
    assert got["parts"] == got["grid"] == parts
    assert backward(rows, 3072, op="layer_norm")["grid"] == 132


def test_few_rows_have_a_shape_of_their_own():
    for rows, block in ((16384, 384), (924, 384), (923, 512)):
        assert backward(rows, 4096, op="layer_norm")["block"] == block


def test_clusters_that_divide_the_rows_evenly():
    for rows, clusters in ((896, 64), (899, 66)):
        got = backward(rows, 16384, "float32", op="layer_norm")
        assert (got["cluster"], got["parts"]) == (2, clusters)


@pytest.mark.parametrize(
    ("rows", "blocks"), [(16384, 128), (16000, 128), (13000, 130), (13100, 132), (132, 132)]
)
@pytest.mark.parametrize("columns", [9000, 16384])
def test_pairs_of_blocks_leave_one_row_of_sums(rows, columns, blocks):
    got = backward(rows, columns, op="layer_norm")
    assert (got["grid"], got["cluster"], got["parts"]) == (blocks, 2, blocks // 2)
    assert got["threads_per_row"] == got["block"] and "vectors=4, rows=1" in got["kernel"]


def test_no_pairs_of_few_rows():
    got = backward(131, 16384, op="layer_norm")
    assert (got["grid"], got["cluster"], got["parts"]) == (131, 1, 131)


def test_blocks_of_very_many_short_rows():
    assert backward(262_144, 128)["parts"] == 128
    assert backward(262_143, 128)["parts"] == 132


def test_the_kernel_is_the_kinds():
    assert "Layer" in backward(100, 1024, op="layer_norm")["kernel"]
    assert "Rms" in backward(100, 1024)["kernel"]


@pytest.mark.parametrize("op", OPS)
def test_alignment_decides_on_vectors(make, op):
    assert forward(8, 1024, op=op, make=make)["vector_bytes"] == 16
    assert forward(8, 1024, op=op, make=make, address=ADDRESS + 2)["vector_bytes"] == 2
    assert forward(8, 1024, op=op, make=make, strides=(1030, 1))["vector_bytes"] == 2
    assert forward(8, 1024, op=op, make=make, strides=(1032, 1))["vector_bytes"] == 16
    assert forward(8, 1024, op=op, make=make, strides=(1, 8))["vector_bytes"] == 2


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op):
    assert forward(0, 1024, op=op)["kernel"] == "none"
    assert backward(0, 1024, op=op)["kernel"] == "none"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (
            TypeError,
            "`x` must have dtype float32, bfloat16 or float16, got int8",
            {"x": ((4, 64), "int8")},
        ),
        (ValueError, r"`x` must have at least 1 column, got \[4, 0\]", {"x": ((4, 0), "bfloat16")}),
        (
            NotImplementedError,
            "rows are supported up to 131072 columns, got 131080",
            {"x": ((4, 131_080), "bfloat16")},
        ),
        (TypeError, "`weight` must have dtype bfloat16 or float32", {"weight": ((64,), "float16")}),
        (
            ValueError,
            r"`weight` must have shape \[N\] = \[64\], got \[32\]",
            {"weight": ((32,), "bfloat16")},
        ),
        (ValueError, r"`bias` must have shape \[N\] = \[64\]", {"bias": ((65,), "float32")}),
        (
            ValueError,
            r"`residual` must have the shape of `x`, \[4, 64\]",
            {"residual": ((3, 64), "bfloat16")},
        ),
        (
            TypeError,
            "`residual` must have dtype bfloat16, got float32",
            {"residual": ((4, 64), "float32")},
        ),
        (
            ValueError,
            r"`out` must have the shape of `x`, \[4, 64\]",
            {"out": ((4, 32), "bfloat16")},
        ),
        (TypeError, "`out` must have dtype bfloat16, got float32", {"out": ((4, 64), "float32")}),
    ],
)
def test_bad_arguments(make, op, error, text, changes):
    given = {
        "x": ((4, 64), "bfloat16"),
        "weight": ((64,), "bfloat16"),
        "bias": ((64,), "bfloat16"),
        "residual": ((4, 64), "bfloat16"),
        "out": ((4, 64), "bfloat16"),
        "residual_out": ((4, 64), "bfloat16"),
    } | changes
    values = [make(*shape, dtype=dtype) for shape, dtype in given.values()]
    with pytest.raises(error, match=f"^{op}: {text}"):
        getattr(_C, f"{op}_plan")(*values, 1e-5)


def test_devices(make):
    with pytest.raises(ValueError, match="rms_norm: `x` must be a CUDA tensor, got a CPU tensor"):
        forward(4, 64, make=make, device="cpu")
    with pytest.raises(TypeError, match="rms_norm: expected 7 positional arguments, got 1"):
        _C.rms_norm_plan(make(4, 64))


def test_strides_that_are_no_rows(make):
    x = make(4, 5, 64, strides=(64, 1000, 1))
    with pytest.raises(NotImplementedError, match="`x` must have rows at one distance"):
        _C.rms_norm_plan(x, None, None, None, make(4, 5, 64, dtype="float32"), None, 1e-5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("residual", "residual_out", "came"), [(True, False, "residual"), (False, True, "residual_out")]
)
def test_a_residual_comes_with_its_output(make, op, residual, residual_out, came):
    x, other, out = make(4, 64), make(4, 64), make(4, 64)
    text = f"{op}: `residual` and `residual_out` must come together, got only `{came}`"
    given = (other if residual else None, out, other if residual_out else None)
    with pytest.raises(ValueError, match=text):
        getattr(_C, f"{op}_plan")(x, None, None, *given, 1e-5)


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_parameters_need_a_workspace(make, op):
    tensors = [make(4, 64), make(64), make(4, 64), None, make(4, 64), make(64), None]
    plan = getattr(_C, f"{op}_backward_plan")
    with pytest.raises(ValueError, match="gradients of parameters need a workspace"):
        plan(*tensors, None, 1e-5)
    with pytest.raises(ValueError, match=r"`workspace` must have shape \[2, parts, N\]"):
        plan(*tensors, make(2, 1, 63), 1e-5)
    parts = plan(*tensors[:5], None, None, None, 1e-5)["parts"]
    assert plan(*tensors, make(2, parts, 64), 1e-5)["parts"] == parts
