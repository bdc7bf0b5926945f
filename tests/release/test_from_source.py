# SPDX-License-Identifier: Apache-2.0
"""`pip install .`, `-e .` and a source distribution, by the real pip; Bazel is a stand-in."""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = pathlib.Path.cwd()
TAG = "cp{}{}".format(*sys.version_info[:2])
(WHEEL,) = [p for p in map(pathlib.Path, os.environ["WHEELS"].split()) if f"-{TAG}-" in p.name]
PIP = next(path for path in os.environ["TEST_WHEELS"].split() if "/pip-" in path)
PEP517 = [pathlib.Path(path) for path in os.environ["PEP517"].split()]
TOP = ("pyproject.toml", "README.md", "LICENSE", "MODULE.bazel", "version.bzl")
BAZELW = """#!/bin/sh
cd "$(dirname "$0")"
echo "$*" >>calls
echo "$PATH" >path
case $1 in cquery) echo bazel-out/{name} ;; esac
exit $(cat status 2>/dev/null || echo 0)
"""


class Checkout:
    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        (root / "tools" / "pep517").mkdir(parents=True)
        for name in TOP:
            shutil.copy(HERE / name, root / name)
        for path in PEP517:
            shutil.copy(path, root / "tools" / "pep517" / path.name)
        # The package's sources: what the wheel has and Bazel does not make.
        with zipfile.ZipFile(WHEEL) as archive:
            made = ("_version.py", "_kernels.json", ".so", ".yaml")
            names = [n for n in archive.namelist() if n.startswith("tiercel/")]
            names = [n for n in names if not n.endswith(made) and "/jit/kernels/" not in n]
            archive.extractall(root / "python", names)
        (root / "bazel-out").mkdir()
        shutil.copy(WHEEL, root / "bazel-out" / WHEEL.name)
        (root / "bazelw").write_text(BAZELW.format(name=WHEEL.name))
        (root / "bazelw").chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return (self.root / "calls").read_text().splitlines()


class Venv:
    def __init__(self, folder: pathlib.Path) -> None:
        self.python = folder / "bin" / "python"
        command = [sys.executable, "-I", "-m", "venv", "--without-pip", folder]
        subprocess.run(command, check=True)

    def pip(self, *words: object, cwd: pathlib.Path) -> subprocess.CompletedProcess:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
        env |= {"PYTHONPATH": str(HERE / PIP), "PIP_CONFIG_FILE": os.devnull}
        command = [self.python, "-m", "pip", *words, "--no-index", "--disable-pip-version-check"]
        return subprocess.run(
            list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True
        )

    def run(self, code: str) -> str:
        command = [self.python, "-I", "-W", "error", "-c", code]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


@pytest.fixture
def venv(tmp_path: pathlib.Path) -> Venv:
    return Venv(tmp_path / "venv")


def test_install(checkout: Checkout, venv: Venv) -> None:
    options = ["-C", "arch=sm_90a", "-C", "lineinfo=true", "-C", "debug=no"]
    options += ["-C", "bazel=--jobs=1", "-C", "bazel=--keep_going"]
    result = venv.pip("install", ".", *options, cwd=checkout.root)
    assert result.returncode == 0, result.stderr
    said = "--//tools:arch=sm_90a --//tools/cuda:lineinfo --jobs=1 --keep_going"
    target = f"//python:wheel_{TAG}"
    assert checkout.calls[:2] == [
        f"build {said} {target}",
        f"cquery {said} --output=files {target}",
    ]
    version = os.environ["VERSION"]
    assert venv.run("import tiercel; print(tiercel.__version__)") == version
    assert "site-packages" in venv.run("import tiercel._C; print(tiercel._C.__file__)")
    # Bazel does not see the Python that pip made for the build.
    path = (checkout.root / "path").read_text()
    assert str(venv.python.parent) not in path and "pip-build-env" not in path


def test_editable(checkout: Checkout, venv: Venv) -> None:
    result = venv.pip("install", "-e", ".", cwd=checkout.root)
    assert result.returncode == 0, result.stderr
    file = "import tiercel, tiercel.cache; print(tiercel.cache.__file__)"
    assert "/out/editable/" in venv.run(file)
    # An edit is seen at once, and a new module in a folder of sources alone.
    source = checkout.root / "python" / "tiercel"
    with (source / "__init__.py").open("a") as init:
        init.write("\nEDITED = True\n")
    assert venv.run("import tiercel; print(tiercel.EDITED)") == "True"
    (source / "cache" / "brand_new.py").write_text("HERE = 1\n")
    assert venv.run("import tiercel.cache.brand_new as m; print(m.HERE)") == "1"
    # What was built is there, beside the sources and not among them.
    assert not list(source.glob("*.so")) and not (source / "_version.py").exists()
    kernels = subprocess.run(
        [venv.python.parent / "tiercel", "kernels", "--json"], capture_output=True
    )
    assert kernels.returncode == 0 and b"registers" in kernels.stdout
    folder = "pathlib.Path(tiercel.__file__).parent"
    assert ".yaml" in venv.run(f"import pathlib, tiercel; print(*{folder}.glob('bench/suites/*'))")
    # Again, as after a new kernel.
    assert venv.pip("install", "-e", ".", cwd=checkout.root).returncode == 0
    assert venv.run("import tiercel._C, tiercel; print(tiercel.EDITED)") == "True"


