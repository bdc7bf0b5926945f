# SPDX-License-Identifier: Apache-2.0
"""fused_moe of few tokens in one launch: checks and plans, without PyTorch or a GPU."""

import pytest
from support import few_tokens
from support.dlpack_tensor import ExchangeTensor
from support.few_tokens import E4M3

from tiercel import _C
from tiercel.ops.moe.tiling import fits_single_launch

T, E, K, H, I = 4, 64, 8, 2048, 1024  # noqa: E741


def plan(make, tokens=T, experts=E, k=K, hidden=H, i=I, of="rows", **changes):
    given = few_tokens.arguments(tokens, experts, k, hidden, i, of, make) | changes
    return _C.fused_moe_few_tokens_plan(*given.values())


def fits(got, slot_bytes):
    assert got["grid"] == 132 and got["block"] == 544
    assert got["slot_bytes"] == slot_bytes
    assert 8 <= got["slots"] <= 16
    # More than half of a multiprocessor's, which two grids at once would share.
    assert 114 * 1024 < got["dynamic_smem"] <= 226 * 1024
    assert got["dynamic_smem"] >= got["slots"] * slot_bytes


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1, 8), (4, 8), (3, 6), (16, 2), (1, 32)])
def test_plans(make, index, tokens, k):
    got = plan(make, tokens, k=k, topk_ids=make(tokens, k, dtype=index))
    assert got["kernel"] == "fused_moe_few_tokens<Rows>"
    fits(got, 8 * H)


@pytest.mark.parametrize("of", ["rows", "experts", "blocks"])
@pytest.mark.parametrize(("hidden", "i"), [(2048, 1024), (2048, 768), (2304, 768), (512, 256)])
def test_scales(make, of, hidden, i):
    got = plan(make, hidden=hidden, i=i, of=of)
    name = "Blocks" if of == "blocks" else "Rows"
    assert got["kernel"] == f"fused_moe_few_tokens<{name}>"
    fits(got, max(8 * hidden, 16 * i))


def test_nothing_to_do(make):
    assert plan(make, 0)["kernel"] == "none"


@pytest.mark.parametrize("sizes", [{"tokens": 33, "k": 1}, {"tokens": 5}, {"k": 0}, {"k": 33}])
def test_only_few_ids_are_taken(make, sizes):
    with pytest.raises(NotImplementedError, match="`topk_ids` must have 1 to 32 elements for a si"):
        plan(make, **sizes)


@pytest.mark.parametrize(
    "sizes", [{"hidden": 16384}, {"i": 8192}, {"hidden": 4096}, {"tokens": 32, "k": 1, "i": 2048}]
)
def test_what_does_not_fit(make, sizes):
    with pytest.raises(
        NotImplementedError, match="`w_down` must leave room in shared memory for a"
    ):
        plan(make, **sizes)


def test_what_the_kernels_do_not_count(make):
    with pytest.raises(NotImplementedError, match="`w_down` must be smaller for a single launch"):
        plan(make, hidden=1 << 18)


@pytest.mark.parametrize("of", ["rows", "blocks"])
@pytest.mark.parametrize(("tokens", "k"), [(1, 8), (4, 8), (3, 6), (4, 2)])
def test_what_is_chosen_fits(tokens, k, of):
    """Never true where the launcher says no, and seldom false where it says yes."""
    wrong = 0
    for hidden in range(128, 4096, 128):
        for inner in range(128, 2048, 128):
            try:
                plan(ExchangeTensor, tokens, k=k, hidden=hidden, i=inner, of=of)
            except NotImplementedError:
                assert not fits_single_launch(tokens, k, hidden, inner)
            else:
                wrong += not fits_single_launch(tokens, k, hidden, inner)
    assert wrong <= 3 * 31


def test_what_never_fits():
    for sizes in ((5, 1, 512, 512), (4, 9, 512, 512), (1, 0, 512, 512), (1, 8, 576, 512)):
        assert not fits_single_launch(*sizes)


@pytest.mark.parametrize("of", ["rows", "experts", "blocks"])
@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"hidden": 2112}, "`w_up` must have a multiple of 128 columns, got [64, 2048, 2112]"),
        ({"i": 1088}, "`w_down` must have a multiple of 128 columns, got [64, 2048, 1088]"),
        ({"i": 0}, "`w_down` must have a multiple of 128 columns, got [64, 2048, 0]"),
    ],
)
def test_sizes_that_are_not_supported(make, of, sizes, text):
    with pytest.raises(NotImplementedError) as info:
        plan(make, of=of, **sizes)
    assert str(info.value) == f"fused_moe: {text}"


