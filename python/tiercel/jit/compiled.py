# SPDX-License-Identifier: Apache-2.0
"""A compiled file: machine code for one architecture and what the compiler said of it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

_MAGIC = b"tiercel-kernels 1\n"


@dataclass(frozen=True)
class KernelReport:
    """One kernel as compiled.

    Args:
        symbol: Its name in the machine code.
        registers: For each thread.
        spilled: Bytes of registers that went to memory, stores and loads; 0 is what you want.
        stack: Bytes of local memory for each thread.
        shared: Bytes of static shared memory.
    """

    symbol: str
    registers: int
    spilled: int
    stack: int
    shared: int

    def __str__(self) -> str:
        spilled = f"{self.spilled} bytes spilled" if self.spilled else "no spills"
        stack = f", {self.stack} bytes of stack" if self.stack else ""
        shared = f", {self.shared} bytes of shared memory" if self.shared else ""
        return f"{self.symbol}: {self.registers} registers, {spilled}{stack}{shared}"


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of one file, for one architecture."""

    image: bytes = field(repr=False)
    arch: str
    command: str
    reports: tuple[KernelReport, ...]

    def pack(self) -> bytes:
        about: dict[str, Any] = {"arch": self.arch, "command": self.command}
        about["reports"] = [asdict(report) for report in self.reports]
        return _MAGIC + json.dumps(about).encode() + b"\n" + self.image

    @staticmethod
    def unpack(data: bytes, where: str) -> Compiled:
        if not data.startswith(_MAGIC):
            raise ValueError(f"{where} was not written by tiercel.jit")
        about, _, image = data[len(_MAGIC) :].partition(b"\n")
        fields = json.loads(about)
        reports = tuple(KernelReport(**report) for report in fields["reports"])
        return Compiled(image, fields["arch"], fields["command"], reports)


_PROPERTIES = re.compile(
    r"Function properties for (\S+)\s*"
    r"(?:ptxas[^\n]*)?\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_ENTRY = re.compile(r"Compiling entry function '([^']+)'(.*?)(?=Compiling entry function|\Z)", re.S)


def reports_of(said: str) -> tuple[KernelReport, ...]:
    """The kernels in what ptxas prints with -v."""
    reports = []
    for symbol, text in _ENTRY.findall(said):
        stack = stores = loads = 0
        for name, *numbers in _PROPERTIES.findall(text):
            if name == symbol:
                stack, stores, loads = map(int, numbers)
        used = re.search(r"Used (\d+) registers", text)
        shared = re.search(r"(\d+) bytes smem", text)
        reports.append(
            KernelReport(
                symbol,
                int(used[1]) if used else 0,
                stores + loads,
                stack,
                int(shared[1]) if shared else 0,
            )
        )
    return tuple(reports)
