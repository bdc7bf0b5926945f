# SPDX-License-Identifier: Apache-2.0
"""What the extension module asks of a machine, shows of itself and tells of where it was built."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from checks import PLATFORM
from policy import Policy
from wheel_file import Wheel

# The newest symbol versions that manylinux_2_34 has, by family.
NEWEST = {"GLIBC": (2, 34), "GCC": (4, 3)}

# glibc's own, and the unwinder, of which a process must have one (gcc 12's static one asks for
# GLIBC_2.35). Everything else is inside, or opened when it is first needed.
ALLOWED_LIBRARIES = {
    *("ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6"),
    *("libpthread.so.0", "librt.so.1"),
}

# For Python, and for C++ programs (docs/cpp.md).
EXPORTED = {"PyInit__C", "tiercel_register_torch_ops"}

# Paths of a build machine, which would also make the bytes depend on the folder.
PATHS_OF_A_BUILD = re.compile(
    rb"/home/|/root/|/Users/|/tmp/|/usr/local/cuda|execroot|bazel-out|_bazel_|linux-sandbox"
)
# Source text may speak of /tmp/; of a person's folder or a build's it may not.
PRIVATE_PATHS = re.compile(rb"/home/\w|/root/|/Users/\w|execroot|_bazel_")
PRINTABLE = re.compile(rb"[\x21-\x7e]*")


def libraries(wheel: Wheel, policy: Policy) -> Iterator[str]:
    for name in wheel.dynamic("DT_NEEDED"):
        if name not in ALLOWED_LIBRARIES:
            yield f"the module needs {name}"
    for path in wheel.dynamic("DT_RPATH") + wheel.dynamic("DT_RUNPATH"):
        yield f"the module looks for libraries in {path}"


def symbols(wheel: Wheel, policy: Policy) -> Iterator[str]:
    if wheel.exported() != EXPORTED:
        yield f"the module exports {sorted(wheel.exported())[:5]}, expected {sorted(EXPORTED)}"
    if needed := wheel.needed_of_python():
        yield f"no program without Python can load the module: it needs {needed[:5]}"
    versions = wheel.needed_versions()
    if not versions:
        yield "the module names no symbol versions"
    for library, version in versions:
        family, _, number = version.partition("_")
        numbers = number.split(".")[:2]
        known = family in NEWEST and all(part.isdigit() for part in numbers)
        if not known or tuple(map(int, numbers)) > NEWEST[family]:
            yield f"the module needs {version} of {library}, newer than {PLATFORM}"


def platform(wheel: Wheel, policy: Policy) -> Iterator[str]:
    env = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel.path)]
    result = subprocess.run(command, capture_output=True, env=env, text=True)
    text = " ".join(result.stdout.split())
    if re.findall(r'the following platform tag: "(\w+)"', text) != [PLATFORM]:
        yield f"auditwheel does not find it fit for {PLATFORM}: {text} {result.stderr.strip()}"


def build_paths(wheel: Wheel, policy: Policy) -> Iterator[str]:
    """No path and no user's name in a binary; also not where compression hides them."""
    here = [os.path.expanduser("~"), os.environ.get("BUILD_WORKSPACE_DIRECTORY", "")]
    here = [path.encode() for path in here if len(path) > len("/root")]
    for path, data in wheel.members.items():
        pattern = PATHS_OF_A_BUILD if path.endswith(".so") else PRIVATE_PATHS
        found = _around(pattern, data) + [own for own in here if own in data]
        if found:
            yield f"{path} tells of the build machine: {found[:3]}"
    for section in wheel.elf.iter_sections():
        if section.name.startswith((".debug", ".zdebug")) or section["sh_type"] == "SHT_SYMTAB":
            yield f"the module has the section {section.name}: it is not stripped"
    if policy.cuobjdump:
        for name, kernel in _kernels(wheel, policy.cuobjdump):
            if found := _around(PATHS_OF_A_BUILD, kernel):
                yield f"the kernels of {name} tell of the build machine: {found[:3]}"


def _around(pattern: re.Pattern[bytes], data: bytes) -> list[bytes]:
    """The printable text around each match, up to 200 bytes to each side.

    A pattern that began with any text would begin again at each byte: ten seconds for a module.
    """
    found = []
    for match in pattern.finditer(data):
        before = PRINTABLE.match(data[max(0, match.start() - 200) : match.start()][::-1])[0][::-1]
        found.append(before + PRINTABLE.match(data, match.start(), match.end() + 200)[0])
    return found


def _kernels(wheel: Wheel, cuobjdump: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """The GPU code inside, which nvcc compresses."""
    with tempfile.TemporaryDirectory() as folder:
        module = pathlib.Path(folder) / "module.so"
        module.write_bytes(wheel.members[wheel.module])
        command = [cuobjdump.absolute(), "-xelf", "all", module]
        subprocess.run(command, cwd=folder, capture_output=True, check=True)
        for cubin in sorted(pathlib.Path(folder).glob("*.cubin")):
            yield cubin.name, cubin.read_bytes()


MODULE_CHECKS = [libraries, symbols, platform, build_paths]
