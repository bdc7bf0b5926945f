# SPDX-License-Identifier: Apache-2.0
"""sample's checks and its choice of a launch: neither needs PyTorch or a GPU."""

import pytest
from support.dlpack_tensor import ExchangeTensor

from tiercel import _C

DTYPES = ["float32", "bfloat16", "float16"]
OF_ROWS = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "offsets")
PENALTIES = ("repetition_penalties", "presence_penalties", "frequency_penalties")
TABLES = ("counts", "prompt", "allowed")
NUMBERS = (1.0, 0, 1.0, 0.1, 0, 0, 1.0, 0.0, 0.0)
PLAIN = (1.0, 0, 1.0, 0.0, 0, 0, 1.0, 0.0, 0.0)
WHOLE = {"top_ks": "int32", "seeds": "int64", "offsets": "int64"}


def plan(make, rows, columns, dtype="bfloat16", numbers=NUMBERS, **given):
    tensors = {"logits": make(rows, columns, dtype=dtype)}
    tensors |= dict.fromkeys((*OF_ROWS, *PENALTIES, *TABLES))
    tensors |= {"tokens": make(rows, dtype="int32"), "logprobs": None}
    tensors |= {"top_tokens": None, "top_logprobs": None}
    return _C.sample_plan(*(tensors | given).values(), *numbers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 1024, 1025, 32_000, 50_257, 128_256, 151_936, 262_144])
