# SPDX-License-Identifier: Apache-2.0
"""``tiercel smoke``: what each kind of backend gets, and that none stops the others."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from support.in_process import tiercel

from tiercel.plugins.contracts import CONTRACTS
from tiercel.workbench.smoke import processes, table

pytestmark = pytest.mark.torch

KERNEL = """
import os, time, ctypes, torch, tiercel
from tiercel.ref import topk_softmax as ref
def right(scores, k, softmax_first, renormalize, indices_dtype):
    return ref(scores, k, softmax_first=softmax_first, renormalize=renormalize,
               indices_dtype=indices_dtype)
@tiercel.backends.register(op="topk_softmax", name="{name}", language="torch")
def kernel(scores, *rest):
    weights, indices = right(scores, *rest)
    {body}
    return weights, indices
"""
# name -> what it does, status, part of the reason
KERNELS = {
    "right": ("pass", "right", None),
    "loud": ("print('x' * 100000)", "right", None),
    "dtype": ("weights = weights.double()", "error", "`weights` of dtype float32, got float64"),
    "shape": ("indices = indices[:, :1]", "error", r"`indices` of shape [T, k] = [1, 2], got"),
    "raises": ("raise KeyError('x', 'y')", "error", "KeyError: ('x', 'y') (T=1 E=8 k=2"),
    "values": ("weights = weights * 1.001", "wrong", "by up to"),
    "ties": ("if rest[0] == 8: indices = indices.flip(1)", "wrong", "of `indices` are wrong"),
    "changes": ("scores += 1", "wrong", "it changed `scores`"),
    "segfault": (
        "if len(scores) == 7: ctypes.string_at(0)",
        "crash",
        "killed by SIGSEGV at T=7",
    ),
    "exits": ("os._exit(3)", "crash", "ended with exit code 3 at T=1 E=8"),
    "hangs": ("if len(scores) == 33: time.sleep(1000)", "hang", "no end after 10 s at T=33 E=64"),
    "some": (
        "if scores.dtype == torch.bfloat16: raise NotImplementedError('no bfloat16')",
        "right",
        "cases not supported: NotImplementedError: no bfloat16",
    ),
    "none": ("raise NotImplementedError", "error", "it takes none of the cases"),
}


def smoke(*words, cwd):
    return tiercel("smoke", "--device", "cpu", *words, cwd=cwd)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    kernels = folder / "kernels"
    kernels.mkdir()
    for name, (body, *_) in KERNELS.items():
        (kernels / f"{name}.py").write_text(KERNEL.format(name=name, body=body))
    (kernels / "broken.py").write_text("import no_such_module")
    (kernels / "nothing.py").write_text("x = 1")
    result = smoke("--path", "kernels", "--timeout", 10, "--save", "out.jsonl", cwd=folder)
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return result, records


def test_each_backend_gets_its_own_result(run):
    _, records = run
    found = {record["backend"]: record for record in records if record["backend"] != "-"}
    assert set(found) == {*KERNELS, "ref", "sm90"}
    for name, (_, status, reason) in KERNELS.items():
        record = found[name]
        assert record["status"] == status, record
        assert (record["reason"] is None) == (reason is None), record
        assert reason is None or reason in record["reason"], record
    for name in ("right", "loud", "some"):
        assert found[name]["correct"] == 1 and found[name]["ms"] > 0
        assert found[name]["speedup"] == found[name]["ref_ms"] / found[name]["ms"]
    assert found["dtype"]["correct"] == 0 and found["values"]["ms"] is None
    assert 0 < found["ties"]["correct"] < 1
    assert 0 < found["segfault"]["correct"] < 1  # what came before it counts
    assert found["hangs"]["cases"][0]["status"] == "right"


def test_files_that_do_not_load_have_a_row(run):
    _, records = run
    failed = {record["origin"].rpartition("/")[2]: record for record in records}
    assert failed["broken.py"]["status"] == "error"
    assert failed["broken.py"]["reason"] == (
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert "registers no backend" in failed["nothing.py"]["reason"]


def test_table_and_exit_code(run):
    result, records = run
    assert result.returncode == 1 and "Traceback" not in result.stderr
    lines = result.stdout.partition("\n\n")[0].splitlines()
    assert len(lines) == 1 + len(records)
    assert lines[0].split() == ["op", "backend", "language", "correct", "time", "speed-up"]
    row = next(line for line in lines if " right " in line)
    assert re.search(r"torch +100\.0 % +[\d.]+ (us|ms) +[\d.]+x$", row)
    row = next(line for line in lines if " segfault " in line)
    assert re.search(r"torch +\d\d\.\d % +crash: killed by SIGSEGV", row)
    assert any(" broken.py " in line and "no_such_module" in line for line in lines)


def test_below_the_table_are_frames_and_values(run):
    result, _ = run
    sections = dict(
        re.findall(r"^(\S.*)\n((?:  .*\n?)+)", result.stdout.partition("\n\n")[2], re.M)
    )
    (raised,) = (
        text for title, text in sections.items() if title.startswith("topk_softmax raises:")
    )
    assert re.search(r'File ".*raises.py", line 10, in kernel', raised)
    assert "raise KeyError('x', 'y')\n  KeyError: ('x', 'y')\n" in raised
    assert "measure.py" not in raised  # what called the kernel is of no use
    (values,) = (
        text for title, text in sections.items() if title.startswith("topk_softmax values:")
    )
    first = re.match(r"  weights\[0, 0\]: expected ([\d.]+), got ([\d.]+)\n", values)
    assert first and float(first[2]) == pytest.approx(float(first[1]) * 1.001, rel=1e-4)
    assert 2 <= len(values.splitlines()) <= 4
    (ties,) = (text for title, text in sections.items() if title.startswith("topk_softmax ties:"))
    assert re.search(r"indices\[\d+, \d+\]: expected \d+, got \d+\n", ties)
    (broken,) = (text for title, text in sections.items() if title.startswith("- broken.py:"))
    assert re.search(r'File ".*broken.py", line 1, in <module>', broken)
    assert not any("loud" in title for title in sections)  # what it printed is for --verbose


def test_verbose_shows_tracebacks_whole_and_what_was_printed(tmp_path):
    (tmp_path / "fails.py").write_text(
        KERNEL.format(
            name="fails",
            body="""
    print("from Python", flush=False)
    ctypes.CDLL(None).printf(b"from C\\n")
    compile_it()
