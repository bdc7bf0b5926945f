# SPDX-License-Identifier: Apache-2.0
"""What --config=asan runs tests under, since Python itself is not built with the sanitizers."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

SOURCE = """
extern "C" int beyond(int size, int n) {
  volatile int* p = new int[size];
  p[0] = 7;
  int v = p[n];
  delete[] p;
  return v;
}
extern "C" int sum(int a, int b) { return a + b; }
extern "C" int thrown() { try { throw 3; } catch (int v) { return v; } }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built as .bazelrc has it."""
    (line,) = re.findall(
        r"^build:asan --per_file_copt='\S+@(\S+)'$",
        pathlib.Path(os.environ["BAZELRC"]).read_text(),
        re.MULTILINE,
    )
    folder = tmp_path_factory.mktemp("library")
    (folder / "it.cc").write_text(SOURCE)
    gcc = os.path.abspath(os.environ["GCC"])
    command = [gcc, "-O2", "-fPIC", "-shared", *line.split(","), "-o", "it.so", "it.cc", "-lstdc++"]
    subprocess.run(command, check=True, cwd=folder)
    return folder / "it.so"


def call(library: pathlib.Path, expression: str) -> subprocess.CompletedProcess:
    code = f"import ctypes; it = ctypes.CDLL({str(library)!r}); print({expression})"
    command = ["bash", os.environ["SANITIZED"], sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True)


def test_what_is_right_runs(library: pathlib.Path) -> None:
    result = call(library, "it.beyond(4, 0), it.sum(3, 4), it.thrown()")
    assert (result.returncode, result.stdout, result.stderr) == (0, "7 7 3\n", "")


@pytest.mark.parametrize(
    ("expression", "report"),
    [
        ("it.beyond(4, 4)", "AddressSanitizer: heap-buffer-overflow"),
        ("it.sum(2**31 - 1, 1)", "runtime error: signed integer overflow"),
    ],
)
def test_an_error_ends_the_test_with_its_place(
    library: pathlib.Path, expression: str, report: str
) -> None:
    result = call(library, expression)
    assert result.returncode != 0 and report in result.stderr
    assert re.search(r"#\d+ .* in (beyond|sum) ", result.stderr)
