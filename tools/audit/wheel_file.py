# SPDX-License-Identifier: Apache-2.0
"""A wheel as its audit looks at it: members, metadata, and the extension module's ELF tables."""

import base64
import csv
import email.message
import functools
import hashlib
import io
import pathlib
import re
import zipfile

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

NAME = re.compile(
    r"(?P<name>\w+)-(?P<version>[\w.]+)-(?P<python>cp\d+)-(?P<abi>cp\d+)-(?P<platform>\w+)\.whl"
)


class NotAWheel(ValueError):
    pass


class Wheel:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        match = NAME.fullmatch(path.name)
        if not match:
            raise NotAWheel(f"{path.name} is not the name of a wheel for one Python")
        if not zipfile.is_zipfile(path):
            raise NotAWheel(f"{path.name} is no zip archive")
        self.tags = match.groupdict()
        self.info = f"{self.tags['name']}-{self.tags['version']}.dist-info"

    @functools.cached_property
    def entries(self) -> list[zipfile.ZipInfo]:
        with zipfile.ZipFile(self.path) as archive:
            return archive.infolist()

    @functools.cached_property
    def members(self) -> dict[str, bytes]:
        with zipfile.ZipFile(self.path) as archive:
            return {e.filename: archive.read(e) for e in self.entries if not e.is_dir()}

    @functools.cached_property
    def metadata(self) -> email.message.Message:
        return email.message_from_bytes(self.members[f"{self.info}/METADATA"])

    @functools.cached_property
    def wheel(self) -> email.message.Message:
        return email.message_from_bytes(self.members[f"{self.info}/WHEEL"])

    def sizes(self) -> dict[str, int]:
        """Compressed bytes of each file, under names common to all Pythons and versions."""

        def name(path: str) -> str:
            path = re.sub(r"_C\.[^/]*\.so$", "_C.so", path)
            return path.replace(self.info, "tiercel.dist-info")

        return {name(e.filename): e.compress_size for e in self.entries if not e.is_dir()}

    def growth(self, before: dict[str, int], count: int = 5) -> list[str]:
        """The files that grew most since a table of sizes."""
        grown = {path: now - before.get(path, 0) for path, now in self.sizes().items()}
        grown = sorted((item for item in grown.items() if item[1] > 0), key=lambda item: -item[1])
        return [f"{path} +{more:,}" for path, more in grown[:count]]

    def record(self) -> dict[str, tuple[str, str]]:
        """What RECORD says of each path: hash and size."""
        text = self.members[f"{self.info}/RECORD"].decode()
        return {path: (digest, size) for path, digest, size in csv.reader(io.StringIO(text))}

    def actual_record(self) -> dict[str, tuple[str, str]]:
        found = {f"{self.info}/RECORD": ("", "")}
        for path, data in self.members.items():
            if path not in found:
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
                found[path] = ("sha256=" + digest.rstrip("="), str(len(data)))
        return found

    @property
    def modules(self) -> list[str]:
        return [path for path in self.members if path.endswith(".so")]

    @property
    def module(self) -> str:
        """The path of the one extension module."""
        if len(self.modules) != 1:
            raise NotAWheel(f"{self.path.name} has the modules {self.modules}, expected one")
        return self.modules[0]

    @functools.cached_property
    def elf(self) -> ELFFile:
        return ELFFile(io.BytesIO(self.members[self.module]))

    def dynamic(self, tag: str) -> list[str]:
        """The values of a tag (DT_NEEDED, say) of the dynamic section."""
        sections = [s for s in self.elf.iter_sections() if isinstance(s, DynamicSection)]
        field = tag.removeprefix("DT_").lower()
        return [getattr(t, field) for s in sections for t in s.iter_tags() if t.entry.d_tag == tag]

    def exported(self) -> set[str]:
        symbols = self.elf.get_section_by_name(".dynsym").iter_symbols()
        return {s.name for s in symbols if s.name and s["st_shndx"] != "SHN_UNDEF"}

    def needed_of_python(self) -> list[str]:
        """Python's symbols without which the module is not loaded."""
        symbols = self.elf.get_section_by_name(".dynsym").iter_symbols()
        return [
            s.name
            for s in symbols
            if s["st_shndx"] == "SHN_UNDEF"
            and s["st_info"]["bind"] == "STB_GLOBAL"
            and s.name.startswith(("Py", "_Py"))
        ]

    def needed_versions(self) -> list[tuple[str, str]]:
        """Library and symbol version, as ("libc.so.6", "GLIBC_2.34")."""
        return [
            (library.name, version.name)
            for section in self.elf.iter_sections()
            if isinstance(section, GNUVerNeedSection)
            for library, versions in section.iter_versions()
            for version in versions
        ]
