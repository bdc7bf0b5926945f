# SPDX-License-Identifier: Apache-2.0
"""attention_backward's checks and its choice of kernel: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ExchangeTensor

from tiercel import _C

NO_LIMIT = -1


def arguments(make, shape=(2, 300, 8, 128), keys=(300, 8), dtype="bfloat16", d_v=None, **given):
    batch, length, heads, d = shape
    k_shape, sums = (batch, *keys, d), (batch, heads, length)
    out, v_shape = (*shape[:3], d_v or d), (batch, *keys, d_v or d)
    shapes = {"grad": out, "q": shape, "k": k_shape, "v": v_shape, "out": out, "lse": sums}
    shapes |= {"grad_lse": None, "dq": shape, "dk": k_shape, "dv": v_shape}
    dtypes = {"lse": "float32", "grad_lse": "float32"}

    def tensor(name):
        size = shapes[name]
        return None if size is None else make(*size, dtype=dtypes.get(name, dtype))

    return [given.get(name) or tensor(name) for name in shapes]


def plan(make, *sizes, left=NO_LIMIT, right=NO_LIMIT, softcap=0.0, deterministic=False, **given):
    tensors = arguments(make, *sizes, **given)
    return _C.attention_backward_plan(*tensors, None, left, right, 0.1, softcap, deterministic)


@pytest.mark.parametrize("d", [8, 40, 64, 72, 96, 104, 128])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize(("dtype", "short"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_every_head_dimension_has_a_kernel(d, softcap, dtype, short):
    for seq in (1, 64, 200, 5000):
        got = plan(ExchangeTensor, (2, seq, 4, d), (seq, 2), dtype=dtype, softcap=softcap)
        columns = min(size for size in (64, 96, 128) if size >= d)
        capped = "_capped" if softcap else ""
        rows = 128 if d <= 64 else 64
        assert got["kernel"] == f"attention_backward_{short}_d{columns}_{rows}x128{capped}"
        assert got["dynamic_smem"] <= 232448  # what a block may have on Hopper
        assert got["grid"] == min(-(-seq // 128) * 2 * 2, 132)
        blocks = 2 * 4 * -(-seq // rows)
        tile_d = 64 if d <= 64 else 128
        assert got["workspace"] == blocks * (2 * rows + rows * tile_d + 1) + 1


def test_tiles_of_a_causal_mask_are_mixed_as_the_cache_holds_them(make):
    sizes = ((2, 1024, 16, 128), (1024, 8))
    assert plan(make, *sizes)["band"] == 1
    assert plan(make, *sizes, right=0)["band"] == 16  # heads of keys, of both entries: 2 MB each
    assert plan(make, *sizes, right=0, left=64)["band"] == 1
    assert plan(make, (2, 4096, 16, 64), (4096, 16), right=0)["band"] == 16
    assert plan(make, (2, 30000, 16, 128), (30000, 16), right=0)["band"] == 1


@pytest.mark.parametrize(
    ("batch", "seq", "heads", "band"),
    [
        (2, 3000, (24, 8), 8),
        (2, 4096, (32, 8), 4),
        (1, 8192, (32, 8), 2),
        (1, 6000, (40, 8), 4),
        (4, 4096, (16, 16), 8),
        (1, 2048, (32, 8), 8),
        (1, 4096, (39, 13), 5),
        (1, 4096, (111, 37), 5),
        (1, 32768, (32, 8), 1),
    ],
)
def test_tiles_in_flight_are_of_one_section(make, batch, seq, heads, band):
    """A section's heads have about as many tiles as there are blocks, and sections are equal."""
    got = plan(make, (batch, seq, heads[0], 128), (seq, heads[1]), right=0)
    assert got["band"] == band and got["grid"] == min(-(-seq // 128) * batch * heads[1], 132)


def test_in_order_late_keys_come_first(make):
    for options, descending in (
        ({}, False),
        ({"right": 0}, True),
        ({"right": 0, "left": 9}, False),
    ):
        assert plan(make, **options, deterministic=True)["descending"] is descending
        assert plan(make, **options)["descending"] is False


@pytest.mark.parametrize(("shape", "keys"), [((0, 5, 2, 64), (5, 2)), ((2, 0, 2, 64), (5, 2))])
def test_nothing_to_launch(make, shape, keys):
    got = plan(make, shape, keys)
    assert got["kernel"] == "none" and got["workspace"] == 0


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (TypeError, "`grad` must have dtype bfloat16", {"grad": ((2, 300, 8, 128), "float16")}),
        (ValueError, "`dk` must have shape", {"dk": ((2, 300, 4, 128), "bfloat16")}),
        (ValueError, "`lse` must have shape", {"lse": ((2, 300, 8), "float32")}),
        (TypeError, "`grad_lse` must have dtype float32", {"grad_lse": ((2, 8, 300), "float16")}),
    ],
)
def test_bad_arguments(make, error, text, changes):
    given = {name: make(*shape, dtype=dtype) for name, (shape, dtype) in changes.items()}
    with pytest.raises(error, match=f"attention_backward: {text}"):
        plan(make, **given)


