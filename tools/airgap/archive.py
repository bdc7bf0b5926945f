# SPDX-License-Identifier: Apache-2.0
"""What was fetched as one file: exported for machines without mirrors, imported hash by hash."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import compiler
import debs
import progress
import recipe
import wheel
from errors import SetupError

_FORMAT = 1
_FOLDERS = ("compiler", "debs", "wheel")


def write_manifest(fetched: Path, facts: dict) -> None:
    """Records name, size and hash of every file; its presence says that the fetch is complete."""
    files = {}
    for folder in _FOLDERS:
        for path in sorted((fetched / folder).glob("*")):
            files[f"{folder}/{path.name}"] = {
                "size": path.stat().st_size,
                "sha256": debs.sha256(path),
            }
    manifest = {"format": _FORMAT, "recipe": recipe.RECIPE, **facts, "files": files}
    temporary = fetched / "manifest.json.tmp"
    temporary.write_text(json.dumps(manifest, indent=1) + "\n")
    temporary.replace(fetched / "manifest.json")


def read_manifest(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def export(fetched: Path, target: Path) -> None:
    manifest = read_manifest(fetched / "manifest.json")
    if not manifest:
        raise SetupError("there is no fetched toolchain to export: run a build first")
    compiler.fetch(fetched / "compiler")
    write_manifest(fetched, manifest)
    manifest = read_manifest(fetched / "manifest.json")
    target = target.absolute()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    bar = progress.Progress("exporting")
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            tar.add(fetched / "manifest.json", "manifest.json", filter=_plain)
            for count, name in enumerate(manifest["files"], 1):
                tar.add(fetched / name, name, filter=_plain)
                bar.update(f"{count} of {len(manifest['files'])} files")
        temporary.replace(target)
    except OSError as error:
        raise SetupError(f"{target} could not be written: {error.strerror}") from error
    finally:
        bar.close()
        temporary.unlink(missing_ok=True)
    size = progress.megabytes(target.stat().st_size)
    progress.say(f"exported Bazel {manifest['bazel']} and the C++ compiler to {target} ({size} MB)")
    progress.say(f"on the other machine: --toolchain-sha256 {debs.sha256(target)}")


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o644
    return info


def unpack(source: Path, fetched: Path, expected: str = "") -> dict:
    """Extracts `source` into `fetched` (replacing it) once everything in it has been verified.

    The hashes inside are the archive's own: they find damage. Who does not trust the way that it
    came by passes what the export said as `expected`.
    """
    try:
        if expected and debs.sha256(source) != expected.strip().lower():
            raise SetupError(f"{source} has another sha256 than --toolchain-sha256 {expected}")
    except OSError as error:
        raise SetupError(f"{source} could not be read: {error.strerror}") from error
    temporary = fetched.with_name(f"fetched.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with tarfile.open(source, "r:") as tar:
            manifest = _manifest_of(tar, source)
            _extract(tar, manifest, temporary, source)
    except (tarfile.TarError, EOFError) as error:
        raise SetupError(f"{source} is no exported toolchain, or is damaged: {error}") from error
    except OSError as error:
        raise SetupError(f"{source} could not be read: {error.strerror}") from error
    # The manifest goes last: only with it does `fetched` count as complete.
    shutil.rmtree(fetched, ignore_errors=True)
    temporary.rename(fetched)
    (fetched / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _manifest_of(tar: tarfile.TarFile, source: Path) -> dict:
    first = tar.next()
    if first is None or first.name != "manifest.json" or not first.isreg():
        raise SetupError(f"{source} is no exported toolchain: it does not start with a manifest")
    try:
        manifest = json.load(tar.extractfile(first))
        known = (manifest["format"], manifest["recipe"]) == (_FORMAT, recipe.RECIPE)
        version, files = manifest["bazel"], manifest["files"]
        if not isinstance(version, str) or not all(
            isinstance(entry["sha256"], str) for entry in files.values()
        ):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SetupError(f"{source} is no exported toolchain: its manifest is damaged") from error
    if not known:
        raise SetupError(
            f"{source} was exported for another set-up ({manifest['recipe']}), this one needs"
            f" {recipe.RECIPE}: export it again from this revision"
        )
    if not recipe.version_fits(version):
        raise SetupError(
            f"{source} holds Bazel {version}; the tested range is {recipe.range_text()}"
        )
    for name in files:
        folder, _, base = name.partition("/")
        if folder not in _FOLDERS or not base or "/" in base or base.startswith("."):
            raise SetupError(f"{source} names a file outside of its folders: {name}")
    return manifest


def _extract(tar: tarfile.TarFile, manifest: dict, folder: Path, source: Path) -> None:
    files = dict(manifest["files"])
    total = len(files)
    bar = progress.Progress("importing")
    try:
        while (member := tar.next()) is not None:
            expected = files.pop(member.name, None)
            if expected is None or not member.isreg():
                raise SetupError(
                    f"{source} holds a file that its manifest does not name: {member.name}"
                )
            path = folder / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as stream:
                shutil.copyfileobj(tar.extractfile(member), stream, 1 << 20)
            if debs.sha256(path) != expected["sha256"]:
                raise SetupError(f"{source} is damaged: {member.name} has another hash than listed")
            # The list is the archive's own word; this hash is ours.
            if member.name.startswith("wheel/") and not wheel.is_pinned(path):
                raise SetupError(f"{source}: {member.name} has another hash than the pinned one")
            bar.update(f"{total - len(files)} of {total} files")
    except SetupError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        bar.close()
    if files:
        shutil.rmtree(folder, ignore_errors=True)
        raise SetupError(f"{source} is cut short: {len(files)} of its {total} files are missing")
