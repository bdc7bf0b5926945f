# SPDX-License-Identifier: Apache-2.0
"""`tiercel profile`: what the profilers are told, and what their errors become."""

import sys

import pytest

from tiercel.cli import main
from tiercel.workbench.profiling import ProfileError, launch, programs

FAKE = """#!{python}
import pathlib, sys
pathlib.Path({log!r}).write_text("\\n".join(sys.argv[1:]))
print({says!r})
words = sys.argv[1:]
for name, ending in (("--export", ".ncu-rep"), ("--output", ".nsys-rep"), ("--log-file", "")):
    leaves = {leaves!r}
    if name in words and leaves:
        pathlib.Path(words[words.index(name) + 1] + ending).write_text(leaves)
sys.exit({status})
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(name): puts a profiler on PATH; returns what it was told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)

    def make(name, says="", leaves="report", status=0):
        log = tmp_path / f"{name}.log"
        path = folder / name
        facts = {"log": str(log), "says": says, "leaves": leaves, "status": status}
        path.write_text(FAKE.format(python=sys.executable, **facts))
        path.chmod(0o755)
        return lambda: log.read_text().splitlines()

    return make


def test_ncu_has_fast_defaults_and_a_dated_report(fake, tmp_path, capsys):
    told = fake("ncu")
    assert main(["profile", "ncu", "--out", "reports", "--", "python", "x.py", "--set"]) == 0
    words = told()
    assert words[-3:] == ["python", "x.py", "--set"]  # the command's own stay its own
    assert words[words.index("--launch-count") + 1] == "10"
    sections = [words[i + 1] for i, word in enumerate(words) if word == "--section"]
    assert sections == list(launch.SECTIONS) and "SourceCounters" not in sections
    (report,) = (tmp_path / "reports").iterdir()
    assert report.name.startswith("tiercel-ncu-2") and report.suffix == ".ncu-rep"
    assert f"report: reports/{report.name}" in capsys.readouterr().out


def test_options_of_the_tool_pass_through_and_replace_defaults(fake):
    told = fake("ncu")
    options = ["--kernel-name", "regex:topk", "--set", "full", "-c", "1", "-o", "mine"]
    assert main(["profile", "ncu", *options, "--", "python", "x.py"]) == 2  # no report of that name
    words = told()
    assert words[words.index("--kernel-name") + 1] == "regex:topk"
    assert "--section" not in words and "--launch-count" not in words and "--export" not in words
    assert main(["profile", "ncu", "--section=SpeedOfLight", "--", "true"]) == 0
    assert "--section=SpeedOfLight" in told() and "--section" not in told()


def test_a_report_that_the_user_names_is_found(fake, capsys):
    fake("ncu")
    assert main(["profile", "ncu", "--export", "mine", "--", "true"]) == 0
    assert "report: mine.ncu-rep" in capsys.readouterr().out


def test_nsys(fake, tmp_path):
    told = fake("nsys")
    assert main(["profile", "nsys", "--", "python", "x.py"]) == 0
    assert told()[0] == "profile" and "--sample=none" in told()
    assert main(["profile", "nsys", "-t", "cuda,osrt", "--", "python", "x.py"]) == 0
    assert "--trace=cuda,nvtx" not in told() and "cuda,osrt" in told()
    assert len(list(tmp_path.glob("tiercel-nsys-*.nsys-rep"))) == 2  # also within one second


CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
BAD = (
    "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4 bytes\n"
    "=========     at kernel(float*)+0x90\n========= ERROR SUMMARY: 2 errors\n"
)


@pytest.mark.parametrize(
    ("leaves", "status", "code", "text"),
    [
        (CLEAN, 0, 0, "0 errors"),
        (BAD, 1, 1, "Invalid __global__ write"),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error)\n", 0, 1, "1 errors"),
        ("========= COMPUTE-SANITIZER\n", 0, 1, "it did not finish"),
    ],
)
def test_sanitizer(fake, capsys, leaves, status, code, text):
    told = fake("compute-sanitizer", leaves=leaves, status=status)
    assert main(["profile", "sanitizer", "--tool", "racecheck", "--", "python", "x.py"]) == code
    assert text in capsys.readouterr().out
    assert told()[told().index("--tool") + 1] == "racecheck" and "--error-exitcode" in told()


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "NVreg_Restrict"),
        ("==WARNING== No kernels were profiled.", "--kernel-name left all out"),
        (
            "==ERROR== Nsight Compute failed to connect to the CUDA driver (stub libcuda.so[.1] on "
            "path?).\n==WARNING== No kernels were profiled.",
            "finds no NVIDIA driver here",
        ),
        (
            "Importer error status: The importer binary and its dependencies were not found.",
            "install the whole of nsight-systems",
        ),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "could not be loaded"),
        ("==ERROR== something else", "ended with status 3 and left no report"),
    ],
)
def test_what_goes_wrong_is_said_plainly(fake, capsys, says, text):
    fake("ncu", says=says, leaves=None, status=3)
    assert main(["profile", "ncu", "--", "python", "x.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tiercel profile: ") and text in error and "Traceback" not in error


def test_the_command_s_own_words_are_no_error(fake):
    fake("ncu", says="my program says ERR_NVGPUCTRPERM")
    assert main(["profile", "ncu", "--", "python", "x.py"]) == 0


def test_without_the_tool(monkeypatch, tmp_path, capsys):
    for variable in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(programs, "find", lambda name: _find(name, tmp_path))
    for tool, name in launch.PROGRAMS.items():
        assert main(["profile", tool, "--", "true"]) == 2
        error = capsys.readouterr().err
        assert f"{name} not found" in error and "CUDA toolkit" in error


_find = programs.find


def test_the_newest_of_opt(tmp_path, monkeypatch):
    for variable in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(variable, str(tmp_path / "nothing"))
    for version in ("2025.2.0", "2025.3.1"):
        path = tmp_path / "nsight-compute" / version / "ncu"
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    assert programs.find("ncu", tmp_path).endswith("2025.3.1/ncu")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ncu"], "say what to run"),
        (["ncu", "--set", "full", "--"], "say what to run"),
        ([], "choose one of ncu, nsys, sanitizer and extract"),
        (["perf", "--", "true"], "got 'perf'"),
        (["extract", "nothing.ncu-rep"], "is no file"),
    ],
)
def test_wrong_words(words, text, capsys):
    assert main(["profile", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_program_that_does_not_start(fake, tmp_path, capsys):
    fake("ncu")
    (tmp_path / "bin" / "ncu").write_bytes(b"\x7fELF nonsense")
    assert main(["profile", "ncu", "--", "true"]) == 2
    assert "does not start" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(fake, tmp_path):
    fake("ncu")
    (tmp_path / "file").touch()
    with pytest.raises(ProfileError, match="cannot write to"):
        launch.run("ncu", [], ["true"], tmp_path / "file" / "below")
