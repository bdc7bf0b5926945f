# SPDX-License-Identifier: Apache-2.0
"""What shapes the norms' gradients have on memory of another speed: plans, without a GPU."""

import json
import re

import pytest
from support.dlpack_tensor import ADDRESS
from support.norm_plan import BYTES, H100, H200, OPS, backward

from tiercel.core import tuned


def shape_of(got):
    """A plan's vectors and rows a thread, blocks and threads a row, teams, stages, rows asked for
    ahead, blocks."""
    found = re.search("vectors=([0-9]+)(?:, rows=([0-9]+))?", got["kernel"])
    vectors, rows = int(found[1]), int(found[2] or 1)
    threads = got["threads_per_row"]
    teams = got["block"] // max(threads, 32)
    return vectors, rows, got["cluster"], threads, teams, *map(got.get, ("stages", "ahead", "grid"))


def check(got, columns, dtype):
    vectors, at_once, cluster, threads, teams, stages, ahead, grid = shape_of(got)
    need = -(-columns * BYTES[dtype] // 16)
    assert vectors * threads * cluster >= need
    assert at_once <= stages <= 8, "a tile's rows have a stage each"
    assert vectors * at_once > 2 or threads <= 32, "such kernels have no row of several warps"
    assert got["block"] <= 512 and got["block"] == teams * max(threads, 32)
    assert cluster in (1, 2, 4, 8) and grid % cluster == 0
    assert got["dynamic_smem"] <= 232448 - 10240
    slice_bytes = -(-need // cluster) * 16
    rows_per_team = max(1, 32 // threads)
    ring = stages * teams * rows_per_team * slice_bytes * 2
    assert ring <= got["dynamic_smem"]
    if at_once == 2 and "Layer" in got["kernel"]:
        assert ahead == 0, "such kernels do not ask"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_every_length_has_a_shape_that_the_kernels_can_have(op, dtype):
    elements = 16 // BYTES[dtype]
    most = 131_072 // elements
    ends = [n + k for n in (3072, 4096, 6144, 8192, 12288, 16384) for k in (0, 1)]
    for n in (*range(1, 2500), *range(2500, most, 17), *(n for n in ends if n < most), most):
        for rows in (100, 924, 4096, 100_003):
            got = backward(rows, n * elements, dtype, op=op, device=H100)
            check(got, n * elements, dtype)
            assert got["parts"] <= 132 and (rows < 4096 or got["grid"] >= 120)


@pytest.mark.parametrize("device", [(114, 2039), (132, 3938), (78, 3000), (8, 3352), (1, 1)])
@pytest.mark.parametrize("op", OPS)
def test_other_devices(op, device):
    for dtype in BYTES:
        elements = 16 // BYTES[dtype]
        for n in (1, 16, 33, 64, 65, 97, 129, 257, 449, 577, 641, 897, 1025, 1057, 2049, 4097):
            for rows in (1, 7, 924, 8192, 262_144):
                got = backward(rows, n * elements, dtype, op=op, device=device)
                check(got, n * elements, dtype)
                assert got["parts"] <= device[0]


DEVICES = {"NVIDIA_H100_80GB_HBM3": H100, "NVIDIA_H200": H200}
NAMES = ("vectors", "rows", "cluster", "threads", "stages", "prefetch_rows", "even", "pairs")


def measured():
    """(device, op, dtype, table, range) for each range of the package's files."""
    for path in sorted((tuned.FOLDER / "norm_backward").iterdir()):
        data = json.loads(path.read_text())
        assert data["fields"] == tuned.RANGE_FIELDS
        for name, rows in data["ranges"].items():
            table = [dict(zip(data["fields"], row, strict=True)) for row in rows]
            for found in table:
                device = DEVICES[path.stem.removeprefix("device=")]
                yield device, *name.split(), table, found


def contains(found, columns, megabytes):
    most = found["max_MB"] or 1 << 30
    return found["min_N"] <= columns <= found["max_N"] and found["min_MB"] <= megabytes <= most


def test_each_measured_range_is_launched():
    """The plan of a range's longest rows is the one with the range's configuration."""
    reached = 0
    for device, op, dtype, table, found in measured():
        columns = found["max_N"]
        row = 2 * columns * BYTES[dtype]
        for megabytes in {max(found["min_MB"], 50), found["max_MB"] or 450}:
            rows = max((megabytes << 20) // row + 1, 7 * 132)
            at = rows * row >> 20
            if next((r for r in table if contains(r, columns, at)), None) is not found:
                continue
            reached += 1
            config = [found[name] for name in NAMES]
            while -(-columns * BYTES[dtype] // 16) > config[0] * config[2] * config[3]:
                config[2] *= 2
            got = backward(rows, columns, dtype, op=op, device=device)
            tried = backward(rows, columns, dtype, op=op, device=device, config=tuple(config))
            stages = got.pop("stages"), tried.pop("stages")
            got.pop("dynamic_smem"), tried.pop("dynamic_smem")
            assert got == tried and stages[0] >= stages[1], (op, dtype, found)
    assert reached > 240


def test_ranges_are_in_order():
    """A range ends on 16 bytes, and none is hidden by those before it."""
    for _, _, dtype, table, found in measured():
        elements = 16 // BYTES[dtype]
        assert found["min_N"] % elements == 1 and found["max_N"] % elements == 0
        assert found["min_N"] < found["max_N"] and (found["max_MB"] or 1 << 30) > found["min_MB"]
        before = table[: table.index(found)]
        limits = [r["max_MB"] for r in before if contains(r, found["max_N"], found["min_MB"])]
        assert 0 not in limits, found


# Problems for which an H100 and an H200 have measured shapes that differ.
MEASURED = [
    ("rms_norm", "bfloat16", 262144, 128),
    ("rms_norm", "bfloat16", 65536, 512),
    ("rms_norm", "float16", 32768, 768),
    ("rms_norm", "bfloat16", 32768, 1024),
    ("rms_norm", "bfloat16", 16384, 2048),
    ("rms_norm", "bfloat16", 16384, 2560),
    ("rms_norm", "bfloat16", 16384, 4096),
    ("rms_norm", "bfloat16", 16384, 5120),
    ("rms_norm", "bfloat16", 8192, 8192),
    ("rms_norm", "bfloat16", 4096, 16384),
    ("rms_norm", "bfloat16", 1024, 32768),
    ("rms_norm", "bfloat16", 1024, 65536),
    ("layer_norm", "bfloat16", 65536, 512),
    ("layer_norm", "bfloat16", 16384, 768),
    ("layer_norm", "bfloat16", 32768, 1024),
    ("layer_norm", "float16", 16384, 2048),
    ("layer_norm", "bfloat16", 16384, 3072),
    ("layer_norm", "bfloat16", 16384, 4096),
    ("layer_norm", "bfloat16", 16384, 5120),
    ("layer_norm", "bfloat16", 8192, 8192),
    ("layer_norm", "bfloat16", 4096, 16384),
    ("rms_norm", "float32", 32768, 1024),
    ("rms_norm", "float32", 16384, 4096),
    ("rms_norm", "float32", 4096, 16384),
    ("layer_norm", "float32", 32768, 1024),
    ("layer_norm", "float32", 16384, 4096),
    ("layer_norm", "float32", 4096, 16384),
]


@pytest.mark.parametrize(("op", "dtype", "rows", "columns"), MEASURED)
def test_all_else_has_an_h200s_shape(op, dtype, rows, columns):
    """A device of unknown or high rate, few rows, three tensors, rows not on 16 bytes."""

    def same(rows, one, other, **changes):
        plans = [
            backward(rows, columns, dtype, op=op, device=device, **changes)
            for device in (one, other)
        ]
        return plans[0] == plans[1]

    assert same(rows, (132, 0), H200) and same(rows, (132, 4000), H200)
    assert not same(rows, (132, 3999), H200)
    few = min(923, (40 << 20) // (2 * columns * BYTES[dtype]) - 1)
    assert same(few, H100, H200)
    assert same(rows, H100, H200, residual=True)
    assert same(rows, H100, H200, address=ADDRESS + 4)


@pytest.mark.parametrize("op", OPS)
def test_very_short_rows_have_enough_bytes_in_flight(op):
    for n in range(4, 33):
        for megabytes in (50, 130, 400):
            got = backward((megabytes << 20) // (n * 32), n * 8, op=op, device=H100)
            rows_per_warp = 32 // got["threads_per_row"]
            assert got["block"] // 32 * rows_per_warp * got["stages"] * n * 32 >= 15 * 1024


@pytest.mark.parametrize("op", OPS)
def test_short_rows_have_enough_bytes_in_flight(op):
    for dtype, elements, least in (("bfloat16", 8, 40), ("float32", 4, 48)):
        for n in range(65 if (op, dtype) != ("layer_norm", "bfloat16") else 129, 513):
            got = backward((165 << 20) // (n * 32), n * elements, dtype, op=op, device=H100)
            teams, stages = got["block"] // max(got["threads_per_row"], 32), got["stages"]
            assert teams * stages * n * 16 * 2 >= least * 1024


def test_the_more_short_rows_the_fewer_bytes_in_flight():
    """Of layer norms of a warp a row, and only of what it has been measured for."""
    for n in range(33, 129):
        ways = []
        for megabytes in (40, 100, 200, 400):
            got = backward((megabytes << 20) // (n * 32), n * 8, op="layer_norm", device=H100)
            vectors, rows, cluster, threads, teams, stages, ahead, _ = shape_of(got)
            assert "norm_backward_short" in got["kernel"] and ahead == 3
            assert (vectors, rows, cluster, threads) == (-(-n // 32), 1, 1, 32)
            ways.append(teams * stages * n * 32 / 1024)
        assert ways[0] > 48 and ways[0] > 1.3 * max(ways[2:]), (n, ways)
        assert min(ways[2:]) > 22 and max(ways[1:]) < 64, (n, ways)


def test_what_the_kernel_for_short_rows_is_for():
    assert "short" in backward(16384, 1024, op="layer_norm", device=H100)["kernel"]
    assert "short" not in backward(16384, 1032, op="layer_norm", device=H100)["kernel"]
    assert "short" not in backward(16384, 256, op="layer_norm", device=H100)["kernel"]
    assert "short" not in backward(16384, 1024, op="rms_norm", device=H100)["kernel"]
    changes = {"dtype": "float32"}, {"residual": True}, {"address": ADDRESS + 2}
    for change in (*changes, {"weight_address": ADDRESS + 2}):
        got = backward(16384, 1024, **{"op": "layer_norm", "device": H100, **change})
        assert "short" not in got["kernel"]


def test_bad_devices():
    with pytest.raises(TypeError, match="rms_norm: expected 9 positional arguments, got 10"):
        backward(8, 64, device=(132,))
    with pytest.raises(ValueError, match="`multiprocessors` must be from 1 to 1000000, got 0"):
        backward(8, 64, device=(0, 3352))
    with pytest.raises(ValueError, match="`memory_gbps` must be from 0 to 1000000, got -1"):
        backward(8, 64, device=(132, -1))
