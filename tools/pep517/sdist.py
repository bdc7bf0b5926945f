# SPDX-License-Identifier: Apache-2.0
"""The source distribution: what git has, under one folder, the same bytes each time."""

import ast
import gzip
import io
import os
import pathlib
import re
import subprocess
import tarfile

import description

# 1980, as in the wheels.
TIME = 315532800


def version(root: pathlib.Path) -> str:
    return description.constant((root / "version.bzl").read_text(), "VERSION")


def supported_pythons(root: pathlib.Path) -> list[str]:
    text = (root / "MODULE.bazel").read_text()
    return ast.literal_eval(re.search(r"^PYTHON_VERSIONS = (\[.*?\])", text, re.M | re.S)[1])


def sources(root: pathlib.Path) -> list[str]:
    """Paths below root: of git where this is a checkout, all files in an unpacked distribution."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True)
        paths = [path for path in listed.stdout.split("\0") if path]
    else:
        paths = []
        for folder, folders, files in os.walk(root):
            folders[:] = [f for f in folders if f not in ("__pycache__", "out", "dist")]
            folders[:] = [f for f in folders if not f.startswith("bazel-")]
            here = pathlib.Path(folder).relative_to(root)
            paths += [str(here / file) for file in files if not file.startswith(".bazelrc.")]
    paths = {path for path in paths if path != "PKG-INFO" and (root / path).is_file()}
    paths -= {path for path in paths if re.fullmatch(r"tiercel-[^/]*\.(tar\.gz|whl)", path)}
    return sorted(path for path in paths if not (root / path).is_symlink())


def metadata(root: pathlib.Path) -> str:
    repository = description.constant((root / "version.bzl").read_text(), "REPOSITORY")
    readme = (root / "README.md").read_text()
    readme = description.absolute(readme, repository, version(root))
    urls = description.project_urls(repository).items()
    lines = "\n".join(f"Project-URL: {label}, {address}" for label, address in urls)
    return f"""\
Metadata-Version: 2.1
Name: tiercel
Version: {version(root)}
Summary: Precompiled Hopper (H100, H200) kernels for PyTorch
License: Apache-2.0
{lines}
Requires-Python: >={supported_pythons(root)[0]}
Description-Content-Type: text/markdown

{readme}"""


def write(root: pathlib.Path, folder: pathlib.Path) -> str:
    name = f"tiercel-{version(root)}"
    files = {path: (root / path).read_bytes() for path in sources(root)}
    files["PKG-INFO"] = metadata(root).encode()
    out = folder / f"{name}.tar.gz"
    with out.open("wb") as raw, gzip.GzipFile("", "wb", mtime=TIME, fileobj=raw) as zipped:
        with tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, data in sorted(files.items()):
                entry = tarfile.TarInfo(f"{name}/{path}")
                entry.size, entry.mtime = len(data), TIME
                runs = path != "PKG-INFO" and os.access(root / path, os.X_OK)
                entry.mode = 0o755 if runs else 0o644
                archive.addfile(entry, io.BytesIO(data))
    return out.name
