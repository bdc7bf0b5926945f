# SPDX-License-Identifier: Apache-2.0
"""A Bazel registry on the loopback, for ci/registry_mode.py.

METADATA is a copy of the Bazel Central Registry (its folder `modules` with what the graph reaches).
SOURCES has each module's sources: the archive that the registry names, by its file name, or the
folder <module>-<version>. A folder <module> stands for every version: that tries a revision, and
shows nothing of the version.
"""

import base64
import functools
import hashlib
import http.server
import io
import json
import re
import sys
import tarfile
from pathlib import Path


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs between two copies of the same files."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


@functools.cache
def _archive(folder: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(folder, arcname=".", filter=_plain)
    return data.getvalue()


class Registry(http.server.ThreadingHTTPServer):
    def __init__(self, metadata: Path, sources: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.metadata, self.sources = metadata, sources
        self.address = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str) -> bytes | None:
        if ".." in path.split("/"):
            return None
        found = re.fullmatch("modules/([^/]+)/([^/]+)/source.json", path)
        if found:
            return self._source(*found.groups())
        if not path.startswith("archives/"):
            return _bytes(self.metadata / path)
        name = path.removeprefix("archives/")
        folder = self.sources / name.removesuffix(".tar")
        if folder.is_dir():
            return _archive(folder)
        if not (self.sources / name).is_file():
            print(f"registry: {self.sources} lacks {name}", file=sys.stderr)
        return _bytes(self.sources / name)

    def _source(self, module: str, version: str) -> bytes | None:
        text = _bytes(self.metadata / "modules" / module / version / "source.json")
        if not text:
            return None
        source = json.loads(text)
        name = source.get("url", "").rpartition("/")[2]
        exact = (self.sources / f"{module}-{version}").is_dir()
        folder = self.sources / (f"{module}-{version}" if exact else module)
        if not folder.is_dir() or (name and (self.sources / name).is_file()):
            # Bazel reports this address if it needs an archive that is missing.
            return json.dumps(source | {"url": f"{self.address}/archives/{name}"}).encode()
        digest = base64.b64encode(hashlib.sha256(_archive(folder)).digest()).decode()
        served = {
            "url": f"{self.address}/archives/{folder.name}.tar",
            "integrity": f"sha256-{digest}",
        }
        # Patches and added files belong to the sources that the registry means.
        kept = ("patches", "patch_strip", "overlay") if exact else ()
        return json.dumps(served | {key: source[key] for key in kept if key in source}).encode()


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = self.server.answer(self.path.lstrip("/"))
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def log_message(self, *_) -> None:
        pass  # Bazel reports what it lacks
