# SPDX-License-Identifier: Apache-2.0
"""Right programs that compute-sanitizer reports, beside similar ones that it does not report.

These are why findings in our kernels are excepted: tools/sanitizer/exceptions.json names them. A
case that is reported no more is one whose exceptions can go.
"""

import glob
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

FINDINGS = {
    "racecheck": "Race reported",
    "initcheck": "Uninitialized",
    "synccheck": "Barrier error",
}
PROGRAM = pathlib.Path(__file__).with_name("run_case.py")


@pytest.fixture(scope="module")
def sanitizer():
    found = shutil.which("compute-sanitizer")
    found = found or next(iter(sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))), None)
    if found is None:
        pytest.skip("compute-sanitizer was not found; the CUDA toolkit has it")
    return found


@pytest.mark.parametrize(
    ("tool", "case", "reported"),
    [
        # One lane arrives for its warp; the ring is filled by cp.async.bulk or by stores.
        ("racecheck", "ring-by-engine", True),
        ("racecheck", "ring-by-threads", True),
        # A warp that reads and tells another one, which arrives for both.
        ("racecheck", "ring-by-engine-for-another", True),
        ("racecheck", "ring-by-threads-for-another", True),
        # Global memory written by cp.async.bulk.tensor, read by a later kernel.
        ("initcheck", "store-by-engine", True),
        ("initcheck", "store-by-threads", False),
        # Rows that were not written are read and written elsewhere, where nobody looks.
        ("initcheck", "rows-of-nobody", True),
        # An elected lane that arrives for its warp, beside bytes that are expected.
        ("racecheck", "elected-lane-and-expected-bytes", True),
        ("racecheck", "all-lanes", False),
        # A barrier set up by an instruction of the whole warp.
        ("racecheck", "set-up-and-expect", True),
        ("racecheck", "set-up-barrier-expect", False),
        # Writes that bar.arrive and bar.sync order before one warp's reads, which st.async or a
        # barrier of the block orders before the next writes.
        ("racecheck", "one-warp-sends", True),
        ("racecheck", "one-warp-writes", True),
        # A cluster of one block, whose barrier each role meets in its own branch.
        ("synccheck", "cluster-barrier-in-roles", True),
        ("synccheck", "cluster-barrier-of-all", False),
    ],
)
def test_case(sanitizer, tool, case, reported):
    command = [sanitizer, "--tool", tool, "--error-exitcode", "86"]
    if tool == "synccheck":  # which otherwise ends the program
        command += ["--destroy-on-device-error", "kernel"]
    command += [sys.executable, str(PROGRAM)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run([*command, case], capture_output=True, text=True, env=environment)
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this machine")
    assert f"{case} right" in said, said[-2000:]
    assert (FINDINGS[tool] in said) == reported, said[-2000:]
