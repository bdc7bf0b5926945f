# SPDX-License-Identifier: Apache-2.0
"""The installed wheel imports where there is no PyTorch, no GPU and no driver."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig

VERSION = os.environ["VERSION"]


def run(code: str) -> str:
    """What a fresh interpreter prints; its folder and environment do not matter."""
    command = [sys.executable, "-I", "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, env={}, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_there_is_no_torch_here() -> None:
    assert importlib.util.find_spec("torch") is None


def test_version() -> None:
    assert run("import tiercel; print(tiercel.__version__)") == VERSION
    assert importlib.metadata.version("tiercel") == VERSION


def test_import_is_of_the_installed_wheel() -> None:
    file = run("import tiercel; print(tiercel.__file__)")
    assert file.startswith(sysconfig.get_path("platlib"))


def test_the_command() -> None:
    script = os.path.join(sysconfig.get_path("scripts"), "tiercel")
    for command in ([script], [sys.executable, "-I", "-m", "tiercel"]):
        result = subprocess.run([*command, "doctor"], capture_output=True, env={}, text=True)
        assert result.stdout.startswith("tiercel "), result.stderr


def test_extension_module_loads() -> None:
    assert run("import tiercel._C as m; print(m.__name__)") == "tiercel._C"
    file = run("import tiercel._C as m; print(m.__file__)")
    assert file.endswith(sysconfig.get_config_var("EXT_SUFFIX"))


def test_every_module_but_those_of_torch_is_importable() -> None:
    """Each file compiles on this Python; what imports torch is run by the tests with torch."""
    code = """
import compileall, pathlib, tiercel
folder = pathlib.Path(tiercel.__file__).parent
print(bool(compileall.compile_dir(folder, quiet=1, force=True, legacy=False)))
"""
    assert run(code) == "True"


def test_import_loads_no_driver() -> None:
    code = "import tiercel, tiercel._C; print(open('/proc/self/maps').read())"
    assert "libcuda" not in run(code)


def test_stubs_have_the_public_names() -> None:
    """They are made of the sources; the names, when the package is imported."""
    code = """
import ast, pathlib, tiercel
from tiercel._families import public_names
from tiercel.plugins import type_names
folder = pathlib.Path(tiercel.__file__).parent
for package, names in ((".", tiercel.__all__), ("ops", public_names())):
    tree = ast.parse((folder / package / "__init__.pyi").read_text())
    listed = next(n.value for n in tree.body if isinstance(n, ast.Assign))
    print(ast.literal_eval(listed) == sorted(names))
print((folder / "plugins" / "types.pyi").read_text() == type_names.source())
"""
    assert run(code).split() == ["True"] * 3
