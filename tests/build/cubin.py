# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of each kernel, as cuobjdump and nvdisasm tell it."""

import bisect
import collections
import dataclasses
import itertools
import pathlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
OPCODE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


@dataclasses.dataclass
class CompiledKernel:
    name: str  # demangled, without "void", the anonymous namespace and the parameters
    registers: int
    stack: int
    shared: int
    local: int
    opcodes: collections.Counter


class Cuobjdump:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def _run(self, *words: str | pathlib.Path, cwd: pathlib.Path | None = None) -> str:
        command = [self.folder / "cuobjdump", *words]
        result = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
        if result.returncode and "No " not in result.stderr:
            raise RuntimeError(f"{' '.join(map(str, command))}: {result.stderr}")
        return result.stdout

    def architectures(self, file: pathlib.Path) -> set[str]:
        """Of the machine code in `file`, as sm_90a; PTX counts as compute_..."""
        elf = re.findall(r"\.(sm_\w+)\.cubin", self._run("--list-elf", file))
        ptx = re.findall(r"\.(?:sm|compute)_(\w+)\.ptx", self._run("--list-ptx", file))
        return set(elf) | {"compute_" + arch for arch in ptx}

    def kernels(self, files: list[pathlib.Path]) -> list[CompiledKernel]:
        """Those of cubins, and of object files that hold some."""
        usage, code = {}, {}
        for file in files:
            lines = self._run("--dump-resource-usage", file).splitlines()
            for line, following in itertools.pairwise(lines):
                if match := re.match(r"\s*Function (\S+):", line):
                    values = [int(value) for value in USAGE.search(following).groups()]
                    usage[file, match[1]] = values
            code |= {(file, symbol): text for symbol, text in self._code(file)}
        opcodes = self._opcodes(code)
        names = demangle([symbol for _, symbol in usage])
        return [
            CompiledKernel(names[symbol], *values, opcodes[file, symbol])
            for (file, symbol), values in usage.items()
        ]

    def _code(self, file: pathlib.Path) -> list[tuple[str, bytes]]:
        if file.suffix == ".cubin":
            return list(sections(file.read_bytes(), ".text."))
        with tempfile.TemporaryDirectory() as folder:
            self._run("--extract-elf", "all", file.absolute(), cwd=pathlib.Path(folder))
            cubins = [path.read_bytes() for path in sorted(pathlib.Path(folder).iterdir())]
        return [found for data in cubins for found in sections(data, ".text.")]

    def _opcodes(self, code: dict[Any, bytes]) -> dict[Any, collections.Counter]:
        """Of each piece of code. nvdisasm takes a quarter of a second to begin: it is called once,
        for all of them in a row."""
        with tempfile.NamedTemporaryFile() as raw:
            raw.write(b"".join(code.values()))
            raw.flush()
            command = [self.folder / "nvdisasm", "--binary", "SM90a", raw.name]
            lines = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        ends = list(itertools.accumulate(map(len, code.values())))
        keys, found = list(code), {key: collections.Counter() for key in code}
        for match in OPCODE.finditer(lines):
            place = bisect.bisect_right(ends, int(match[1], 16))
            found[keys[place]][match[2]] += 1
        return found


def sections(elf: bytes, prefix: str) -> Iterator[tuple[str, bytes]]:
    """The sections of a 64-bit ELF whose name begins so: the rest of the name, and the bytes."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in heads:
        start = heads[names][4] + name
        text = elf[start : elf.index(b"\0", start)].decode()
        if text.startswith(prefix):
            yield text.removeprefix(prefix), elf[offset : offset + length]


def demangle(symbols: list[str]) -> dict[str, str]:
    text = subprocess.run(
        ["/usr/bin/c++filt"], input="\n".join(symbols), capture_output=True, check=True, text=True
    ).stdout
    return {
        symbol: readable(name)
        for symbol, name in zip(symbols, text.strip().splitlines(), strict=True)
    }


def readable(name: str) -> str:
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"\(\w+\)(?=\d)", "", name.replace("tiercel::", ""))  # an enumerator's type
    return re.sub(r"\(.*\)$", "", name)
