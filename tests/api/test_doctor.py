# SPDX-License-Identifier: Apache-2.0
"""``tiercel doctor``: the report that an issue asks for."""

import json
import sys

from support import fake_driver

DOCTOR = "import sys; from tiercel.cli import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
JSON = DOCTOR.replace("*sys.argv[1:]", "'--json'")


def level(report, name):
    (check,) = [c for c in report["checks"] if c["name"] == name]
    assert check["mend"] or check["level"] == "green"
    return check["level"], check["text"]


def test_no_driver(run_python):
    report = json.loads(run_python(JSON, TIERCEL_LIBCUDA="/nonexistent.so").stdout)
    assert report["tiercel"] and sys.version.split()[0] in report["python"]
    assert report["driver_cuda"] is None and report["gpus"] == []
    assert report["sm90_kernels_run"] is False
    assert "no NVIDIA driver: /nonexistent.so could not be loaded" in report["why_not"]


def test_old_driver(run_python, tmp_path):
    library = fake_driver.build(tmp_path, version=12080)
    text = run_python(DOCTOR, TIERCEL_LIBCUDA=library).stdout
    assert "driver:                 the NVIDIA driver supports CUDA 12.8" in text
    assert "sm90 kernels:           do not run here" in text
    assert "tiercel needs CUDA 13.0 (driver R580 or newer)" in text
    assert "mend: install the NVIDIA driver R580 or newer" in text


def test_no_gpu(run_python, tmp_path):
    library = fake_driver.build(tmp_path, count=0)
    report = json.loads(run_python(JSON, TIERCEL_LIBCUDA=library).stdout)
    assert report["gpus"] == [] and report["sm90_kernels_run"] is False
    assert level(report, "GPU") == ("red", "none found")


def test_other_gpu(run_python, tmp_path):
    library = fake_driver.build(tmp_path, capability=(8, 6))
    report = json.loads(run_python(JSON, TIERCEL_LIBCUDA=library).stdout)
    assert [gpu["capability"] for gpu in report["gpus"]] == ["8.6"]
    assert report["sm90_kernels_run"] is False and report["why_not"]
    assert level(report, "GPU")[0] == "red" and "(8.6): none has compute" in level(report, "GPU")[1]
    assert level(report, "driver") == ("green", "supports CUDA 13.0")


def test_without_torch(run_python):
    hide = "import sys; sys.modules['torch'] = None\n"
    report = json.loads(run_python(hide + JSON).stdout)
    assert report["torch"] is None
    assert "none is installed" in report["why_not"]
    assert level(report, "PyTorch")[0] == "red"


def test_old_torch(run_python, tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.8.1+cu128'\n")
    report = json.loads(run_python(JSON, path=[tmp_path]).stdout)
    text = "tiercel needs PyTorch 2.9 or newer, found 2.8.1+cu128"
    assert level(report, "PyTorch") == ("red", text)
    (check,) = [c for c in report["checks"] if c["name"] == "PyTorch"]
    assert check["mend"] == "pip install --upgrade torch"


def test_the_exit_status_is_of_severity_on_request(run_command, tmp_path):
    command = [sys.executable, "-m", "tiercel", "doctor"]
    none = {"TIERCEL_LIBCUDA": "/nonexistent.so"}
    for words in ([], ["--json"]):
        assert run_command([*command, *words], **none).returncode == 0
        assert run_command([*command, *words, "--check"], check=False, **none).returncode == 2
    for text, code in (
        ("all is well\n", 0),
        ("Allowing ninja to set a default number of workers\n", 1),
        ("nvcc: not found\n", 2),
    ):
        (tmp_path / "log").write_text(text)
        words = [*command, "--log", "log"]
        assert run_command(words).returncode == 0
        assert run_command([*words, "--check"], check=False).returncode == code


def test_an_old_driver_has_something_to_try(run_python, tmp_path):
    library = fake_driver.build(tmp_path, version=12080)
    text = run_python(DOCTOR, TIERCEL_LIBCUDA=library).stdout
    assert "cuda-compat-13-0" in text and "not tested by us" in text


def test_shell_is_shell(run_python, run_command):
    shell = DOCTOR.replace("*sys.argv[1:]", "'--shell'")
    text = run_python(shell).stdout
    result = run_command(["bash", "-euc", f"{text}\necho $TORCH_CUDA_ARCH_LIST $MAX_JOBS"])
    assert result.stdout.split()[0] == "9.0a" and int(result.stdout.split()[1]) >= 1


def test_log_of_a_file_and_of_stdin(run_python, run_command, tmp_path):
    log = tmp_path / "build.log"
    log.write_text(
        "a\nninja: build stopped\nnvcc fatal   : Unsupported gpu architecture 'compute_90a'\n"
    )
    command = [sys.executable, "-m", "tiercel", "doctor", "--log", str(log)]
    assert "unsupported architecture (line 3)" in run_command(command).stdout
    (found,) = json.loads(run_command([*command, "--json"]).stdout)
    assert found["line"] == 3 and found["level"] == "red"
    missing = run_command([*command[:-1], str(tmp_path / "none")], check=False)
    assert missing.returncode == 2 and "cannot read" in missing.stderr
    pipe = f"{sys.executable} -m tiercel doctor --log - < {log}"
    assert "unsupported architecture" in run_command(["bash", "-c", pipe]).stdout


def test_unknown_command(run_command):
    result = run_command([sys.executable, "-m", "tiercel", "nope"], check=False)
    assert result.returncode == 2 and "invalid choice: 'nope'" in result.stderr
