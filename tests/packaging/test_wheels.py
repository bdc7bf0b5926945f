# SPDX-License-Identifier: Apache-2.0
"""The four wheels pass their audit (tools/audit) and hold the kernels that were compiled."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path("tools/audit").absolute()))

from checks import CHECKS, PLATFORM, SET_CHECKS
from module_checks import MODULE_CHECKS
from policy import Policy
from wheel_file import Wheel

VERSION = os.environ["VERSION"]
WHEELS = [Wheel(pathlib.Path(path)) for path in sorted(os.environ["WHEELS"].split())]
GRAPH = json.loads(pathlib.Path(os.environ["GRAPH"]).read_text())
POLICY = Policy.read(os.environ)
POLICY.version = VERSION


@pytest.fixture(params=WHEELS, ids=lambda wheel: wheel.tags["python"])
def wheel(request: pytest.FixtureRequest) -> Wheel:
    return request.param


@pytest.mark.parametrize("check", [*CHECKS, *MODULE_CHECKS], ids=lambda check: check.__name__)
def test_wheel(wheel: Wheel, check) -> None:
    assert list(check(wheel, POLICY)) == []


@pytest.mark.parametrize("check", SET_CHECKS, ids=lambda check: check.__name__)
def test_all_wheels(check) -> None:
    assert list(check(WHEELS, POLICY)) == []


def test_names() -> None:
    tags = ["cp" + python.replace(".", "") for python in POLICY.pythons]
    expected = [f"tiercel-{VERSION}-{tag}-{tag}-{PLATFORM}.whl" for tag in tags]
    assert sorted(wheel.path.name for wheel in WHEELS) == sorted(expected)


def test_budget_is_that_of_the_design() -> None:
    assert POLICY.budget["limit_bytes"] == 25_000_000


def test_module_holds_every_kernel_for_hopper_only(wheel: Wheel, tmp_path: pathlib.Path) -> None:
    kernels = {o for a in GRAPH if a["mnemonic"] == "CudaCompile" for o in a["outputs"]}
    kernels = {pathlib.Path(o).name.partition(".")[0] for o in kernels}
    module = tmp_path / "module.so"
    module.write_bytes(wheel.members[wheel.module])
    command = [POLICY.cuobjdump, "--list-elf", module]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    architectures = re.findall(r"\.(sm_\w+)\.cubin", listed)
    assert set(architectures) == {"sm_90a"}, listed
    assert len(architectures) == len(kernels), f"{listed}\nexpected {sorted(kernels)}"
