# SPDX-License-Identifier: Apache-2.0
"""The batch-invariant mode: plans, of which none needs PyTorch or a GPU, and the mode's state."""

import os
import subprocess
import sys
import threading

import pytest
from support.dlpack_tensor import ExchangeTensor

import tiercel
from tiercel import _C

ROWS = (1, 2, 16, 17, 64, 100, 300, 1000, 8192, 100_000)
NO_MORE = {"grid", "workspace", "dynamic_smem"}  # of what a launch's rows may change


def tensor(*shape, dtype="bfloat16"):
    return ExchangeTensor(*shape, dtype=dtype)


def norm(op, columns, residual, dtype="bfloat16"):
    def plan(rows):
        x, given, out, added = (tensor(rows, columns, dtype=dtype) for _ in range(4))
        both = (given, added) if residual else (None, None)
        return getattr(_C, f"{op}_plan")(x, None, None, both[0], out, both[1], 1e-5)

    return plan


def norm_quant(op, columns):
    parameters = [None] * (2 if op == "layer_norm_quant" else 1)

    def plan(rows):
        x, q = tensor(rows, columns), tensor(rows, columns, dtype="float8_e4m3fn")
        scale = tensor(rows, 1, dtype="float32")
        return getattr(_C, f"{op}_plan")(x, q, scale, *parameters, 1, 1e-6, None, None)

    return plan


def softmax(columns, log=False):
    return lambda rows: _C.softmax_plan(
        tensor(rows, columns), None, tensor(rows, columns), 1.0, log
    )


def cross_entropy(columns):
    def plan(rows):
        logits, grad = (tensor(rows, columns) for _ in range(2))
        target, loss = tensor(rows, dtype="int64"), tensor(rows, dtype="float32")
        return _C.cross_entropy_plan(logits, target, None, None, loss, grad, -100, 0.0, 0.0, None)

    return plan


def reduce(columns):
    def plan(rows):
        return _C.reduce_plan(tensor(rows, columns), tensor(rows), None, 1, 0)

    return plan


def reduce_columns(length):
    def plan(rows):
        return _C.reduce_plan(tensor(rows, length, 64), tensor(rows, 64), None, 1, 0)

    return plan


def topk(experts):
    def plan(rows):
        results = tensor(rows, 8, dtype="float32"), tensor(rows, 8, dtype="int32")
        return _C.topk_softmax_plan(tensor(rows, experts), *results, True, False)

    return plan


def paged(heads, d, columns=40):
    def plan(rows):
        caches = [tensor(100, 16, 2, d) for _ in range(2)]
        shapes = ((rows, columns), (rows,), (rows + 1,))
        tables = [tensor(*shape, dtype="int32") for shape in shapes]
        q, out = (tensor(rows, heads, d) for _ in range(2))
        options = (True, None, None, None, None)
        rest = (None, 1, None, None, out, None, *options)
        return _C.paged_attention_plan(q, *caches, *tables, *rest)

    return plan


def decode(d, cache="bfloat16"):
    def plan(rows):
        caches = [tensor(100, 16, 2, d, dtype=cache) for _ in range(2)]
        table, lengths = tensor(rows, 40, dtype="int32"), tensor(rows, dtype="int32")
        q, out = (tensor(rows, 1, 8, d) for _ in range(2))
        rest = (None, None, None, None, None, -1, 0, 0.1, 0.0, -1, 0)
        return _C.decode_attention_plan(q, *caches, table, lengths, out, *rest)

    return plan


PLANS = {
    "rms_norm": [norm("rms_norm", n, r) for n in (512, 1024, 4096, 16384) for r in (False, True)],
    "layer_norm": [norm("layer_norm", n, False, t) for n in (512, 4096) for t in ("float32",)],
    "rms_norm_quant": [norm_quant("rms_norm_quant", n) for n in (128, 4096, 16384)],
    "layer_norm_quant": [norm_quant("layer_norm_quant", n) for n in (128, 4096, 16384)],
    "softmax": [softmax(n) for n in (128, 4096, 151936)],
    "log_softmax": [softmax(n, True) for n in (1001, 32000)],
    "cross_entropy": [cross_entropy(n) for n in (1000, 32000, 151936)],
    "reduce": [reduce(n) for n in (64, 1024, 65536, 1 << 20)],
    "reduce columns": [reduce_columns(n) for n in (100, 5000)],
    "topk_softmax": [topk(n) for n in (8, 128, 256)],
    "paged_attention": [paged(8, d, n) for d in (64, 128) for n in (40, 400)],
    "decode_attention": [decode(128), decode(256), decode(128, "float8_e4m3fn")],
}


