# SPDX-License-Identifier: Apache-2.0
"""`pip install .`, `-e .` and a source distribution, by the real pip; Bazel is a stand-in."""

import email
import os
import pathlib
import pty
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

sys.path.insert(0, str(pathlib.Path("tests/release").absolute()))

from pip_folder import pip_folder

HERE = pathlib.Path.cwd()
TAG = "cp{}{}".format(*sys.version_info[:2])
(WHEEL,) = [p for p in map(pathlib.Path, os.environ["WHEELS"].split()) if f"-{TAG}-" in p.name]
PEP517 = [pathlib.Path(path) for path in os.environ["PEP517"].split()]
TOP = ("pyproject.toml", "README.md", "LICENSE", "MODULE.bazel", "version.bzl")
BAZELW = """#!/bin/sh
cd "$(dirname "$0")"
echo "$*" >>calls
echo "$PATH" >path
case $1 in cquery) echo bazel-out/{name} ;; esac
if [ "$1" = build ] && [ -f says ]; then
  while IFS= read -r line; do echo "$line" >&2; sleep 0.5; done <says
  sleep 1.5
fi
exit $(cat status 2>/dev/null || echo 0)
"""


class Checkout:
    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        (root / "tools" / "pep517").mkdir(parents=True)
        for name in TOP:
            shutil.copy(HERE / name, root / name)
        (root / "tools" / "cuda").mkdir()
        shutil.copy(HERE / "tools" / "cuda" / "archs.bzl", root / "tools" / "cuda" / "archs.bzl")
        for path in PEP517:
            shutil.copy(path, root / "tools" / "pep517" / path.name)
        # The package's sources: what the wheel has and Bazel does not make.
        with zipfile.ZipFile(WHEEL) as archive:
            made = ("_version.py", "_kernels.json", ".so")
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

    @property
    def env(self) -> dict[str, str]:
        ours = ("PIP_", "PYTHONDONTWRITEBYTECODE")
        env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        pip = str(pip_folder())
        return env | {"PYTHONPATH": pip, "PIP_CONFIG_FILE": os.devnull, "TERM": "xterm"}

    def command(self, *words: object) -> list[str]:
        words = [self.python, "-m", "pip", *words, "--no-index", "--disable-pip-version-check"]
        return list(map(str, words))

    def pip(self, *words: object, cwd: pathlib.Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*words), cwd=cwd, env=self.env, capture_output=True, text=True
        )

    def pip_on_a_terminal(self, *words: object, cwd: pathlib.Path) -> str:
        """What a person sees."""
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(cwd)
            os.execve(self.python, self.command(*words), self.env)
        seen = b""
        while True:
            try:
                part = os.read(terminal, 4096)
            except OSError:  # it has ended
                break
            if not part:
                break
            seen += part
        _, status = os.waitpid(child, 0)
        os.close(terminal)
        assert status == 0, seen.decode()
        return seen.decode()

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


SAYS = """Loading: 0 packages loaded
Analyzing: target //python:wheel (3 packages loaded, 0 targets configured)
[1,230 / 1,520] Compiling kernels/norm/norm.cu; 12s linux-sandbox ... (2 actions running)
INFO: Elapsed time: 3 s
"""


def test_progress_is_shown_where_pip_hides_it(checkout: Checkout, venv: Venv) -> None:
    (checkout.root / "says").write_text(SAYS)
    seen = venv.pip_on_a_terminal("install", ".", cwd=checkout.root)
    assert "tiercel: 0:00 " in seen and "out/pip.log" in seen
    assert "Analyzing: target //python:wheel (3 packages loaded" in seen
    step = "1,230 of 1,520 steps: Compiling kernels/norm/norm.cu"
    # Redrawn each second, also when Bazel says nothing.
    times = set(re.findall(rf"tiercel: (\d:\d\d) {re.escape(step)}", seen))
    assert len(times) > 1 and "INFO" not in seen
    assert "Successfully installed tiercel" in seen
    assert (checkout.root / "out" / "pip.log").read_text() == SAYS
    seen = venv.pip_on_a_terminal(
        "install", ".", "--force-reinstall", "-C", "progress=no", cwd=checkout.root
    )
    assert "tiercel: 0:" not in seen and "Successfully installed tiercel" in seen


