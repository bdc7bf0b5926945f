# SPDX-License-Identifier: Apache-2.0
"""What a cubin says of its kernels: names, parameter layout, threads a block, target."""

import dataclasses
import struct

_SECTION = struct.Struct("<IIQQQQIIQQ")
_VALUE_IN_LINE, _VALUE_SIZED = (0x01, 0x02, 0x03), 0x04
_ATTRIBUTE_THREADS, _ATTRIBUTE_PARAMETER = 0x10, 0x17


@dataclasses.dataclass
class CompiledKernel:
    symbol: str
    parameters: list[tuple[int, int]]  # (offset, size) by ordinal
    threads: tuple[int, int, int] | None


def _sections(image: bytes) -> dict[str, tuple[int, int]]:
    table = struct.unpack_from("<Q", image, 0x28)[0]
    count, names_index = struct.unpack_from("<HH", image, 0x3C)
    headers = [_SECTION.unpack_from(image, table + 64 * i) for i in range(count)]
    names = headers[names_index][4]

    def name(header):
        start = names + header[0]
        return image[start : image.index(b"\0", start)].decode()

    return {name(header): (header[4], header[5]) for header in headers}


def _attributes(image: bytes, start: int, size: int):
    """The (attribute, value bytes) pairs of an .nv.info section."""
    at = start
    while at < start + size:
        form, attribute = image[at], image[at + 1]
        if form == _VALUE_SIZED:
            length = struct.unpack_from("<H", image, at + 2)[0]
            yield attribute, image[at + 4 : at + 4 + length]
            at += 4 + length
        elif form in _VALUE_IN_LINE:
            yield attribute, image[at + 2 : at + 4]
            at += 4
        else:
            raise ValueError(f"unknown form {form:#x} in .nv.info")


def kernels(image: bytes) -> list[CompiledKernel]:
    """The kernels of a cubin, by name."""
    found = []
    for section, (start, size) in _sections(image).items():
        if not section.startswith(".nv.info."):
            continue
        parameters, threads = {}, None
        for attribute, value in _attributes(image, start, size):
            if attribute == _ATTRIBUTE_PARAMETER:
                _, ordinal, offset, flags = struct.unpack("<IHHI", value)
                parameters[ordinal] = (offset, flags >> 18)
            elif attribute == _ATTRIBUTE_THREADS:
                threads = struct.unpack("<3I", value)
        layout = [parameters[i] for i in range(len(parameters))]
        found.append(CompiledKernel(section.removeprefix(".nv.info."), layout, threads))
    return sorted(found, key=lambda kernel: kernel.symbol)
