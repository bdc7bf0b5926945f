# SPDX-License-Identifier: Apache-2.0
"""`pip install -e .`: the package as links to the checkout, with what was built laid between them.

out/editable/<tag>/tiercel has, of each folder of the wheel, a link to the source folder where the
wheel adds nothing to it, else one link a source and a copy of each built file.
"""

import base64
import csv
import hashlib
import io
import os
import pathlib
import shutil
import zipfile


def _link(source: pathlib.Path, built: set[str], target: pathlib.Path, path: str) -> None:
    """target/path: a link, or a folder of links where something built goes below it."""
    inside = {name for name in built if name.startswith(f"{path}/")}
    if not inside:
        (target / path).symlink_to(source / path)
        return
    (target / path).mkdir()
    if (source / path).is_dir():
        for entry in sorted(os.listdir(source / path)):
            if entry != "__pycache__" and f"{path}/{entry}" not in built:
                _link(source, inside, target, f"{path}/{entry}")


def lay_out(root: pathlib.Path, archive: zipfile.ZipFile, target: pathlib.Path) -> None:
    source = root / "python"
    files = [e for e in archive.namelist() if e.startswith("tiercel/") and not e.endswith("/")]
    built = {path for path in files if not (source / path).is_file()}
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _link(source, built, part, "tiercel")
    for path in built:
        (part / path).parent.mkdir(parents=True, exist_ok=True)
        (part / path).write_bytes(archive.read(path))
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def write(root: pathlib.Path, wheel: pathlib.Path, folder: pathlib.Path) -> str:
    name, version, python = wheel.name.split("-")[:3]
    info = f"{name}-{version}.dist-info/"
    target = root / "out" / "editable" / python
    with zipfile.ZipFile(wheel) as archive:
        lay_out(root, archive, target)
        kept = [e for e in archive.namelist() if e.startswith(info) and not e.endswith("/")]
        files = {path: archive.read(path) for path in kept if path != f"{info}RECORD"}
    files["__editable__.tiercel.pth"] = f"{target}\n".encode()
    record = io.StringIO()
    lines = csv.writer(record, lineterminator="\n")
    lines.writerows([path, _digest(data), len(data)] for path, data in files.items())
    lines.writerow([f"{info}RECORD", "", ""])
    files[f"{info}RECORD"] = record.getvalue().encode()
    with zipfile.ZipFile(folder / wheel.name, "w", zipfile.ZIP_DEFLATED) as out:
        for path, data in files.items():
            out.writestr(path, data)
    return wheel.name
