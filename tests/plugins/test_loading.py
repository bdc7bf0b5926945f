# SPDX-License-Identifier: Apache-2.0
"""Backends from files, folders and installed packages."""

import textwrap

import pytest

import tiercel
from tiercel import backends
from tiercel.core import dispatch as _op
from tiercel.plugins import registration

pytestmark = pytest.mark.torch

GOOD = """
import tiercel
@tiercel.backends.register(op="topk_softmax", name="NAME", description="DESCRIPTION")
def f(scores, k, softmax_first, renormalize, indices_dtype): ...
"""


def source(name, description="", more=""):
    return GOOD.replace("NAME", name).replace("DESCRIPTION", description) + textwrap.dedent(more)


def names():
    return sorted(set(_op.registry["topk_softmax"].backends) - {"sm90", "ref"})


def test_path(tmp_path):
    path = tmp_path / "my kernel.py"
    path.write_text(source("a") + source("b"))
    assert backends.load_path(path) == ["a", "b"] and names() == ["a", "b"]
    assert registration.registered["topk_softmax", "a"].origin == str(path)
    with pytest.raises(ValueError, match=f"'a' is registered already, from {path}; replace=True"):
        backends.load_path(str(path))
    assert names() == ["a", "b"]
    path.write_text(source("a", "edited"))
    assert backends.load_path(path, replace=True) == ["a"]
    assert _op.registry["topk_softmax"].backends["a"].description == "edited"


def test_a_file_may_import_those_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("NAME = 'from beside'")
    (tmp_path / "json.py").write_text("raise SystemExit('not the standard library')")
    more = """
    import beside_it, json
    tiercel.backends.register(op="topk_softmax", name="c", fn=f, description=beside_it.NAME)
    """
    (tmp_path / "kernel.py").write_text(source("a", more=more))
    assert backends.load_path(tmp_path / "kernel.py") == ["a", "c"]
    assert _op.registry["topk_softmax"].backends["c"].description == "from beside"


def test_two_files_of_one_name_do_not_meet(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kernel.py").write_text(source(folder))
        backends.load_path(tmp_path / folder / "kernel.py")
    assert names() == ["x", "y"]
    functions = [registration.registered["topk_softmax", name].fn for name in "xy"]
    assert functions[0].__module__ != functions[1].__module__


def test_a_file_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "old.py").write_text(source("a", "old"))
    backends.load_path(tmp_path / "old.py")
    (tmp_path / "new.py").write_text(source("a", "new") + source("b") + "1 / 0")
    with pytest.raises(ZeroDivisionError):
        backends.load_path(tmp_path / "new.py", replace=True)
    assert names() == ["a"]
    for op in _op.variants["topk_softmax"]:
        assert op.backends["a"].description == "old"
    assert registration.registered["topk_softmax", "a"].description == "old"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("x = 1", ValueError, "kernel.py registers no backend"),
        ("def f(:", SyntaxError, "invalid syntax"),
        ("import no_such_module", ModuleNotFoundError, "no_such_module"),
        (source("a").replace("scores,", "x,"), TypeError, "argument 1 is `x`, must be `scores`"),
    ],
)
def test_bad_files(tmp_path, text, error, message):
    (tmp_path / "kernel.py").write_text(text)
    with pytest.raises(error, match=message):
        backends.load_path(tmp_path / "kernel.py")
    assert names() == []


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file .*nope.py"):
        backends.load_path(tmp_path / "nope.py")
    with pytest.raises(ValueError, match="is a folder: load it with load_folder"):
        backends.load_path(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        backends.load_folder(tmp_path / "nope")
    with pytest.raises(ValueError, match="has no Python files to load"):
        backends.load_folder(tmp_path)
    (tmp_path / "kernel.txt").write_text(source("a"))
    with pytest.raises(ValueError, match="is no Python file"):
        backends.load_path(tmp_path / "kernel.txt")


def test_folder(tmp_path):
    for name in ("b", "a", "_private", "test_a"):
        (tmp_path / f"{name}.py").write_text(source(name))
    assert backends.load_folder(tmp_path) == ["a", "b"]


PACKAGE = """
import tiercel
def f(scores, k, softmax_first, renormalize, indices_dtype): ...
def add(): tiercel.backends.register(op="topk_softmax", name="from_function", fn=f)
"""


@pytest.fixture
def packages(tmp_path):
    """Two installed packages: one registers when imported, one when its function is called."""
    (tmp_path / "by_import.py").write_text(source("from_import"))
    (tmp_path / "by_function.py").write_text(PACKAGE)
    for name, value in (("by_import", "by_import"), ("by_function", "by_function:add")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[tiercel.backends]\n{name} = {value}\n")
    return tmp_path


def test_entry_points_only_on_request(packages, run_python):
    code = """
import sys, torch, tiercel, tiercel.ops
from tiercel.core.dispatch import registry
assert not {"by_import", "by_function"} & set(sys.modules)
print(tiercel.backends.load_entry_points("by_function"))
assert "by_import" not in sys.modules
print(tiercel.backends.load_entry_points(), tiercel.backends.load_entry_points())
print(sorted(registry["topk_softmax"].backends))
"""
    assert run_python(code, path=[packages]).stdout.splitlines() == [
        "['from_function']",
        "['from_import'] []",
        "['from_function', 'from_import', 'ref', 'sm90']",
    ]


def test_entry_points_that_fail(packages, run_python):
    def fails(code):
        code = f"import torch, tiercel; tiercel.backends.{code}"
        return run_python(code, path=[packages], check=False).stderr.splitlines()[-1]

    assert fails("load_entry_points('nope')") == (
        "ValueError: no entry point 'nope' in the group 'tiercel.backends'; "
        "there is by_function, by_import"
    )
    (packages / "by_function.py").write_text("def add(): pass")
    assert "the entry point by_function (by_function:add) registers no backend" in fails(
        "load_entry_points('by_function')"
    )
    (packages / "by_import.py").write_text("1 / 0")
    assert fails("load_entry_points('by_import')") == "ZeroDivisionError: division by zero"


def test_none_installed(run_python):
    code = "import torch, tiercel; print(tiercel.backends.load_entry_points())"
    assert run_python(code).stdout == "[]\n"


def test_without_torch(run_python):
    """The module imports without PyTorch; registering says what is missing."""
    code = """
import sys
sys.modules["torch"] = None
from tiercel import backends
backends.register(op="topk_softmax", name="a", fn=print)
"""
    result = run_python(code, check=False)
    assert result.stderr.splitlines()[-1].startswith(
        ("ImportError: tiercel needs", "ModuleNotFound")
    )


def test_public_names():
    for name in ("register", "load_path", "load_folder", "load_entry_points"):
        assert name in backends.__all__ and getattr(tiercel.backends, name).__doc__
