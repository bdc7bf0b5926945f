# SPDX-License-Identifier: Apache-2.0
"""tools/sanitizer runs tests under a program that answers as compute-sanitizer does."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).absolute().parents[2] / "tools" / "sanitizer"

# Says of a kernel what the canary or a test asks for: a line "TOOL KERNEL MESSAGE" in $ASKED.
PROGRAM = r"""#!/usr/bin/env python3
import os, pathlib, subprocess, sys
words, options, filters = sys.argv[1:], {}, []
while words[0].startswith("--"):
    if words[0].startswith("--kernel-name"):
        filters.append(words[0].removeprefix("--kernel-name").lstrip("-") + words[1])
    options[words[0]] = words[1]
    words = words[2:]
asked = pathlib.Path(options["--log-file"] + ".asked")
asked.unlink(missing_ok=True)
if os.environ.get("UNSUPPORTED"):
    sys.exit("========= Error: Device not supported. Please refer to the documentation")
told = {"ASKED": str(asked), "TOOL": options["--tool"]}
code = subprocess.run(words, env=os.environ | told).returncode
lines = ["COMPUTE-SANITIZER"]
for line in asked.read_text().splitlines() if asked.exists() else []:
    tool, kernel, message = line.split(" ", 2)
    if tool != options["--tool"]:
        continue
    if filters and "kns=tiercel" not in filters:
        continue
    lines += [message, f"    at {kernel}+0x10"]