def test_strides(make):
    wide = make(T, H, dtype="bfloat16", strides=(H + 8, 1))
    apart = make(E, 2 * I, H, dtype=E4M3, strides=(2 * I * H + 64, H, 1))
    assert plan(make, x=wide, w_up=apart)["slots"] > 0
    for name, bad, text in (
        ("x", make(T, H, dtype="bfloat16", strides=(H + 4, 1)), "have rows of neighbouring elem"),
        (
            "w_up",
            make(E, 2 * I, H, dtype=E4M3, strides=(2 * I * (H + 16), H + 16, 1)),
            "have an expert's rows one behind the other, got strides",
        ),
        (
            "w_down",
            make(E, H, I, dtype=E4M3, strides=(H * I + 8, I, 1)),
            "have rows of neighbouring elements at multiples of 16 bytes",
        ),
    ):
        with pytest.raises(NotImplementedError, match=f"fused_moe: `{name}` must {text}"):
            plan(make, **{name: bad})


BAD = [
    ("x", lambda m: m(T, H), TypeError, "`x` must have dtype bfloat16, got float32"),
    (
        "w_up",
        lambda m: m(E, 2 * I, H, dtype="bfloat16"),
        TypeError,
        "`w_up` must have dtype float8_e4m3fn, got bfloat16",
    ),
    (
        "w_down",
        lambda m: m(E, H, I, dtype="float16"),
        TypeError,
        "`w_down` must have dtype float8_e4m3fn, got float16",
    ),
    (
        "w_up",
        lambda m: m(E, 2 * I + 2, H, dtype=E4M3),
        ValueError,
        "`w_up` must have shape [E, 2 * I, H] = [64, 2048, 2048], got [64, 2050, 2048]",
    ),
    (
        "w_down",
        lambda m: m(E, H + 2, I, dtype=E4M3),
        ValueError,
        "`w_down` must have shape [E, H, I] = [64, 2048, 1024], got [64, 2050, 1024]",
    ),
    (
        "topk_weights",
        lambda m: m(T, K + 1),
        ValueError,
        "`topk_weights` must have shape [T, k] = [4, 8], got [4, 9]",
    ),
    (
        "topk_ids",
        lambda m: m(T + 1, K, dtype="int32"),
        ValueError,
        "`topk_ids` must have shape [T, k] = [4, 8], got [5, 8]",
    ),
    (
        "topk_ids",
        lambda m: m(T, K, dtype="int16"),
        TypeError,
        "`topk_ids` must have dtype int32 or int64, got int16",
    ),
    (
        "topk_ids",
        lambda m: m(T, K, dtype="int32", strides=(2 * K, 2)),
        ValueError,
        "`topk_ids` must be contiguous, got strides [16, 2] for shape [4, 8]",
    ),
    (
        "out",
        lambda m: m(T, H, dtype="float16"),
        TypeError,
        "`out` must have dtype bfloat16, got float16",
    ),
    (
        "w_down",
        lambda m: m(E, H, I, dtype=E4M3, device="cpu"),
        ValueError,
        "`w_down` must be on the device of `x`, a tensor on cuda:0, got a CPU tensor",
    ),
    ("activation", lambda m: 4, ValueError, "no activation has the index 4"),
    (
        "w_up_scale",
        lambda m: m(E, 2 * I, dtype="float16"),
        TypeError,
        "`w_up_scale` must have dtype float32, got float16",
    ),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), BAD)
def test_bad_arguments_are_named(make, name, value, error, text):
    with pytest.raises(error) as info:
        plan(make, **{name: value(make)})
    assert str(info.value) == f"fused_moe: {text}"


BAD_SCALES = [
    ({"w_up_scale": (E, 5)}, ValueError, "`w_up_scale` must have shape [E, rows of weights] = [64"),
    (
        {"w_down_scale": (E, 16, 9)},
        ValueError,
        "`w_down_scale` must have shape [E, rows of weights",
    ),
    (
        {"w_down_scale": (E, 16, 8)},
        NotImplementedError,
        "`w_down_scale` must have blocks where `w_up_scale` has, got [64, 16, 8]",
    ),
]


@pytest.mark.parametrize(("sizes", "error", "text"), BAD_SCALES)
def test_bad_scales_are_named(make, sizes, error, text):
    changes = {name: size and make(*size) for name, size in sizes.items()}
    with pytest.raises(error) as info:
        plan(make, **changes)
    assert str(info.value).startswith(f"fused_moe: {text}")
