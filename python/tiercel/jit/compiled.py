# SPDX-License-Identifier: Apache-2.0
"""A compiled file: machine code for one architecture and what the compiler said of it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 2  # a line with this, one with length and SHA-256 of all the rest, one of JSON, the image
_NAME = b"tiercel-kernels "
_MAGIC = _NAME + str(FORMAT).encode() + b"\n"


@dataclass(frozen=True)
class KernelReport:
    """One kernel as compiled.

    Args:
        symbol: Its name in the machine code.
        registers: For each thread.
        spilled: Bytes of spilled registers, stores and loads; should be 0.
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
    """The result of compiling one file for one architecture."""

    image: bytes = field(repr=False)
    arch: str
    command: str
    reports: tuple[KernelReport, ...]

    def pack(self) -> bytes:
        about: dict[str, Any] = {"arch": self.arch, "command": self.command}
        about["reports"] = [asdict(report) for report in self.reports]
        rest = json.dumps(about).encode() + b"\n" + self.image
        return _MAGIC + f"{len(rest)} {hashlib.sha256(rest).hexdigest()}\n".encode() + rest

    @staticmethod
    def unpack(data: bytes, where: str) -> Compiled:
        """Reads what `pack` made.

        Raises:
            ValueError: It is not such a file, of another version, or incomplete: the driver takes
                an image without its length, so an incomplete one must not reach it.
        """
        if not data.startswith(_MAGIC):
            if data.startswith(_NAME):
                raise ValueError(f"{where} is of another version of tiercel.jit: save it again")
            raise ValueError(f"{where} was not written by tiercel.jit")
        length_and_hash, _, rest = data[len(_MAGIC) :].partition(b"\n")
        if length_and_hash != f"{len(rest)} {hashlib.sha256(rest).hexdigest()}".encode():
            raise ValueError(f"{where} is cut short or damaged: save it again")
        about, _, image = rest.partition(b"\n")
        try:
            fields = json.loads(about)
            reports = tuple(KernelReport(**report) for report in fields["reports"])
            return Compiled(image, fields["arch"], fields["command"], reports)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{where} was not written by tiercel.jit") from None


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
