# SPDX-License-Identifier: Apache-2.0
"""Two checkouts with one remote cache: `./bazelw run //tests/release:check_cache [-- TARGET...]`.

Starts nginx on the loopback and sets TIERCEL_REMOTE_CACHE as CI would. This checkout builds the
targets, by default a family's kernels, as if nothing had been built; then a copy of it, out/second,
which is kept: there everything has to come from the cache.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parent))

from nginx import Nginx, NotHere

BUILD = """
source ci/cache.sh
./bazelw shutdown # what the server has in memory, no option makes it build again
./bazelw build --disk_cache= --nouse_action_cache --noshow_progress "$@"
"""


def build(root: pathlib.Path, address: str, targets: list[str]) -> dict[str, int]:
    """How many actions came from where, as Bazel says at the end."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("BUILD_", "PYTHON"))}
    env["TIERCEL_REMOTE_CACHE"] = address
    command = ["bash", "-euc", BUILD, "build", *targets]
    result = subprocess.run(command, cwd=root, env=env, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(result.stderr)
    (line,) = re.findall(r"process(?:es)?: (.*)\.", result.stderr)
    return {what: int(n) for n, what in re.findall(r"(\d+) ([a-z -]+)", line)}


def copy(root: pathlib.Path) -> pathlib.Path:
    """The checkout with this machine's settings."""
    second = root / "out" / "second"
    subprocess.run([root / "ci/copy.sh", second], check=True)
    if (root / ".bazelrc.user").exists():
        shutil.copy(root / ".bazelrc.user", second)
    return second


def main() -> int:
    root = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    targets = sys.argv[1:] or ["//kernels/transpose"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            server = Nginx(pathlib.Path(folder))
        except NotHere as error:
            print(f"check_cache: {error}", file=sys.stderr)
            return 77
        try:
            first = build(root, f"{server.address}tiercel", targets)
            again = build(copy(root), f"{server.address}tiercel", targets)
            stored = server.log.count('"PUT /tiercel/')
        finally:
            server.close()
    subprocess.run(["./bazelw", "shutdown"], cwd=root / "out" / "second", check=True)
    print(f"check_cache: first {first}, {stored} files stored; the second checkout {again}")
    ran = [n for what, n in again.items() if what not in ("internal", "remote cache hit")]
    if sum(ran) or not again.get("remote cache hit") or not stored:
        print(
            "check_cache: error: the second checkout did not take all of the cache", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
