# SPDX-License-Identifier: Apache-2.0
"""Configurations of the norms' gradients: the tuner's, tuned ones, and files of measured ranges."""

import json
import logging

import pytest
from support.norm_plan import BYTES, OPS, backward

from tiercel import _C
from tiercel.core import tuned
from tiercel.workbench.tune import hardware, ops
from tiercel.workbench.tune.problem import Problem, name_of


def test_a_configuration_decides_on_one_call():
    before = backward(16384, 4096)
    given = backward(16384, 4096, config=(3, 1, 1, 192, 2, 1, False, False))
    assert given["kernel"] != before["kernel"] and "vectors=3, rows=1" in given["kernel"]
    assert (given["block"], given["stages"], given["ahead"]) == (192, 2, 1)
    assert backward(16384, 4096) == before
    assert backward(16384, 4096, device=(), config=(3, 1, 1, 192, 2, 1, 0, 0)) == given


@pytest.mark.parametrize(
    "config",
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
@pytest.mark.parametrize("op", OPS)
def test_bad_configurations(op, config):
    with pytest.raises(ValueError, match=rf"{op}: expected a configuration with .*, got"):
        backward(16384, 4096, op=op, config=config)


def test_bad_arguments():
    with pytest.raises(TypeError, match="a configuration must be a tuple of 8 whole numbers"):
        backward(16384, 4096, config=(4, 1, 1))
    with pytest.raises(TypeError):
        backward(16384, 4096, config=("4", 1, 1, 256, 2, 0, 0, 0))
    with pytest.raises(ValueError, match="fields are small and not negative"):
        backward(16384, 4096, config=(4, 1, 1, 256, 2, -1, 0, 0))
    with pytest.raises(ValueError, match="fields are small and not negative"):
        backward(16384, 4096, config=(4, 1, 1, 2**40, 2, 0, 0, 0))


@pytest.mark.parametrize(
    ("config", "op", "dtype", "columns"),
    [
        ((5, 1, 1, 256, 2, 0, 0, 0), "rms_norm", "bfloat16", 4096),  # no kernel has five vectors
        ((2, 1, 1, 256, 2, 0, 0, 0), "rms_norm", "bfloat16", 520),  # only one warp per row
        ((2, 1, 2, 256, 2, 0, 0, 0), "rms_norm", "bfloat16", 512),  # and no cluster
        ((4, 1, 2, 256, 2, 0, 0, 0), "rms_norm", "bfloat16", 16392),  # longer than two blocks
        ((4, 1, 1, 512, 2, 0, 1, 1), "rms_norm", "bfloat16", 16384),  # its kernel has no pairs
        ((4, 1, 1, 512, 2, 0, 1, 1), "layer_norm", "bfloat16", 16392),  # two blocks per row
        ((4, 1, 1, 512, 2, 0, 1, 1), "layer_norm", "bfloat16", 1024),  # several rows per block
    ],
)
def test_configurations_without_a_kernel(config, op, dtype, columns):
    with pytest.raises(NotImplementedError, match=f"{op}: no kernel for rows of {columns}"):
        backward(4096, columns, dtype, op=op, config=config)


def test_pairs_can_be_tried():
    got = backward(4096, 16384, op="layer_norm", config=(4, 1, 1, 512, 2, 0, 1, 1))
    assert got["parts"] == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_the_tuners_candidates_are_launched_as_said(op, dtype):
    tunable = ops.load()[f"{op.replace('_', '-')}-backward"]
    for columns in (64, 320, 768, 1152, 4608, 9216, 16384, 28672, 65536):
        problem = Problem.of(tunable.op, dtype, N=columns)
        found = tunable.candidates(problem, 16384, False, False)
        assert 24 <= len({name_of(c) for c in found}) == len(found) <= 600, columns
        quick = {name_of(c) for c in tunable.candidates(problem, 16384, True, False)}
        assert quick and quick < {name_of(c) for c in found}
        launched = 0
        for c in found:
            config = tuple(tunable.config(c).values())
            needs = tunable.needs(problem, 16384, c)
            plan = backward(16384, columns, dtype, op=op, config=config)
            assert plan["cluster"] == c["cluster"] and plan["block"] <= needs.threads
            need = -(-columns * BYTES[dtype] // 16)
            assert c["vectors"] * plan["threads_per_row"] * c["cluster"] >= need
            if hardware.why_not(needs) is None:
                # Fewer where a weight in shared memory takes the room.
                assert c["stages"] - 2 <= plan["stages"] <= c["stages"]
                launched += plan["stages"] == c["stages"]
        assert launched >= 12


def test_what_the_tuner_does_not_take():
    tunable = ops.load()["rms-norm-backward"]
    for columns, text in ((4, "N must be a multiple of 8"), (131080, "at most 131072 columns")):
        assert text in tunable.invalid(Problem.of(tunable.op, "bfloat16", N=columns), 64)
    assert tunable.invalid(Problem.of(tunable.op, "float32", N=4), 64) is None


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes a file into a folder that operators read; afterwards the package's files count."""
    monkeypatch.setenv("TIERCEL_CONFIGS", str(tmp_path))

    def write(folder, name, data):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(json.dumps(data))

    yield write
    monkeypatch.delenv("TIERCEL_CONFIGS")
    _C.norm_backward_ranges(*(0, 0, 0), None)
    tuned.load_ranges()
    for op in OPS:
        tuned.OPS[f"{op}_backward"].set(0, [("bfloat16", 4096, [])])


CONFIG = {"vectors": 3, "rows": 1, "cluster": 1, "threads": 192, "stages": 3} | {
    "prefetch_rows": 1,
    "even": False,
    "pairs": False,
}


def tuned_file(op, **changes):
    problem = {"N": 4096, "dtype": "bfloat16"}
    head = {"schema": 1, "op": f"{op}_backward", "problem": problem, "device": "Test"}
    return head | {"sources": [{}], "configs": {"4096": CONFIG | changes}}


@pytest.mark.parametrize("op", OPS)
def test_a_tuned_length_takes_the_nearest_number_of_rows(files, op):
    before = {rows: backward(rows, 4096, op=op, device=()) for rows in (2047, 2048, 8192, 8193)}
    files(f"{op}_backward", "N=4096-dtype=bfloat16-device=Test.json", tuned_file(op))
    tuned.load(0, "Test")
    chosen = tuple(CONFIG.values())
    for rows in (2048, 8192):
        got = backward(rows, 4096, op=op, device=())
        assert got != before[rows] and got == backward(rows, 4096, op=op, config=chosen)
    for rows in (2047, 8193):
        assert backward(rows, 4096, op=op, device=()) == before[rows]
    # Other devices, lengths, dtypes and calls with a residual's gradient keep theirs.
    assert backward(2048, 4096, op=op)["ahead"] != 1
    for changes in ({"dtype": "float16"}, {"residual": True}):
        assert backward(2048, 4096, op=op, device=(), **changes)["ahead"] != 1


@pytest.mark.parametrize("changes", [{"vectors": 5}, {"threads": 100}, {"threads": 32}])
def test_a_tuned_configuration_without_a_kernel_is_not_taken(files, changes):
    before = backward(4096, 4096, device=())
    files("rms_norm_backward", "a-device=Test.json", tuned_file("rms_norm", **changes))
    tuned.load(0, "Test")
    assert backward(4096, 4096, device=()) == before


def ranges_file(below, *rows):
    head = {"schema": 1, "op": "norm_backward", "device": "Test", "memory_gbps_below": below}
    head |= {"rows_per_multiprocessor": 7, "megabytes": 0, "sources": [{}]}
    return head | {"fields": tuned.RANGE_FIELDS, "ranges": {"rms_norm bfloat16": list(rows)}}


ROW = [4089, 4096, 0, 0, 0, *map(int, CONFIG.values()), 0, "not measured"]


def test_a_file_of_ranges_counts_for_its_memory_rate(files):
    """The slowest kind of device whose bound is above the rate; no table: the heuristic."""
    rates = (1999, 2000, 3999, 4000, 0)
    before = {rate: backward(4096, 4096, device=(132, rate)) for rate in rates}
    files("norm_backward", "device=Test.json", ranges_file(2000, ROW))
    tuned.load_ranges()
    got = {rate: backward(4096, 4096, device=(132, rate)) for rate in rates}
    assert got[1999]["ahead"] == 1 != before[1999]["ahead"]
    assert got | {1999: before[1999]} == before
    assert backward(923, 4096, device=(132, 1999))["ahead"] != 1
    assert backward(4096, 4088, device=(132, 1999))["ahead"] != 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": 2}, "this version reads schema 1"),
        ({"fields": ["N"]}, "this version reads schema 1"),
        ({"memory_gbps_below": "4000"}, "an integer"),
        ({"ranges": {"rms_norm bf16": []}}, "no dtype is named 'bf16'"),
        ({"ranges": {"rms_norm": []}}, "not enough values"),
        ({"ranges": {"rms_norm bfloat16": [ROW[:13]]}}, "must be a list of 14 numbers"),
        ({"ranges": {"rms_norm bfloat16": [[-1, *ROW[1:]]]}}, "a number is out of range: -1"),
        ({"ranges": {"rms_norm bfloat16": [[1, 99999, *ROW[2:]]]}}, "do not fit"),
        ({"ranges": {"rms_norm bfloat16": [[*ROW[:8], 100, *ROW[9:]]]}}, "a multiple of 32"),
    ],
)
def test_a_bad_file_of_ranges_is_said_and_left(files, caplog, change, text):
    before = [backward(4096, 4096, device=(132, rate)) for rate in (3352, 4916)]
    files("norm_backward", "device=Test.json", ranges_file(4000, ROW) | change)
    with caplog.at_level(logging.WARNING, "tiercel"):
        tuned.load_ranges()
    assert "a tuned configuration is left out" in caplog.text and text in caplog.text
    assert [backward(4096, 4096, device=(132, rate)) for rate in (3352, 4916)] == before


def test_a_range_without_a_kernel_leaves_the_heuristic(files):
    """Five vectors per thread: the sizes fit, but there is no such kernel."""

    def plan_with(*rows):
        _C.norm_backward_ranges(1000, 7, 0, [(False, "bfloat16", list(rows))])
        return backward(4096, 4096, device=(132, 999))

    heuristic = plan_with()
    assert plan_with(ROW) != heuristic
    assert plan_with([*ROW[:5], 5, *ROW[6:]]) == heuristic
