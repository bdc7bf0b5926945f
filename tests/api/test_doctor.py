# SPDX-License-Identifier: Apache-2.0
"""``tiercel doctor``: the report that an issue asks for."""

import json
import sys
from pathlib import Path

from support import fake_driver

DOCTOR = "import sys; from tiercel.cli import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
JSON = DOCTOR.replace("*sys.argv[1:]", "'--json'")


def test_no_driver(run_python):
    report = json.loads(run_python(JSON, TIERCEL_LIBCUDA="/nonexistent.so").stdout)
    assert report["tiercel"] and sys.version.split()[0] in report["python"]
    assert report["driver_cuda"] is None and report["gpus"] == []
    assert report["sm90_kernels_run"] is False
    assert "no NVIDIA driver: /nonexistent.so could not be loaded" in report["why_not"]


def test_old_driver(run_python, tmp_path):
    library = fake_driver.build(tmp_path, version=12080)
    text = run_python(DOCTOR, TIERCEL_LIBCUDA=library).stdout
    assert "driver:          supports CUDA 12.8" in text
    assert "sm90 kernels:    do not run here" in text
    assert "tiercel needs CUDA 13.0 (driver R580 or newer)" in text


def test_other_gpu(run_python, tmp_path):
    library = fake_driver.build(tmp_path, capability=(8, 6))
    report = json.loads(run_python(JSON, TIERCEL_LIBCUDA=library).stdout)
    assert [gpu["capability"] for gpu in report["gpus"]] == ["8.6"]
    assert report["sm90_kernels_run"] is False and report["why_not"]


def test_without_torch(run_python):
    hide = "import sys; sys.modules['torch'] = None\n"
    report = json.loads(run_python(hide + JSON).stdout)
    assert report["torch"] is None
    assert "none is installed" in report["why_not"]


def test_both_commands(run_command):
    script = Path(sys.executable).parent / "tiercel"
    for command in ([script], [sys.executable, "-m", "tiercel"]):
        assert run_command([*command, "doctor"]).stdout.startswith("tiercel: ")


def test_unknown_command(run_command):
    result = run_command([sys.executable, "-m", "tiercel", "nope"], check=False)
    assert result.returncode == 2 and "invalid choice: 'nope'" in result.stderr
