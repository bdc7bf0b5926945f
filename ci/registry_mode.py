#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Registry mode with the real rule sets, without a network: wheels, tests, the build graph.

    ci/registry_mode.py METADATA SOURCES FOLDER [BAZEL_WORD...]

METADATA and SOURCES are as in tools/airgap/registry.py. Interpreters that rules_python downloads
lie in SOURCES too, else this machine's Pythons replace them. It builds in FOLDER/tiercel, a copy of
the checkout with its settings and caches; FOLDER is not below /tmp, has 8 GB and is kept. Words for
Bazel, such as `build //python:wheels`, replace the three steps. Bazel is the one on PATH, else
air-gapped mode's.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "airgap"))

import main as bazelw  # noqa: E402
import prefix  # noqa: E402
import registry  # noqa: E402
import runtimes  # noqa: E402
import store  # noqa: E402

STEPS = [
    ["./bazelw", "build", "//python:wheels"],
    ["./bazelw", "test", "//..."],
    ["ci/graph.sh"],
]


def bazel(kept: store.Store) -> list[str]:
    """Bazel's command and startup options."""
    program = shutil.which("bazelisk") or shutil.which("bazel")
    if program:
        return [program]
    version = bazelw.set_up(kept)
    base = f"--install_base={prefix.install_base(kept.prefix)}"
    java = f"--server_javabase={prefix.java_home(kept.prefix)}"
    name = f"BAZEL_DEV_VERSION_OVERRIDE={version}"
    return ["env", name, str(prefix.bazel(kept.prefix)), base, "--trust_install_base", java]


def options(kept: store.Store, address: str, sources: pathlib.Path) -> list[str]:
    found = [f"--registry={address}", f"--distdir={sources}", "--lockfile_mode=off"]
    if not list(sources.glob("cpython-*")):
        (rules_python,) = sources.glob("rules_python*/")
        found += runtimes.options(kept, rules_python)
    return found


def copy(tree: pathlib.Path) -> None:
    """The checkout with changes that are not committed yet, and with this machine's settings."""
    subprocess.run([ROOT / "ci/copy.sh", tree], check=True)
    for name in (".bazelrc.ci", ".bazelrc.user"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)


def main() -> int:
    if len(sys.argv) < 4 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    metadata, sources, folder = (pathlib.Path(word).absolute() for word in sys.argv[1:4])
    copy(folder / "tiercel")
    kept = store.Store(store.cache_root())
    with registry.Registry(metadata, sources) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        rc = folder / "bazelrc"
        lines = [f"common {word}\n" for word in options(kept, server.address, sources)]
        rc.write_text("".join(lines))
        program = folder / "bin" / "bazel"
        program.parent.mkdir(exist_ok=True)
        command = shlex.join([*bazel(kept), f"--bazelrc={rc}"])
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
        path = f"{program.parent}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "TIERCEL_BAZEL_MODE": "registry"}
        steps = [["./bazelw", *sys.argv[4:]]] if sys.argv[4:] else STEPS
        status = 0
        for step in [*steps, ["./bazelw", "shutdown"]]:
            print("registry_mode:", *step, flush=True)
            done = subprocess.run(step, cwd=folder / "tiercel", env=environment)
            status = status or done.returncode
        server.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(main())
