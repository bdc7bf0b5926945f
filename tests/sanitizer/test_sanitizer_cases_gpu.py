# SPDX-License-Identifier: Apache-2.0
"""What compute-sanitizer reports of right programs, each beside one of which it reports nothing.

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
    "synccheck": "Divergent thread(s) in block",
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
        # The bytes of cp.async.bulk, counted by an mbarrier, read by other threads.
        ("racecheck", "ring-by-engine", True),
        ("racecheck", "ring-by-threads", False),
        # Global memory written by cp.async.bulk.tensor, read by a later kernel.
        ("initcheck", "store-by-engine", True),
        ("initcheck", "store-by-threads", False),
        # Warps that meet at instructions of their own.
        ("synccheck", "roles-apart", True),
        ("synccheck", "roles-together", False),
        # An elected lane that arrives for its warp, beside bytes that are expected.
        ("racecheck", "elected-lane-and-expected-bytes", True),
        ("racecheck", "all-lanes", False),
        # A barrier set up by an instruction of the whole warp.
        ("racecheck", "set-up-and-expect", True),
        ("racecheck", "set-up-barrier-expect", False),
        # Floats that st.async sends, counted by an mbarrier, after reads that they depend on.
        ("racecheck", "one-warp-sends", True),
        ("racecheck", "one-warp-writes", False),
    ],
)
def test_case(sanitizer, tool, case, reported):
    command = [sanitizer, "--tool", tool, "--error-exitcode", "86", sys.executable, str(PROGRAM)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run([*command, case], capture_output=True, text=True, env=environment)
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this machine")
    assert f"{case} right" in said, said[-2000:]
    assert (FINDINGS[tool] in said) == reported, said[-2000:]
