# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of each kernel, as cuobjdump and nvdisasm tell it."""

import collections
import dataclasses
import itertools
import os
import pathlib
import re
import subprocess

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


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
        """`folder` has both programs: cuobjdump finds nvdisasm by PATH."""
        self.program = folder / "cuobjdump"
        self.env = {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}

    def _run(self, option: str, file: pathlib.Path) -> str:
        command = [self.program, option, file]
        result = subprocess.run(command, capture_output=True, env=self.env, text=True)
        if result.returncode and "No " not in result.stderr:
            raise RuntimeError(f"cuobjdump {option} {file}: {result.stderr}")
        return result.stdout

    def architectures(self, file: pathlib.Path) -> set[str]:
        """Of the machine code in `file`, as sm_90a; PTX counts as compute_..."""
        elf = re.findall(r"\.(sm_\w+)\.cubin", self._run("--list-elf", file))
        ptx = re.findall(r"\.(?:sm|compute)_(\w+)\.ptx", self._run("--list-ptx", file))
        return set(elf) | {"compute_" + arch for arch in ptx}

    def kernels(self, file: pathlib.Path) -> list[CompiledKernel]:
        usage = {}
        lines = self._run("--dump-resource-usage", file).splitlines()
        for line, following in itertools.pairwise(lines):
            if match := re.match(r"\s*Function (\S+):", line):
                usage[match[1]] = [int(value) for value in USAGE.search(following).groups()]
        opcodes = collections.defaultdict(collections.Counter)
        function = ""
        for line in self._run("--dump-sass", file).splitlines():
            if match := re.match(r"\s+Function : (\S+)", line):
                function = match[1]
            elif match := OPCODE.search(line):
                opcodes[function][match[1]] += 1
        names = demangle(list(usage))
        return [
            CompiledKernel(names[symbol], *values, opcodes[symbol])
            for symbol, values in usage.items()
        ]


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
    return re.sub(r"\(.*\)$", "", name.replace("tiercel::", ""))
