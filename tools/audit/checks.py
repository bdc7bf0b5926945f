# SPDX-License-Identifier: Apache-2.0
"""What a wheel has to be before a stranger installs it: each check yields what is wrong.

CHECKS look at one wheel, SET_CHECKS at all wheels of a version. Those of the extension module are
in module_checks.py.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from policy import Policy
from wheel_file import Wheel

PLATFORM = "manylinux_2_34_x86_64"


def tags(wheel: Wheel, policy: Policy) -> Iterator[str]:
    tag = "{python}-{abi}-{platform}".format(**wheel.tags)
    if wheel.tags["abi"] != wheel.tags["python"] or wheel.tags["platform"] != PLATFORM:
        yield f"is tagged {tag}, expected cpXY-cpXY-{PLATFORM}"
    if wheel.wheel.get_all("Tag") != [tag]:
        yield f"WHEEL says {wheel.wheel.get_all('Tag')}, the file's name {tag}"
    if wheel.wheel["Root-Is-Purelib"] != "false" or wheel.wheel["Wheel-Version"] != "1.0":
        yield "WHEEL is not of version 1.0 for a platform"
    suffix = f"cpython-{wheel.tags['python'].removeprefix('cp')}-x86_64-linux-gnu.so"
    if wheel.modules != [f"tiercel/_C.{suffix}"]:
        yield f"has the modules {wheel.modules}, expected tiercel/_C.{suffix} alone"


def metadata(wheel: Wheel, policy: Policy) -> Iterator[str]:
    found = wheel.metadata
    expected = {
        "Name": "tiercel",
        "Version": wheel.tags["version"],
        "License": "Apache-2.0",
        "Description-Content-Type": "text/markdown",
        "Requires-Python": f">={policy.pythons[0]}",
    }
    if policy.version:
        expected["Version"] = policy.version
    for field, value in expected.items():
        if found[field] != value:
            yield f"METADATA: {field} is {found[field]}, expected {value}"
    yield from (f"METADATA lacks {field}" for field in ("Author", "Summary") if not found[field])
    if not found.get_payload().lstrip().startswith("# Tiercel"):
        yield "METADATA: the description is not the README"
    wanted = {f"Programming Language :: Python :: {python}" for python in policy.pythons}
    wanted |= {"Operating System :: POSIX :: Linux", "Typing :: Typed"}
    if missing := sorted(wanted - set(found.get_all("Classifier", []))):
        yield f"METADATA lacks the classifiers {missing}"


def requirements(wheel: Wheel, policy: Policy) -> Iterator[str]:
    required = wheel.metadata.get_all("Requires-Dist", [])
    for requirement in required:
        if not re.search(r";.*\bextra *==", requirement):
            yield f"requires {requirement}: everything is an extra"
    if not [r for r in required if re.fullmatch(r"torch>=2\.9; extra == 'torch'", r)]:
        yield "lacks the extra torch: torch>=2.9"


def record(wheel: Wheel, policy: Policy) -> Iterator[str]:
    said, actual = wheel.record(), wheel.actual_record()
    for path in sorted(said.keys() | actual.keys()):
        if said.get(path) != actual.get(path):
            yield f"RECORD says {said.get(path)} of {path}, which is {actual.get(path)}"
    if len({entry.filename for entry in wheel.entries}) != len(wheel.entries):
        yield "has a path twice"


def times(wheel: Wheel, policy: Policy) -> Iterator[str]:
    if found := {entry.date_time for entry in wheel.entries} - {(1980, 1, 1, 0, 0, 0)}:
        yield f"has the times {sorted(found)[:3]} inside: two builds would differ"


def modes(wheel: Wheel, policy: Policy) -> Iterator[str]:
    for entry in wheel.entries:
        path, mode = entry.filename, entry.external_attr >> 16
        expected = 0o100755 if path.endswith(".so") else 0o100644
        if mode != expected and not entry.is_dir():
            yield f"{path} has the mode {mode:o}, expected {expected:o}"


def contents(wheel: Wheel, policy: Policy) -> Iterator[str]:
    """Sources, data and the one module; so nothing of CUDA, PyTorch or a compiler is bundled."""
    endings = (".py", ".pyi", ".json", ".yaml", "/py.typed", *wheel.modules)
    for path in wheel.members:
        if path.startswith(wheel.info + "/"):
            continue
        if not path.startswith("tiercel/") or not path.endswith(endings) or ".." in path:
            yield f"bundles {path}"
    for path in ("tiercel/__init__.py", "tiercel/py.typed", "tiercel/_C.pyi"):
        if path not in wheel.members:
            yield f"lacks {path}"


def licences(wheel: Wheel, policy: Policy) -> Iterator[str]:
    folder = f"{wheel.info}/licenses/"
    if b"Apache License" not in wheel.members.get(folder + "LICENSE", b""):
        yield "lacks its own licence"
    notices = wheel.members.get(folder + "THIRD_PARTY_NOTICES.txt", b"").decode()
    for part in policy.components:
        if part.get("built_with"):
            continue
        _, found, text = notices.partition(part["notice"])
        # A heading without the text below it is no licence.
        short = part["notice"].startswith("====") and len(text.split("====")[0]) < 1000
        if not found or short:
            yield f"THIRD_PARTY_NOTICES.txt lacks the licence of {part['name']}"


def bill_of_materials(wheel: Wheel, policy: Policy) -> Iterator[str]:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = wheel.members.get(f"{wheel.info}/sboms/tiercel.cdx.json", b"").decode()
    if not text:
        yield "lacks its bill of materials (sboms/tiercel.cdx.json)"
        return
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        yield f"the bill of materials is not CycloneDX 1.6: {str(error)[:300]}"
        return
    document = json.loads(text)
    own = document["metadata"]["component"]
    if (own["name"], own["version"]) != ("tiercel", wheel.tags["version"]):
        yield f"the bill of materials is of {own['name']} {own['version']}"
    listed = {part["name"]: part["version"] for part in document["components"]}
    expected = {part["name"] for part in policy.components}
    if set(listed) != expected:
        yield f"the bill of materials lists {sorted(listed)}, expected {sorted(expected)}"
    for (_, name), version in policy.locked.items():
        if name in listed and listed[name] != version:
            yield f"the bill of materials has {name} {listed[name]}, the lock file {version}"


def size(wheel: Wheel, policy: Policy) -> Iterator[str]:
    actual = wheel.path.stat().st_size
    if policy.budget["wheel_bytes"] > policy.budget["limit_bytes"]:
        yield "budget.json allows more than its own limit"
    if actual > policy.budget["wheel_bytes"]:
        yield (
            f"has {actual:,} bytes, the budget is {policy.budget['wheel_bytes']:,}; since the last "
            f"table of sizes: {', '.join(wheel.growth(policy.sizes)) or 'nothing grew'}"
        )


def one_wheel_a_python(wheels: list[Wheel], policy: Policy) -> Iterator[str]:
    versions = {wheel.tags["version"] for wheel in wheels}
    if len(versions) != 1:
        yield f"the wheels are of the versions {sorted(versions)}"
    expected = sorted("cp" + python.replace(".", "") for python in policy.pythons)
    found = sorted(wheel.tags["python"] for wheel in wheels)
    if found != expected:
        yield f"there are wheels for {found}, expected {expected}"


def same_python_files(wheels: list[Wheel], policy: Policy) -> Iterator[str]:
    def own(wheel: Wheel) -> dict[str, bytes]:
        members = wheel.members.items()
        return {k: v for k, v in members if not k.endswith(".so") and not k.startswith(wheel.info)}

    first = own(wheels[0])
    for other in wheels[1:]:
        files = own(other)
        both = first.keys() | files.keys()
        if differ := sorted(path for path in both if first.get(path) != files.get(path)):
            yield f"{other.path.name} and {wheels[0].path.name} differ in {differ[:3]}"


def twine(wheels: list[Wheel], policy: Policy) -> Iterator[str]:
    env = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "twine", "check", "--strict", *[str(w.path) for w in wheels]]
    result = subprocess.run(command, capture_output=True, env=env, text=True)
    if result.returncode or result.stdout.count("PASSED") != len(wheels):
        yield f"twine check --strict: {result.stdout.strip()} {result.stderr.strip()}"


CHECKS = [
    tags,
    metadata,
    requirements,
    record,
    times,
    modes,
    contents,
    licences,
    bill_of_materials,
    size,
]
SET_CHECKS = [one_wheel_a_python, same_python_files, twine]
