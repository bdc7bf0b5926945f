# SPDX-License-Identifier: Apache-2.0
"""The wheels that are released: copies in a folder of our own, so that nothing changes them between
the audit and the upload, whatever is built or copied into the folder that they came from."""

import json
import pathlib
import shutil
import tempfile

import record
from shell import Failed


class Copies:
    """Copies of a folder's wheels by the hashes that build.json has."""

    def __init__(self, source: pathlib.Path) -> None:
        self.source, self.hashes = source, record.listed(source)
        self._scratch = tempfile.TemporaryDirectory(prefix="tiercel-release-")  # mode 700
        self.folder = pathlib.Path(self._scratch.name)
        for name in self.hashes:
            shutil.copyfile(source / name, self.folder / name)
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Failed unless the copies are, now, what was built."""
        now = record.wheels(self.folder)
        if other := sorted(n for n, digest in self.hashes.items() if now.get(n) != digest):
            raise Failed(f"{', '.join(other)}: not what was built in {self.source}")
        if more := sorted(now.keys() - self.hashes.keys()):
            raise Failed(f"{', '.join(more)}: not built in {self.source}")

    def keep(self) -> None:
        """Copies what the audit wrote (SHA256SUMS, the bill of materials) to the source."""
        for path in self.folder.iterdir():
            if path.name not in self.hashes:
                shutil.copyfile(path, self.source / path.name)


class Passed:
    """Which wheels have passed the audit, as the release itself has seen: a file of its own, since
    a SHA256SUMS beside them can be anybody's."""

    def __init__(self, file: pathlib.Path, commit: str, copies: Copies) -> None:
        self.file, self.copies = file, copies
        self._record = {"commit": commit, "wheels": copies.hashes}

    def __bool__(self) -> bool:
        try:
            known = json.loads(self.file.read_text())
            lines = (self.copies.source / "SHA256SUMS").read_text().splitlines()
        except (OSError, ValueError):
            return False
        sums = {f"{digest}  {name}" for name, digest in self.copies.hashes.items()}
        return known == self._record and sums <= set(lines)

    def write(self) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self._record, indent=1) + "\n")
        part.replace(self.file)
