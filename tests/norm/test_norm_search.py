# SPDX-License-Identifier: Apache-2.0
"""Shapes of the norms' gradients on trial: plans, without a GPU; and which a search would try."""

import importlib.util
import threading
from pathlib import Path

import pytest
from support.norm_plan import BYTES, OPS, backward

from tiercel import _C

SEARCH = Path(__file__).parents[2] / "benchmarks" / "norm_shapes.py"


@pytest.fixture
def trial():
    yield _C.norm_try_backward_shape
    _C.norm_try_backward_shape()


@pytest.fixture
def search():
    spec = importlib.util.spec_from_file_location("norm_shapes", SEARCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_trial_is_this_threads_until_it_ends(trial):
    tables = backward(16384, 4096)
    trial(3, 1, 1, 192, 2, 1, 0, 0)
    tried = backward(16384, 4096)
    assert tried["kernel"] != tables["kernel"] and "vectors=3, rows=1" in tried["kernel"]
    assert (tried["block"], tried["stages"], tried["ahead"]) == (192, 2, 1)
    other = []
    thread = threading.Thread(target=lambda: other.append(backward(16384, 4096)))
    thread.start()
    thread.join()
    assert other == [tables]
    trial()
    assert backward(16384, 4096) == tables


@pytest.mark.parametrize(
    "shape",
    [
        (0, 1, 1, 256, 2, 0, 0, 0),
        (4, 0, 1, 256, 2, 0, 0, 0),
        (4, 1, 3, 256, 2, 0, 0, 0),
        (4, 1, 16, 256, 2, 0, 0, 0),
        (4, 1, 1, 0, 2, 0, 0, 0),
        (4, 1, 1, 100, 2, 0, 0, 0),
        (4, 1, 1, 1024, 2, 0, 0, 0),
        (2, 2, 1, 256, 1, 0, 0, 0),
        (4, 1, 1, 256, 9, 0, 0, 0),
        (4, 1, 1, 256, 2, 9, 0, 0),
    ],
)
def test_bad_shapes(trial, shape):
    tables = backward(16384, 4096)
    with pytest.raises(ValueError, match=r"norm_try_backward_shape: expected .*, got"):
        trial(*shape)
    assert backward(16384, 4096) == tables


def test_bad_arguments(trial):
    with pytest.raises(TypeError, match="expected 8 positional arguments, got 3"):
        trial(4, 1, 1)
    with pytest.raises(TypeError):
        trial("4", 1, 1, 256, 2, 0, 0, 0)
    with pytest.raises(ValueError, match="`ahead` must be from 0 to 1000000, got -1"):
        trial(4, 1, 1, 256, 2, -1, 0, 0)
    with pytest.raises(ValueError, match="`threads` must be from 0 to 1000000, got 1099511627776"):
        trial(4, 1, 1, 2**40, 2, 0, 0, 0)


@pytest.mark.parametrize(
    ("shape", "op", "dtype", "columns"),
    [
        ((5, 1, 1, 256, 2, 0, 0, 0), "rms_norm", "bfloat16", 4096),  # nobody has five vectors
        ((2, 1, 1, 256, 2, 0, 0, 0), "rms_norm", "bfloat16", 520),  # of one warp only
        ((2, 1, 2, 256, 2, 0, 0, 0), "rms_norm", "bfloat16", 512),  # of one block, too
        ((4, 1, 2, 256, 2, 0, 0, 0), "rms_norm", "bfloat16", 16392),  # longer than two blocks
        ((4, 1, 1, 512, 2, 0, 1, 1), "rms_norm", "bfloat16", 16384),  # no kernel adds two up
        ((4, 1, 1, 512, 2, 0, 1, 1), "layer_norm", "bfloat16", 16392),  # a row has two blocks
        ((4, 1, 1, 512, 2, 0, 1, 1), "layer_norm", "bfloat16", 1024),  # a block has many rows
    ],
)
def test_what_no_kernel_could_have(trial, shape, op, dtype, columns):
    trial(*shape)
    with pytest.raises(NotImplementedError, match=f"{op}: no kernel for rows of {columns}"):
        backward(4096, columns, dtype, op=op)


def test_pairs_can_be_tried(trial):
    trial(4, 1, 1, 512, 2, 0, 1, 1)
    assert backward(4096, 16384, op="layer_norm")["parts"] == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_all_candidates_have_kernels(trial, search, op, dtype):
    for columns in (64, 320, 768, 1152, 4608, 9216, 16384, 28672, 65536):
        shapes = search.candidates(columns, BYTES[dtype])
        assert 24 <= len(set(shapes)) == len(shapes) <= 600, columns
        for shape in shapes:
            trial(*shape)
            plan = backward(16384, columns, dtype, op=op)
            vectors, _, cluster, threads = shape[:4]
            assert plan["cluster"] == cluster and plan["block"] <= threads
            need = -(-columns * BYTES[dtype] // 16)
            assert vectors * plan["threads_per_row"] * cluster >= need


def test_a_search_times_the_tables_and_the_fastest_again(search):
    first = {None: 30.0, "slow": 50.0, "good": 20.0, "lucky": 10.0, "none": None}
    again = {None: 31.0, "good": 21.0, "lucky": 40.0}
    right = []

    class Fake(search.Search):
        def __init__(self):
            pass

        def replay(self, shape, checked=False):
            if checked:
                right.append(shape)
            return first[shape] and (shape,)

        def microseconds(self, replay, count):
            return (first if count < 20 else again)[replay[0]]

    assert Fake().run(["slow", "good", "lucky", "none"], 2) == again
    assert right == [None, "lucky", "good"]


def test_a_line_for_the_table(search):
    assert search.line(768, 2, 16384, (3, 1, 1, 256, 3, 4, 1, 0), 26.99) == (
        "{96, 64, {3, 1, 1, 256, 3, 4, true}},  // 768, 16384: 27.0, 48 MB"
    )
    assert search.line(5376, 2, 16384, (3, 1, 1, 224, 2, 0, 0, 0), 184.3) == (
        "{672, 40, {3, 1, 1, 224, 2}},  // 5376, 16384: 184.3, 336 MB"
    )
    assert search.line(4096, 4, 8192, (8, 1, 1, 128, 2, 0, 0, 0), 143.6) == (
        "{1024, 64, {8, 1, 1, 128, 2}},  // 4096, 8192: 143.6, 256 MB"
    )
    assert search.line(16384, 2, 4096, (4, 1, 1, 512, 2, 0, 1, 1), 108.6) == (
        "{2048, 64, {4, 1, 1, 512, 2, 0, true, true}},  // 16384, 4096: 108.6, 256 MB"
    )