def backend(root: pathlib.Path, code: str) -> str:
    env = os.environ | {"PYTHONPATH": str(root / "tools" / "pep517")}
    command = [sys.executable, "-c", f"import tiercel_build as b; print({code})"]
    result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_sdist_builds_the_same_wheel(
    checkout: Checkout, venv: Venv, tmp_path: pathlib.Path
) -> None:
    git = ["git", "-C", checkout.root, "-c", "user.name=A", "-c", "user.email=a@example.com"]
    (checkout.root / ".gitignore").write_text("/bazel-out/\n/calls\n/path\n/out/\n__pycache__/\n")
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "--all"], check=True)
    (checkout.root / "ignored.pyc").write_text("")
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    name = backend(checkout.root, f"b.build_sdist({str(one)!r})")
    assert name == f"tiercel-{os.environ['VERSION']}.tar.gz"
    with tarfile.open(one / name) as archive:
        names = {member.name.partition("/")[2]: member for member in archive}
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert {"PKG-INFO", "pyproject.toml", "bazelw", "python/tiercel/__init__.py"} <= set(names)
    assert names["bazelw"].mode == 0o755 and names["README.md"].mode == 0o644
    assert not [path for path in names if path.startswith(("bazel-out", ".git/", "calls"))]
    assert {member.uid for member in names.values()} == {0}
    # From the distribution: the same distribution, and the wheel that Bazel builds of it.
    unpacked = tmp_path / "unpacked" / name.removesuffix(".tar.gz")
    assert backend(unpacked, f"b.build_sdist({str(two)!r})") == name
    assert (one / name).read_bytes() == (two / name).read_bytes()
    shutil.copytree(checkout.root / "bazel-out", unpacked / "bazel-out")
    assert backend(unpacked, f"b.build_wheel({str(two)!r})") == WHEEL.name
    assert (two / WHEEL.name).read_bytes() == WHEEL.read_bytes()


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("architecture=sm_90a", "--config-settings architecture: expected one of arch, bazel"),
        ("debug=perhaps", "--config-settings debug=perhaps: expected true or false"),
    ],
)
def test_settings_that_are_refused(
    checkout: Checkout, venv: Venv, setting: str, error: str
) -> None:
    result = venv.pip("install", ".", "-C", setting, cwd=checkout.root)
    assert result.returncode != 0 and error in result.stdout + result.stderr
    assert not (checkout.root / "calls").exists()


def test_a_build_that_fails(checkout: Checkout, venv: Venv) -> None:
    (checkout.root / "status").write_text("37")
    result = venv.pip("install", ".", cwd=checkout.root)
    assert result.returncode != 0 and "failed (37), see above" in result.stdout + result.stderr


def test_a_python_without_a_wheel(checkout: Checkout, venv: Venv) -> None:
    module = checkout.root / "MODULE.bazel"
    running = "{}.{}".format(*sys.version_info[:2])
    module.write_text(module.read_text().replace(f'    "{running}",\n', ""))
    result = venv.pip("install", ".", cwd=checkout.root)
    assert f"Python {running} on linux-x86_64 is not supported" in result.stdout + result.stderr


def test_pyproject_says_what_the_wheel_says() -> None:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(WHEEL) as archive:
        info = f"tiercel-{os.environ['VERSION']}.dist-info"
        said = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entries = archive.read(f"{info}/entry_points.txt").decode()
    assert project["description"] == said["Summary"]
    assert project["requires-python"] == said["Requires-Python"]
    assert project["license"]["text"] == said["License"]
    extras = project["optional-dependencies"]
    assert sorted(extras) == sorted(said.get_all("Provides-Extra"))
    declared = {f"{r}; extra == '{extra}'" for extra, listed in extras.items() for r in listed}
    assert declared == set(said.get_all("Requires-Dist"))
    (script,) = project["scripts"].items()
    assert " = ".join(script) in entries
