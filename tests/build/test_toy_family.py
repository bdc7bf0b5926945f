# SPDX-License-Identifier: Apache-2.0
"""A new op touches only its own folders: names, stubs, types and README's row follow from them.

ci/toy_family.py builds the same tree and runs its tests.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

for folder in ("tests/build", "tools/lint"):
    sys.path.insert(0, str(pathlib.Path(folder).absolute()))

import toy_family
import workspace

FOLDERS = ("kernels/toy/", "python/tiercel/ops/toy/", "tests/toy/", "docs/kernels/toy_shift.md")
NAMES = """
import sys, types
package = sys.modules["tiercel"] = types.ModuleType("tiercel")
package.__path__ = ["python/tiercel"]
from tiercel import _families
from tiercel.plugins.contracts import CONTRACTS
print(*_families.names())
print(*_families.public_names())
print(*CONTRACTS["toy_shift"].names)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The checkout's Python and pages, with the toy family."""
    tree = tmp_path_factory.mktemp("tree")
    files = [p for p in workspace.files("*") if p.parts[0] in {"ci", "docs", "python", "tools"}]
    added = toy_family.make(workspace.root(), [*files, pathlib.Path("README.md")], tree)
    assert added and all(path.startswith(FOLDERS) for path in added)
    return tree


def run(tree, *words):
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_names_and_contract(tree):
    families, public, arguments = run(tree, "-c", NAMES)
    assert "toy" in families.split() and "toy_shift" in public.split()
    assert arguments == "x amount"


@pytest.mark.parametrize("package", ["", "ops/", "ref/"])
def test_stubs(tree, package, tmp_path):
    out = tmp_path / "tiercel" / package / "__init__.pyi"
    out.parent.mkdir(parents=True)
    run(tree, "tools/wheel/stubs.py", "python/tiercel/__init__.py", out)
    listed = next(n.value for n in ast.parse(out.read_text()).body if isinstance(n, ast.Assign))
    assert "toy_shift" in ast.literal_eval(listed)


def test_types(tree, tmp_path):
    out = tmp_path / "tiercel" / "plugins" / "types.pyi"
    out.parent.mkdir(parents=True)
    run(tree, "tools/wheel/stubs.py", "python/tiercel/__init__.py", out)
    text = out.read_text()
    assert 'ToyInput = Annotated[Tensor, CONTRACTS["toy_shift"].spec("x")]' in text
    assert "class ToyShift(Protocol)" in text and "        x: ToyInput,\n" in text


def test_the_row_in_readme(tree):
    before = (tree / "README.md").read_text().splitlines()
    run(tree, "ci/ops_table.py", "--write")
    new = [line for line in (tree / "README.md").read_text().splitlines() if line not in before]
    (row,) = new
    assert row.split(" | ")[1:] == ["Adds `amount` to every element", "float32", "none |"]
    assert row.startswith("| [`toy_shift`](docs/kernels/toy_shift.md) | ")