@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (136, 8), (144, 64)])
def test_more_columns_of_keys_than_of_values(make, d, d_v):
    got = plan(make, (2, 300, 4, d), (300, 2), d_v=d_v)
    assert got["kernel"] == "attention_backward_bf16_d192v128_64x128"
    assert got["dynamic_smem"] <= 232448
    assert (got["tile_m"], got["tile_n"], got["grid"]) == (64, 128, 3 * 2 * 2)
    blocks = 2 * 4 * 5
    assert got["workspace"] == blocks * (2 * 64 + 64 * 192 + 1) + 1


@pytest.mark.parametrize(
    ("d", "d_v", "columns"), [(64, 8, 64), (40, 96, 96), (96, 128, 128), (64, 128, 128)]
)
def test_another_head_dimension_of_values_takes_tiles_for_both(make, d, d_v, columns):
    got = plan(make, (2, 300, 4, d), (300, 2), d_v=d_v)
    rows = 128 if columns == 64 else 64
    assert got["kernel"] == f"attention_backward_bf16_d{columns}_{rows}x128"


@pytest.mark.parametrize(
    ("d", "d_v", "options"),
    [
        (136, 136, {}),
        (64, 136, {}),
        (200, 128, {"right": 0, "deterministic": True}),
        (256, 256, {"softcap": 30.0}),
        (192, 128, {"softcap": 30.0}),
        (192, 128, {"dtype": "float16"}),
        (256, 256, {"dtype": "float16", "softcap": 30.0}),
    ],
)
def test_wide_heads(make, d, d_v, options):
    got = plan(make, (2, 300, 4, d), (500, 2), d_v=d_v, **options)
    short = "fp16" if options.get("dtype") == "float16" else "bf16"
    assert got["kernel"] == f"attention_backward_{short}_d256_64x64"
    assert got["dynamic_smem"] <= 232448
    assert (got["tile_m"], got["tile_n"], got["grid"]) == (64, 64, 8 * 2 * 2)
    assert got["descending"] is options.get("deterministic", False)
    blocks = 2 * 4 * 5  # and no list: it is of packed sequences
    assert got["workspace"] == blocks * (2 * 64 + 64 * 256 + 1) + 1


@pytest.mark.parametrize(
    ("name", "d", "d_v"), [("q", 264, 128), ("q", 100, 128), ("v", 128, 100), ("v", 256, 264)]
)
def test_what_head_dimensions_have_no_kernel(make, name, d, d_v):
    due = f"attention_backward: `{name}` must have a head dimension that is a multiple of 8 up to "
    due += f"256 for the precompiled kernels, got {d if name == 'q' else d_v}"
    with pytest.raises(NotImplementedError, match=f"^{due}$"):
        plan(make, (2, 300, 8, d), d_v=d_v)


def test_gradients_have_their_tensors_head_dimensions(make):
    for name, columns in (("grad", 128), ("dq", 192), ("dk", 192), ("dv", 128)):
        other = make(2, 300, 8, 320 - columns, dtype="bfloat16")
        with pytest.raises(ValueError, match=f"`{name}` must have shape .*{columns}\\]"):
            plan(make, (2, 300, 8, 192), d_v=128, **{name: other})


def test_a_workspace_is_asked_for(make):
    tensors = arguments(make)
    with pytest.raises(TypeError, match="`workspace` must be a tensor, got None"):
        _C.attention_backward(*tensors, None, NO_LIMIT, NO_LIMIT, 0.1, 0.0, False)
