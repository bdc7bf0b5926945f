# SPDX-License-Identifier: Apache-2.0
"""A build of small wheels that answer to what a nightly tries, in place of minutes of compiling."""

import pathlib

_PROGRAM = '''\
# SPDX-License-Identifier: Apache-2.0
import base64, hashlib, os, pathlib, re, sys, zipfile

option, folder = sys.argv[1], pathlib.Path(sys.argv[2])
assert option == "--release"
folder.mkdir(parents=True, exist_ok=True)
print("building", flush=True)
pathlib.Path("out/environment").write_text(str(dict(os.environ)))
version = re.search('VERSION = "(.*)"', pathlib.Path("version.bzl").read_text())[1]
info = f"tiercel-{version}.dist-info"
main = """
import json, platform, sys
from tiercel import __version__
def main():
    if sys.argv[1] == "doctor":
        print(json.dumps({"tiercel": __version__, "python": platform.python_version()}))
    else:
        print(json.dumps({"kernels": ["one"]}))
"""
for python in os.environ["SUPPORTED_PYTHONS"].split():
    tag = "cp" + python.replace(".", "")
    name = f"{tag}-{tag}-manylinux_2_34_x86_64"
    files = {
        "tiercel/__init__.py": f"__version__ = {version!r}\\n",
        "tiercel/cli.py": main,
        f"{info}/METADATA": f"Metadata-Version: 2.1\\nName: tiercel\\nVersion: {version}\\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\\nRoot-Is-Purelib: false\\nTag: {name}\\n",
        f"{info}/entry_points.txt": "[console_scripts]\\ntiercel = tiercel.cli:main\\n",
    }
    def line(path, text):
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        return f"{path},sha256={digest.rstrip('=')},{len(text)}\\n"
    record = "".join(line(*item) for item in files.items())
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\\n"
    with zipfile.ZipFile(folder / f"tiercel-{version}-{name}.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
'''


def write_wheels(program: pathlib.Path) -> None:
    program.write_text(_PROGRAM)
