# SPDX-License-Identifier: Apache-2.0
"""What compute-sanitizer reports of right programs, each beside its like without the copy engine.

These are why its findings in attention's kernels are excepted. A case that it reports no more is
one whose exception can go.
"""

import glob
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

PROGRAM = pathlib.Path(__file__).with_name("sanitizer_cases") / "run.py"


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
    found = "Race reported" in said if tool == "racecheck" else "Uninitialized" in said
    assert found == reported, said[-2000:]