def test_progress_without_a_terminal(checkout: Checkout, venv: Venv) -> None:
    """All that Bazel says is in pip's output where that is asked for, or after a failure."""
    (checkout.root / "says").write_text(SAYS)
    result = venv.pip("install", "-v", ".", cwd=checkout.root)
    assert result.returncode == 0, result.stderr
    said = result.stdout + result.stderr
    assert "[1,230 / 1,520] Compiling kernels/norm/norm.cu" in said and "tiercel: 0:0" not in said


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
    assert "_cute.py" in venv.run(
        f"import pathlib, tiercel; print(*{folder}.glob('jit/kernels/*/*'))"
    )
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
        ("arch=sm_80", "--config-settings arch=sm_80: expected sm_90a, the kernels are written"),
        ("progress=maybe", "--config-settings progress=maybe: expected true or false"),
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


def test_distributions_in_the_checkout_leave_it_clean(checkout: Checkout) -> None:
    """As docs/from-source.md has the command; a release refuses a tree with anything untracked."""
    git = ["git", "-C", checkout.root, "-c", "user.name=A", "-c", "user.email=a@example.com"]
    ignored = (HERE / ".gitignore").read_text()
    (checkout.root / ".gitignore").write_text(ignored + "/bazel-out/\n")
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "One"], check=True)
    name = backend(checkout.root, "b.build_sdist('.')")
    first = (checkout.root / name).read_bytes()
    assert backend(checkout.root, "b.build_sdist('.')") == name
    assert (checkout.root / name).read_bytes() == first, "it does not hold the one before"
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, check=True)
    assert status.stdout == b""


RELATIVE = re.compile(r"\]\((?!https://)")


def test_links_of_the_index_page(checkout: Checkout, tmp_path: pathlib.Path) -> None:
    """An index shows the description alone: what README.md links to is not beside it."""
    version, readme = os.environ["VERSION"], (HERE / "README.md").read_text()
    assert RELATIVE.search(readme), "relative in the checkout, for a clone and a branch"
    with zipfile.ZipFile(WHEEL) as archive:
        said = archive.read(f"tiercel-{version}.dist-info/METADATA").decode()
        links = archive.read("tiercel/_version.py").decode()
    repository = re.search('^REPOSITORY = "(.*)"$', links, re.MULTILINE)[1]
    headers, _, page = said.partition("\n\n")
    assert not RELATIVE.search(page)
    assert f"]({repository}/blob/v{version}/docs/plugins.md)" in page
    code = f"b.sdist.description.absolute('[a](b.md) ![c](d.png) [e\\ne](#f)', 'R', '{version}')"
    blob = f"R/blob/v{version}"
    shown = f"[a]({blob}/b.md) ![c](R/raw/v{version}/d.png) [e\ne]({blob}/README.md#f)"
    assert backend(checkout.root, code) == shown
    nightly = code.replace(f"'{version}'", "'0.2.0.dev20260101'")
    assert "[a](R/blob/main/b.md)" in backend(checkout.root, nightly)
    # The same of a source distribution.
    name = backend(checkout.root, f"b.build_sdist({str(tmp_path)!r})")
    with tarfile.open(tmp_path / name) as archive:
        info = archive.extractfile(f"{name.removesuffix('.tar.gz')}/PKG-INFO").read().decode()
    other, _, same = info.partition("\n\n")
    assert same.strip() == page.strip()
    urls = [line for line in headers.splitlines() if line.startswith("Project-URL: ")]
    assert len(urls) == 4
    assert urls == [line for line in other.splitlines() if line.startswith("Project-URL: ")]


def test_texts_of_the_wheel_name_no_page_that_it_lacks() -> None:
    with zipfile.ZipFile(WHEEL) as archive:
        sources = {n: archive.read(n).decode() for n in archive.namelist() if n.endswith(".py")}
    bare = re.compile(r"(?<![\w/.])docs/[\w/-]+\.md")
    assert {name: found for name, text in sources.items() if (found := bare.findall(text))} == {}


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
    required = said.get_all("Requires-Dist")
    assert set(map(Requirement, declared)) == set(map(Requirement, required))
    assert len(declared) == len(required)
    urls = dict(line.split(", ") for line in said.get_all("Project-URL"))
    assert project["urls"] == urls and len(urls) == 4
    (script,) = project["scripts"].items()
    assert " = ".join(script) in entries