def differing(plan):
    """The fields of a plan that depend on the number of rows."""
    first, *others = (plan(rows) for rows in ROWS)
    return {name for other in others for name in first if other[name] != first[name]}


@pytest.mark.parametrize("op", PLANS)
def test_a_plan_does_not_depend_on_the_rows(op):
    changed = [differing(plan) - NO_MORE for plan in PLANS[op]]
    assert any(changed)  # without the mode
    with tiercel.batch_invariant():
        for plan in PLANS[op]:
            # Blocks hold several rows, each its own, and prefetch more or fewer. `parts` are blocks
            # of a launch; a block may have all of a tile, in the same order.
            others = {"kernel", "combine"} if op == "paged_attention" else set()
            assert differing(plan) - NO_MORE - others <= {"block", "ahead", "parts"}


def linear(rows, n, k, split_only=False):
    x, w, out = tensor(rows, k), tensor(n, k), tensor(rows, n)
    return _C.linear_act_plan(x, w, None, None, out, None, 0)


def test_products_are_split_by_the_size_of_the_weight():
    """Those of few columns, whatever the rows are, and no others."""
    sizes = [(n, k) for n in (264, 1024, 4096) for k in (4096, 14336)]
    assert any(linear(1, *s)["splits"] > 1 for s in sizes)
    with tiercel.batch_invariant():
        for rows in ROWS:
            assert all(linear(rows, *s)["splits"] == 1 for s in sizes)
            few = [linear(rows, n, k) for n in (8, 128, 256) for k in (64, 2048, 14336)]
            assert [plan["splits"] for plan in few] == 3 * [1, 4, 8]


def float8(rows, n, k):
    x, w = (tensor(size, k, dtype="float8_e4m3fn") for size in (rows, n))
    scales = [tensor(size, 1, dtype="float32") for size in (rows, n)]
    return _C.fp8_linear_plan(x, w, *scales, None, tensor(rows, n), 0)


def test_float8_products_have_narrow_tiles():
    assert float8(8192, 4096, 4096)["tile_n"] > 64
    with tiercel.batch_invariant():
        for rows in ROWS:
            got = float8(rows, 4096, 4096)
            assert (got["tile_n"], got["splits"]) == (64, 1)


def test_latent_attention_has_parts_of_a_fixed_size():
    def plan(batch, columns):
        q, out = tensor(batch, 1, 128, 576), tensor(batch, 1, 128, 512)
        table, lengths = tensor(batch, columns, dtype="int32"), tensor(batch, dtype="int32")
        cache = tensor(1000, 64, 576)
        return _C.mla_decode_plan(q, cache, table, lengths, None, out, None, 0.1, 512)

    with tiercel.batch_invariant():
        for batch in (1, 7, 200):
            for columns, parts in ((1, 1), (16, 1), (17, 2), (160, 10)):
                got = plan(batch, columns)
                assert got["lanes"] == batch * parts and got["grid"] == 2 * batch * parts
                assert (got["workspace"] > 0) == (parts > 1)
        with pytest.raises(NotImplementedError, match="page_table.*batch-invariant mode"):
            plan(8192, 8192 * 16)


def test_the_mode_is_the_threads():
    seen = []

    def look():
        seen.append(tiercel.is_batch_invariant())

    assert not tiercel.is_batch_invariant()
    with tiercel.batch_invariant():
        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()
        with tiercel.batch_invariant(False):
            look()
        look()
    look()
    assert seen == [True, False, False, True, False]


def test_the_process_has_a_mode():
    try:
        tiercel.set_batch_invariant(True)
        assert tiercel.is_batch_invariant()
        with tiercel.batch_invariant(False):
            assert not tiercel.is_batch_invariant()
        other = []
        thread = threading.Thread(target=lambda: other.append(tiercel.is_batch_invariant()))
        thread.start()
        thread.join()
        assert other == [True]
    finally:
        tiercel.set_batch_invariant(False)
    assert not tiercel.is_batch_invariant()


def test_an_exception_ends_the_mode():
    with pytest.raises(KeyError), tiercel.batch_invariant():
        raise KeyError
    assert not tiercel.is_batch_invariant()


@pytest.mark.parametrize("call", ["batch_invariant", "set_batch_invariant"])
def test_the_mode_is_a_bool(call):
    with pytest.raises(TypeError, match=f"^{call}: `on` must be a bool, got int$"):
        getattr(tiercel, call)(1)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_environment(value, on):
    code = "import tiercel; print(tiercel.is_batch_invariant())"
    given = os.environ | {"TIERCEL_BATCH_INVARIANT": value}
    done = subprocess.run([sys.executable, "-c", code], env=given, stdout=-1, text=True, check=True)
    assert done.stdout.strip() == str(on)
