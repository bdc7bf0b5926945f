# SPDX-License-Identifier: Apache-2.0
"""The files to send: the wheel that fits, the user's files, and the steps to run."""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercel.workbench.deploy import DeployError


@dataclass(frozen=True)
class Work:
    """The steps to run there, after `tiercel doctor`."""

    backends: Sequence[Path] = ()
    suites: Path | None = None
    bench: str | None = None  # options of `tiercel bench`, one text
    tune: str | None = None  # of `tiercel tune`
    steps: Sequence[Sequence[str]] = field(default_factory=tuple)


def choose_wheel(places: Sequence[Path], there: Mapping[str, str]) -> Path:
    """The newest wheel for the Python at the other end."""
    if there["machine"] != "linux x86_64":
        raise DeployError(f"wheels are for Linux on x86_64, {there['host']} has {there['machine']}")
    name, _, version = there["libc"].partition(" ")
    if name == "glibc" and tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 34):
        raise DeployError(f"the wheels need glibc 2.34, {there['host']} has {version}")
    found = []
    for place in places:
        if not place.exists():
            raise DeployError(f"{place} does not exist")
        found += sorted(place.glob("tiercel-*.whl")) if place.is_dir() else [place]
    fitting = [path for path in found if f"-{there['tag']}-" in path.name]
    if not fitting:
        have = ", ".join(path.name for path in found) or "none"
        raise DeployError(
            f"no wheel for {there['tag']} (Python {there['python']} there); there are: "
            f"{have}. Build them: ./bazelw run //python:dist -- dist"
        )
    return max(fitting, key=lambda path: path.stat().st_mtime)


def steps(work: Work, files: Mapping[Path, str]) -> list[dict[str, Any]]:
    """Each a title and the words after the interpreter."""

    def step(title: str, *words: str, **options: Any) -> dict[str, Any]:
        return {"title": title, "words": ["-m", "tiercel", *words], **options}

    found = [step("tiercel doctor", "doctor"), _doctor_file()]
    paths = [word for path in work.backends for word in ("--path", files[path])]
    if paths or not (work.bench is not None or work.tune is not None):
        found.append(step("tiercel smoke", "smoke", *paths, "--save", "out/smoke.jsonl"))
    if work.bench is not None:
        words = shlex.split(work.bench) + ["--out", "out/bench.jsonl"]
        if work.suites is not None:
            words = ["--suites", files[work.suites], *words]
        found.append(step(f"tiercel bench {work.bench}".strip(), "bench", *words))
    if work.tune is not None:
        words = [*shlex.split(work.tune), "--output", "out/results.json"]
        found.append(step(f"tiercel tune {work.tune}".strip(), "tune", *words))
    return found


def _doctor_file() -> dict[str, Any]:
    code = (
        "import subprocess, sys; "
        "sys.exit(subprocess.call([sys.executable, '-m', 'tiercel', 'doctor', '--json'], "
        "stdout=open('out/doctor.json', 'w')))"
    )
    return {"title": "its report to out/doctor.json", "words": ["-c", code], "may_fail": True}


def payload(wheel: Path, work: Work, folder: str | None) -> bytes:
    """A line of JSON for the agent, then a tar."""
    files: dict[Path, str] = {}
    for number, path in enumerate([*work.backends, *([work.suites] if work.suites else [])]):
        if not path.exists():
            raise DeployError(f"{path} does not exist")
        files[path] = f"files/{number}/{path.name}"
    job = {"wheel": wheel.name, "steps": steps(work, files)}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.add(wheel, wheel.name, filter=_plain)
        for path, name in files.items():
            archive.add(path, name, filter=_plain)
        text = json.dumps(job).encode()
        info = tarfile.TarInfo("job.json")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    return json.dumps({"folder": folder}).encode() + b"\n" + made.getvalue()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without owners; no caches of Python's."""
    if "__pycache__" in info.name:
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