def compile_it():
    lines = [f"k.cu({i}): error: no {i}" for i in range(40)]
    raise RuntimeError("\\n".join(["nvcc failed:", *lines]))
""",
        ).replace("    return weights, indices\n", "", 1)
    )
    (tmp_path / "dies.py").write_text(
        KERNEL.format(name="dies", body="print('last words'); ctypes.string_at(0)")
    )
    paths = ["--path", "fails.py", "--path", "dies.py", "fails", "dies"]
    plain = smoke(*paths, cwd=tmp_path).stdout
    assert "error: no 0\n" in plain and "in compile_it" in plain
    assert "no 39" not in plain and "more lines: --verbose" in plain and "from C" not in plain
    text = smoke(*paths, "--verbose", cwd=tmp_path).stdout
    for part in ("no 39", "Traceback (most recent call last)", "measure.py", "from Python\n"):
        assert part in text, text
    assert "from C\n" in text and "last words\n" in text
    assert re.search(r'File ".*dies.py", line 10 in kernel', text)  # where the crash was


@pytest.mark.parametrize("place", ["at the top", "in the kernel"])
@pytest.mark.parametrize(
    ("module", "mend"),
    [("triton", "pip install triton"), ("cutlass", "pip install 'tiercel[jit]'")],
)
def test_a_missing_package_is_no_error(tmp_path, module, mend, place):
    # An import that is blocked fails as one that is not installed.
    text = f"import sys; sys.modules['{module}'] = None; import {module}"
    kernel = KERNEL.format(name="mine", body="pass" if place == "at the top" else text)
    (tmp_path / "k.py").write_text(f"{text}\n{kernel}" if place == "at the top" else kernel)
    result = smoke("--path", "k.py", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert re.search(r"skipped: it needs .*, which is not installed: ", result.stdout)
    assert mend in result.stdout


def test_a_file_alone_is_beside_ours_and_the_reference(tmp_path):
    (tmp_path / "k.py").write_text(KERNEL.format(name="mine", body="pass"))
    result = smoke("--path", "k.py", cwd=tmp_path)
    assert result.returncode == 0
    rows = [line.split()[:3] for line in lines_of(result)]
    assert [row[1] for row in rows] == ["ref", "sm90", "mine"]
    assert {row[0] for row in rows} == {"topk_softmax"}


def test_the_cases_are_listed(tmp_path):
    result = smoke("--list", "--op", "topk_softmax", cwd=tmp_path)
    contract = CONTRACTS["topk_softmax"]
    lines = result.stdout.splitlines()
    assert lines[0] == str(contract) and len(lines) == 1 + len(contract.cases) + 2
    assert lines[1] == f"  {contract.cases[0]}"
    assert lines[-1].startswith("  timed on ")
    (tmp_path / "k.py").write_text(KERNEL.format(name="mine", body="pass"))
    assert smoke("--list", "--path", "k.py", cwd=tmp_path).stdout == result.stdout
    (tmp_path / "broken.py").write_text("import no_such_module")
    result = smoke("--list", "--path", "broken.py", cwd=tmp_path)
    assert result.returncode == 2 and "No module named 'no_such_module'" in result.stderr


def test_versions_of_one_kernel_side_by_side(tmp_path):
    (tmp_path / "v1.py").write_text(KERNEL.format(name="mine", body="pass"))
    (tmp_path / "v2.py").write_text(KERNEL.format(name="mine", body="pass"))
    result = smoke(
        "--path", "v1.py", "--path", "v2.py", "--op", "topk_softmax", "ref", "mine", cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout
    names = [line.split("torch")[0].split(maxsplit=1)[1].strip() for line in lines_of(result)]
    assert names == ["ref", "mine (v1.py)", "mine (v2.py)"]


def lines_of(result):
    return result.stdout.splitlines()[1:]


def test_everything_that_is_registered(tmp_path):
    (tmp_path / "kernels_of_others.py").write_text(KERNEL.format(name="theirs", body="pass"))
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tiercel.backends]\nothers = kernels_of_others\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, "-m", "tiercel", "smoke", "--device", "cpu"],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    text = result.stdout
    assert len(re.findall(r"ref +torch +100\.0 %", text)) == len(CONTRACTS)
    assert len(re.findall(r"sm90 +cu.. +skipped: .* need CUDA tensors", text)) == len(CONTRACTS)
    assert re.search(r"theirs +torch +100\.0 %", text)
    # On the CPU, sm90 has nothing to show; but it fails where it was named.
    assert smoke("sm90", "--op", "reduce", cwd=tmp_path).returncode == 1


def test_files_in_the_current_folder_hide_nothing(tmp_path):
    for name in ("json", "tempfile", "run", "measure"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    code = """
