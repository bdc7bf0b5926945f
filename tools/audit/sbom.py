# SPDX-License-Identifier: Apache-2.0
"""The CycloneDX bill of materials that ships in a wheel (`.dist-info/sboms/`, PEP 770).

    sbom.py VERSION MODULE COMPONENTS OUT LOCK ...

Versions come from the lock files and from the compiler's note in the module, so that the same build
gives the same bytes: no time, and a serial number made of the contents.
"""

import io
import json
import pathlib
import re
import sys
import uuid

NAME = "tiercel.cdx.json"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "tiercel.sbom")


def compiler_version(module: bytes) -> str:
    """gcc's version, from the note that it leaves in what it compiles (the first is the host's)."""
    from elftools.elf.elffile import ELFFile

    section = ELFFile(io.BytesIO(module)).get_section_by_name(".comment")
    notes = section.data().decode(errors="replace") if section else ""
    match = re.search(r"GCC: \([^)]*\) (\d+\.\d+\.\d+)", notes)
    if not match:
        raise SystemExit("the module has no note of gcc's version (.comment)")
    return match[1]


def locked_versions(locks: list[pathlib.Path]) -> dict[tuple[str, str], str]:
    """(lock, package) and its version."""
    pattern = re.compile(r"^([\w.-]+)==([\w.]+) ", re.MULTILINE)
    return {(k.stem, name): v for k in locks for name, v in pattern.findall(k.read_text())}


def bill(version: str, parts: list[dict], compiler: str, locked: dict) -> str:
    """The document as JSON text."""
    from cyclonedx.model import Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    def license_of(name: str):
        if name.startswith("LicenseRef-"):
            return DisjunctiveLicense(name=name.removeprefix("LicenseRef-"))
        return LicenseExpression(name) if " " in name else DisjunctiveLicense(id=name)

    def component(kind: ComponentType, name: str, number: str, part: dict) -> Component:
        purl = PackageURL("pypi", None, name, number) if part.get("purl") else None
        return Component(
            type=kind,
            name=name,
            version=number,
            purl=purl,
            bom_ref=f"{name}@{number}" + (" (build)" if part.get("built_with") else ""),
            licenses=[license_of(part["license"])],
            scope=ComponentScope.EXCLUDED if part.get("built_with") else None,
            properties=[Property(name="tiercel:used", value=part["used"])]
            if "used" in part
            else [],
        )

    bom = Bom()
    own = {"license": "Apache-2.0", "purl": "pypi"}
    bom.metadata.component = component(ComponentType.LIBRARY, "tiercel", version, own)
    found = []
    for part in parts:
        source, *where = part["version"].split()
        number = compiler if source == "compiler" else locked[tuple(where)]
        kind = ComponentType.APPLICATION if part.get("built_with") else ComponentType.LIBRARY
        bom.components.add(entry := component(kind, part["name"], number, part))
        if not part.get("built_with"):
            found.append(entry)
    bom.register_dependency(bom.metadata.component, found)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    document.pop("serialNumber")
    document["metadata"].pop("timestamp")
    text = json.dumps(document, sort_keys=True)
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(_NAMESPACE, text)}"
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def main() -> int:
    version, module, components, out, *locks = sys.argv[1:]
    parts = json.loads(pathlib.Path(components).read_text())
    compiler = compiler_version(pathlib.Path(module).read_bytes())
    locked = locked_versions([pathlib.Path(lock) for lock in locks])
    pathlib.Path(out).write_text(bill(version, parts, compiler, locked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