def test_every_size_has_a_plan_that_holds_it(dtype, columns):
    segments = -(-columns // 1024)
    for rows in (1, 8, 1000, 2**20):
        for penalties in (False, True):
            for logprobs in (False, True):
                given = {}
                if penalties:
                    given["counts"] = ExchangeTensor(rows, columns, dtype="int32")
                if logprobs:
                    given["logprobs"] = ExchangeTensor(rows, dtype="float32")
                got = plan(ExchangeTensor, rows, columns, dtype, **given)
                if got["kernel"].startswith("sample_stream"):
                    assert not penalties and dtype == "bfloat16" and segments > 144
                    assert got["dynamic_smem"] <= 216 << 10 and got["grid"] == 132
                    continue
                held = 4 if penalties or dtype == "float32" else 2
                part = -(-segments // got["blocks_per_row"]) * 1024 * held
                assert got["dynamic_smem"] == part + segments * (24 if logprobs else 16)
                assert got["dynamic_smem"] <= 216 << 10
                assert got["grid"] == rows * got["blocks_per_row"] and got["block"] == 256
                assert got["blocks_per_row"] == 8 or part <= 80 << 10
                assert f"penalties={'true' if penalties else 'false'}" in got["kernel"]


def test_few_rows_are_spread():
    rows = (1, 49, 50, 99, 100, 198, 199)
    got = [plan(ExchangeTensor, n, 65_536, "float16")["blocks_per_row"] for n in rows]
    assert got == [8, 8, 4, 4, 2, 2, 2]
    assert plan(ExchangeTensor, 1, 1000)["blocks_per_row"] == 1
    assert plan(ExchangeTensor, 1, 32_000)["blocks_per_row"] == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_filters_are_streamed(dtype):
    """One block for each multiprocessor, in clusters that make the fewest rounds of rows."""
    rows = (33, 64, 100, 128, 256, 1000)
    got = [plan(ExchangeTensor, n, 128_256, dtype, PLAIN) for n in rows]
    assert all(one["kernel"].startswith("sample_stream") for one in got)
    assert [one["blocks_per_row"] for one in got] == [8, 2, 1, 1, 1, 1]
    assert [one["grid"] for one in got] == [120, 128, 100, 128, 132, 132]
    assert got[0]["block"] == 544 and got[0]["dynamic_smem"] == (128 << 10) + 126 * 32
    few = plan(ExchangeTensor, 16, 128_256, dtype, PLAIN)
    long = plan(ExchangeTensor, 33, 512 * 1024 + 8, "bfloat16", PLAIN)
    half = plan(ExchangeTensor, 64, 128_256, "float16", PLAIN)
    assert all(one["kernel"].startswith("sample<") for one in (few, long, half))


TOP_K = (1.0, 50, 1.0, 0.0, *PLAIN[4:])


@pytest.mark.parametrize("rows", [106, 132, 212, 1000])
@pytest.mark.parametrize("columns", [151_936, 262_144])
def test_long_rows_with_top_k_are_streamed(rows, columns):
    """Eight more warps find the tokens, with copies of their own."""
    for given in ({}, {"top_ps": ExchangeTensor(rows, dtype="float32")}):
        got = plan(ExchangeTensor, rows, columns, "bfloat16", TOP_K, **given)
        assert got["kernel"] == "sample_stream<BFloat16, filters=true>"
        assert got["blocks_per_row"] == 1 and got["grid"] == min(rows, 132) and got["block"] == 768
        assert got["dynamic_smem"] == (192 << 10) + -(-columns // 1024) * 32


@pytest.mark.parametrize(
    ("rows", "columns", "numbers", "dtype"),
    [
        (256, 128_256, TOP_K, "bfloat16"),
        (150, 151_936, TOP_K, "bfloat16"),
        (256, 151_936, TOP_K, "float16"),
        (256, 151_936, (1.0, 65, *TOP_K[2:]), "bfloat16"),
        (256, 151_936, (1.0, 0, 0.9, *TOP_K[3:]), "bfloat16"),
    ],
)
def test_filters_that_are_not_streamed(rows, columns, numbers, dtype):
    assert plan(ExchangeTensor, rows, columns, dtype, numbers)["kernel"].startswith("sample<")


@pytest.mark.parametrize(
    ("numbers", "given"),
    [
        ((1.0, 50, 1.0, 0.0), {}),
        ((1.0, 0, 0.9, 0.0), {}),
        ((1.0, 0, 1.0, 0.1), {}),
        (PLAIN[:4], {"top_ks": ExchangeTensor(64, dtype="int32")}),
        (PLAIN[:4], {"allowed": ExchangeTensor(64, 4008, dtype="int32")}),
        (PLAIN[:4], {"counts": ExchangeTensor(64, 128_256, dtype="int32")}),
    ],
)
def test_what_is_not_streamed(numbers, given):
    got = plan(ExchangeTensor, 64, 128_256, "bfloat16", numbers + PLAIN[4:], **given)
    assert got["kernel"].startswith("sample<")


def test_no_rows():
    assert plan(ExchangeTensor, 0, 1000)["kernel"] == "none"


def test_limits(make):
    assert plan(make, 1, 800_000)["blocks_per_row"] == 8
    assert plan(make, 1, 409_600, "float32")["blocks_per_row"] == 8
    for columns, dtype in ((900_000, "bfloat16"), (450_000, "float32")):
        with pytest.raises(NotImplementedError, match="rows of up to"):
            plan(make, 1, columns, dtype)
    with pytest.raises(NotImplementedError, match="too many rows"):
        plan(make, 2**28, 262_144)


@pytest.mark.parametrize("name", [*OF_ROWS, *PENALTIES])
def test_parameters_of_rows(make, name):
    dtype = WHOLE.get(name, "float32")
    plan(make, 5, 100, **{name: make(5, dtype=dtype)})
    with pytest.raises(ValueError, match=rf"sample: `{name}` must have shape \[T\]"):
        plan(make, 5, 100, **{name: make(6, dtype=dtype)})
    with pytest.raises(TypeError, match=rf"sample: `{name}` must have dtype {dtype}"):
        plan(make, 5, 100, **{name: make(5, dtype="float16")})


@pytest.mark.parametrize("name", TABLES)
def test_tables(make, name):
    columns = 100 if name == "counts" else 4
    plan(make, 5, 100, **{name: make(5, columns, dtype="int32")})
    for shape in ((5, columns + 1), (4, columns), (5,)):
        with pytest.raises(ValueError, match=rf"sample: `{name}` must have shape \[T, "):
            plan(make, 5, 100, **{name: make(*shape, dtype="int32")})
    with pytest.raises(TypeError, match=rf"sample: `{name}` must have dtype int32"):
        plan(make, 5, 100, **{name: make(5, columns, dtype="int64")})


def test_logits_and_results(make):
    with pytest.raises(ValueError, match="`logits` must have at least 1 column"):
        plan(make, 5, 0)
    with pytest.raises(TypeError, match="`logits` must have dtype"):
        plan(make, 5, 100, "int32")
    with pytest.raises(TypeError, match="`tokens` must have dtype int32 or int64"):
        plan(make, 5, 100, tokens=make(5, dtype="float32"))
    with pytest.raises(ValueError, match=r"`tokens` must have shape \[T\]"):
        plan(make, 5, 100, tokens=make(4, dtype="int64"))
    with pytest.raises(ValueError, match=r"`logprobs` must have shape \[T\]"):
        plan(make, 5, 100, logprobs=make(4, dtype="float32"))


def test_top_logprobs(make):
    def of(k, rows=5, dtype="int32", **given):
        tensors = {"top_tokens": make(rows, k, dtype=dtype), "top_logprobs": make(rows, k)}
        return plan(make, 5, 100, **(tensors | given))

    assert of(32)["kernel"] == plan(make, 5, 100)["kernel"]
    with pytest.raises(NotImplementedError, match="up to 32 top log-probabilities .* got 33"):
        of(33)
    with pytest.raises(ValueError, match="`top_tokens` must have at least 1 column, got 0"):
        of(0)
    with pytest.raises(ValueError, match=r"`top_tokens` must have shape \[T, k\]"):
        of(3, rows=4)
    with pytest.raises(TypeError, match="`top_tokens` must have dtype int32"):
        of(3, dtype="int64")
    with pytest.raises(TypeError, match="`top_logprobs` must have dtype float32"):
        of(3, top_logprobs=make(5, 3, dtype="float16"))
    with pytest.raises(ValueError, match=r"`top_logprobs` must have shape \[T, k\]"):
        of(3, top_logprobs=make(5, 4))
    with pytest.raises(ValueError, match="`top_tokens` and `top_logprobs` must be given together"):
        of(3, top_logprobs=None)