import sys
sys.path.remove("")
from tiercel.cli import main
sys.exit(main(["smoke", "ref", "--op", "topk_softmax", "--device", "cpu"]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_worker_that_has_ended_before_anyone_looks_is_no_hang(monkeypatch):
    forker = processes._forker()
    answer = forker._answer

    def late():
        number = answer()
        time.sleep(1)  # by now the exit code, too, is there to be read
        return number

    monkeypatch.setattr(forker, "_answer", late)
    reports, end = processes.ask({"source": {}}, timeout=20)
    assert (end.status, reports[-1]) == ("right", {"step": "list", "plugins": []})


@pytest.mark.gpu
def test_ours_on_a_gpu(tmp_path):
    # Not ref too: each operator's process sets up the GPU anew.
    command = [sys.executable, "-m", "tiercel", "smoke", "sm90"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    # A row may end with the cases that a kernel does not take.
    rows = re.findall(r"sm90 +\w+ +100\.0 % +[\d.]+ .s +[\d.]+x", result.stdout)
    assert len(rows) == len(CONTRACTS)


def test_what_cannot_be_run(tmp_path):
    for arguments, message in [
        (["nope"], "no backend nope; there is ref, sm90"),
        (["--op", "nope"], f"no operator 'nope' takes backends; these do: {', '.join(CONTRACTS)}"),
        (["--path", "nope.py"], "there is no file or folder nope.py"),
        (["--timeout", "0"], "must be positive"),
        *([] if torch.cuda.is_available() else [(["--device", "cuda"], "PyTorch sees no GPU")]),
    ]:
        result = smoke(*arguments, cwd=tmp_path)
        assert result.returncode == 2 and message in result.stderr
        assert "Traceback" not in result.stderr


def test_percent_is_rounded_down():
    assert table.percent(1.0) == "100.0 %"
    assert table.percent(0.99999) == "99.9 %"
    assert table.percent(0.0) == "0.0 %" and table.percent(None) == ""