if not os.environ.get("CUT"):
    lines.append("ERROR SUMMARY: %d errors" % (len(lines) // 2))
pathlib.Path(options["--log-file"]).write_text("".join(f"========= {line}\n" for line in lines))
with open(os.environ["CALLS"], "a") as file:
    print(options["--tool"], os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "cached"),
          *filters, *["filled"] * ("TIERCEL_TEST_FILL" in os.environ), file=file)
sys.exit(code)
"""
CANARY = """import os, sys
open(os.environ["ASKED"], "w").write(" ".join(sys.argv[1:]) + " a mistake")
"""
TESTS = """
import os

import pytest

def ask(line):
    with open(os.environ["ASKED"], "a") as file:
        print(line, file=file)

@pytest.mark.parametrize("i", range(30))
def test_clean(i):
    pass

def test_ours():
    ask("racecheck tiercel::reduce<(int)4>(float*) Error: Potential WAW hazard")

def test_others():
    ask("initcheck at::native::fill(int) Uninitialized __global__ memory read of size 4 bytes")

def test_of_the_dsl():
    ask("synccheck attention_bf16_d64_0 Barrier error detected. Divergent thread(s) in warp.")
    assert os.environ.get("ENDS") != os.environ["TOOL"]

def test_slow():
    import time
    time.sleep(float(os.environ.get("SLEEP", "0")))
"""


@pytest.fixture
def run(tmp_path):
    """Runs it: (arguments, environment) -> exit code, output, the verdicts, the program's calls."""
    program, canary = tmp_path / "sanitizer", tmp_path / "canary.py"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    canary.write_text(CANARY)
    tests, kernels = tmp_path / "tests", tmp_path / "kernels.json"
    tests.mkdir()
    (tests / "test_it.py").write_text(TESTS)
    listed = [{"name": "attention_bf16_d64", "language": "cute"}]
    kernels.write_text(json.dumps({"kernels": listed}))

    def run(*words, rules=(), canary_words=(), keyword="", **environment):
        rules_file = tmp_path / "exceptions.json"
        rules_file.write_text(json.dumps(list(rules)))
        pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        out = tmp_path / "out"
        command = [sys.executable, FOLDER / "run.py", "--sanitizer", program, "--out", out]
        command += ["--exceptions", rules_file, "--kernels", kernels, "--rootdir", tests]
        command += ["--canary", f"{sys.executable} {canary_words or canary}", *words]
        command += ["--paths", tests, "--", *pytest_command, "--rootdir", tests, "-k", keyword]
        env = {"PATH": os.environ["PATH"], "CALLS": calls, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            list(map(str, command)),
            env={name: str(value) for name, value in (env | environment).items()},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        summary = out / "summary.json"
        told = json.loads(summary.read_text()) if summary.exists() else {}
        summary.unlink(missing_ok=True)
        called = calls.read_text().splitlines() if calls.exists() else []
        return done.returncode, done.stdout + done.stderr, told, called

    return run


def test_each_tool_as_it_has_to_be_called(run) -> None:
    code, output, told, calls = run(keyword="clean")
    assert code == 0, output
    assert list(told) == ["memcheck", "racecheck", "synccheck", "initcheck"]
    assert all(entry["line"].startswith("30 tests, 0 errors") for entry in told.values())
    filters = "kns=tiercel regex=^(attention)_"
    assert set(calls) == {
        "memcheck 1",
        f"racecheck cached {filters}",
        f"synccheck cached {filters}",
        "initcheck 1",
    }
    # The canary once for each filter; 30 tests in two processes.
    assert [sum(c.startswith(t) for c in calls) for t in told] == [3, 4, 4, 3]
    assert "racecheck 2/2 tests-test_it-" in output
    assert output.splitlines()[-4:] == [f"{tool}: {told[tool]['line']}" for tool in told]


def test_a_kernel_that_is_left_out(run) -> None:
    rule = {
        "tool": "synccheck",
        "kernel": "attention_bf16_d(64|96)",
        "message": "Barrier error.*",
        "reason": "the tool's",
        "shown_by": "a case",
        "test": "test_it.py::test_clean",
        "leave_out": True,
    }
    tools = ("--tools", "racecheck", "synccheck")
    code, output, told, calls = run(*tools, rules=[rule], keyword="clean")
    assert code == 0, output
    without = "excluderegex=^((?:attention_bf16_d(64|96)))(_[0-9]+)?$"
    assert {call.split()[0] for call in calls if without in call} == {"synccheck"}
    assert told["synccheck"]["line"] == "30 tests, 0 errors, 1 excepted"
    assert "excepted: left out: synccheck of attention_bf16_d(64|96)" in output


def test_memory_is_filled_where_the_copy_engine_writes_results(run, tmp_path) -> None:
    (tmp_path / "tests" / "attention").mkdir()
    (tmp_path / "tests" / "attention" / "test_attention_gpu.py").write_text(
        "def test_one(): pass\n"
    )
    code, output, _, calls = run(keyword="one or clean")
    assert code == 0, output
    assert [call for call in calls if "filled" in call] == ["initcheck 1 filled"]


def test_findings_of_ours_fail_and_others_do_not(run) -> None:
    code, output, told, _ = run()
    assert code == 1, output
    assert [len(told[tool]["errors"]) for tool in told] == [0, 1, 1, 0]
    assert told["racecheck"]["errors"][0].startswith(
        "Potential WAW hazard in reduce<4>: 1 times, first in racecheck/tests-test_it-2.log"
    )
    assert "in attention_bf16_d64: 1 times" in told["synccheck"]["errors"][0]
    assert "1 findings in others' kernels" in told["initcheck"]["line"]
    assert "racecheck: FAILED: 34 tests, 1 errors" in output


def test_exceptions_by_name_and_reason(run) -> None:
    rule = {
        "tool": "racecheck",
        "kernel": "reduce<.*>",
        "message": "Potential WAW hazard",
        "reason": "the tool's",
        "shown_by": "a case",
        "test": "test_it.py::test_ours",
    }
    ended = rule | {
        "tool": "synccheck",
        "kernel": "attention_bf16_d64",
        "message": "Barrier error.*",
        "test": "test_it.py::test_of_the_dsl",
        "ends_kernel": True,
    }
    tools = ("--tools", "racecheck", "synccheck")
    code, output, told, _ = run(*tools, rules=[rule, ended], ENDS="synccheck")
    assert code == 0, output
    assert told["racecheck"]["excepted"] == [
        "1 times racecheck of reduce<.*>: Potential WAW hazard (the tool's)"
    ]
    stale = rule | {"test": "test_clean"}
    code, output, told, _ = run("--tools", "racecheck", rules=[stale], keyword="clean")
    assert code == 0
    assert "racecheck: stale: racecheck of reduce<.*>" in output
    assert "1 exceptions no longer occur" in told["racecheck"]["line"]
    assert run("--tools", "synccheck", rules=[rule], ENDS="synccheck")[0] == 1


def test_a_tool_that_is_silent_about_its_canary_fails(run, tmp_path) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("print('no word')")
    code, output, told, _ = run("--tools", "racecheck", canary_words=silent, keyword="clean")
    assert code == 1
    assert "racecheck did not report the mistake of tiercel_canary: no word" in output
    assert told["racecheck"]["line"].startswith("30 tests, 1 errors")


def test_what_did_not_run_to_its_end_fails(run) -> None:
    code, output, _, _ = run("--tools", "memcheck", keyword="clean", CUT="1")
    assert code == 1
    assert "the log has no summary" in output
    words = ("--tools", "memcheck", "--seconds", "4", "--jobs", "1")
    code, output, _, _ = run(*words, SLEEP="60")
    assert code == 1
    assert re.search(r"not done after \d s|not begun when the tool's time was up", output)
    code, output, _, _ = run(UNSUPPORTED="1")
    assert code == 3
    assert "compute-sanitizer does not support this machine" in output
    code, output, _, _ = run(keyword="nosuch")
    assert code == 1 and "no tests were collected" in output


def test_parts_are_all_of_it(run) -> None:
    ran = 0
    for part in ("1/2", "2/2"):
        code, _, told, _ = run("--tools", "memcheck", "--part", part, keyword="clean")
        assert code == 0
        ran += int(told["memcheck"]["line"].split()[0])
    assert ran == 30
    code, output, _, _ = run("--part", "3/2")
    assert code == 2 and "a part is K/N with 1 <= K <= N, got '3/2'" in output
