# SPDX-License-Identifier: Apache-2.0
"""Copies an extension module and makes its references to Python's symbols weak.

A C++ program without Python can load the module then: the addresses of Python's functions and
objects are null there, and the functions for torch's dispatcher use none of them. (The linker has
no option for this.)

usage: weak_python.py MODULE.so OUT.so
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_DYNSYM = 11  # sh_type
_UNDEFINED = 0  # st_shndx
_GLOBAL, _WEAK = 1, 2  # the upper half of st_info
_SECTION = "<IIQQQQIIQQ"  # Elf64_Shdr
_SYMBOL = "<IBBHQQ"  # Elf64_Sym


def sections(image: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(sh_type, sh_offset, sh_size, sh_link) of each section."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("a 64-bit little-endian ELF file is expected")
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    for i in range(count):
        header = struct.unpack_from(_SECTION, image, table + i * size)
        yield header[1], header[4], header[5], header[6]


def weaken(image: bytes) -> tuple[bytes, int]:
    """The image with weak references to Python's symbols, and their number."""
    changed, count = bytearray(image), 0
    found = list(sections(image))
    for kind, offset, size, names in found:
        if kind != _DYNSYM:
            continue
        for place in range(offset, offset + size, struct.calcsize(_SYMBOL)):
            name, info, _, section, _, _ = struct.unpack_from(_SYMBOL, image, place)
            start = found[names][1] + name
            text = image[start : image.index(b"\0", start)]
            if section == _UNDEFINED and info >> 4 == _GLOBAL and text.startswith((b"Py", b"_Py")):
                changed[place + 4] = _WEAK << 4 | info & 15
                count += 1
    return bytes(changed), count


def main(module: str, out: str) -> int:
    image, count = weaken(Path(module).read_bytes())
    if count == 0:
        print(f"{module}: it refers to none of Python's symbols", file=sys.stderr)
        return 1
    Path(out).write_bytes(image)
    Path(out).chmod(0o755)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
