# SPDX-License-Identifier: Apache-2.0
"""The C++ compiler: packages of one Debian release, by path and hash.

    compiler.py ROOT

unpacks them into ROOT, for the repository rule in tools/cxx. What was fetched is kept beside
Bazel's packages: all checkouts share it, and `--export-toolchain` takes it along. No Debian is
needed.
"""

import io
import os
import re
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path

import debs
import proc
import progress
import store as stores
from errors import SetupError, one_line

LOCK = Path(__file__).resolve().parent.parent / "cxx" / "packages.lock"

_GCC = r"usr/lib/gcc/x86_64-linux-gnu/12"
_KEPT = re.compile(
    r"lib(64)?/.*|usr/lib/x86_64-linux-gnu/[^/]+"
    r"|usr/bin/x86_64-linux-gnu-(ar|as|gcc-12|gcov-12|ld|ld.bfd|nm|objcopy|objdump|strip)"
    rf"|{_GCC}/(cc1|cc1plus|collect2|lto-wrapper|include/.*|[^/]+[.](o|so|a))"
    # C, C++ and the kernel's interfaces that glibc's headers include.
    r"|usr/include/((asm-generic|c[+][+]|x86_64-linux-gnu)/.*|([a-z]+/)?[^/]+[.]h)"
)


def packages() -> list:
    """[(path in a Debian archive, sha256)]"""
    lines = LOCK.read_text().splitlines()
    return [tuple(line.split()) for line in lines if not line.startswith("#")]


def fetch(folder: Path) -> list:
    """Leaves all packages in `folder`; returns their paths there."""
    folder.mkdir(parents=True, exist_ok=True)
    archives, files = None, []
    for path, digest in packages():
        target = folder / path.rpartition("/")[2]
        if not target.is_file() or debs.sha256(target) != digest:
            archives = archives or _archives()
            _fetch_one(archives, path, digest, target)
        files.append(target)
    return files


def _archives() -> list:
    """Addresses of archives of Debian: apt's on this machine, and the one that is named."""
    named = [address for address in [os.environ.get("DEBIAN_MIRROR", "").rstrip("/")] if address]
    try:
        return named + debs.mirrors()
    except SetupError as error:
        if named:
            return named
        raise SetupError(f"{error}; DEBIAN_MIRROR=ADDRESS names one, too") from None


def _fetch_one(archives: list, path: str, digest: str, target: Path) -> None:
    progress.say(f"fetching {target.name}")
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    errors = []
    for archive in archives:
        error = _download(f"{archive}/{path}", digest, temporary)
        if not error and debs.sha256(temporary) != digest:
            error = "another hash than the pinned one"
        if not error:
            temporary.replace(target)
            return
        errors.append(f"{archive} ({error})")
    raise SetupError(f"{path} could not be fetched from {', '.join(errors)}")


def _download(address: str, digest: str, target: Path) -> str:
    """Returns "" or what went wrong. apt knows the machine's proxies and passwords."""
    helper = shutil.which("apt-helper", path=f"{os.environ.get('PATH')}:/usr/lib/apt")
    if helper:
        command = [helper, "-oAcquire::Retries=1", "-oAcquire::http::Timeout=20"]
        command += ["download-file", address, str(target), f"SHA256:{digest}"]
        result = proc.run(command, slow=address)
        return one_line(result.stderr.partition("E: ")[2]) if result.returncode else ""
    try:
        with urllib.request.urlopen(address, timeout=60) as answer, open(target, "wb") as stream:
            shutil.copyfileobj(answer, stream, 1 << 20)
    except OSError as error:
        return one_line(str(error))
    return ""


def unpack(package: Path, root: Path) -> None:
    """Unpacks the files of a package that compiling needs. Links stay inside of `root`."""
    with tarfile.open(fileobj=io.BytesIO(_contents(package.read_bytes()))) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if member.isdir() or not _KEPT.fullmatch(name):
                continue
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                up = "../" * name.count("/") if member.linkname.startswith("/") else ""
                path.symlink_to(up + member.linkname.lstrip("/"))
            else:
                path.write_bytes(_searched_for(tar.extractfile(member).read()))
                path.chmod(member.mode)


def _searched_for(file: bytes) -> bytes:
    """A linker script names libraries by absolute path, which can be the machine's own."""
    is_script = file.startswith(b"/* GNU ld script")
    return re.sub(rb" /(?:usr/)?lib(?:64|/x86_64-linux-gnu)/", b" ", file) if is_script else file


def _contents(package: bytes) -> bytes:
    """The data.tar of a deb, which is an ar archive."""
    at = len("!<arch>\n")
    while at < len(package):
        name, size = package[at : at + 16], int(package[at + 48 : at + 58])
        if name.startswith(b"data.tar"):
            return package[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise SetupError("a package holds no files")


def main() -> int:
    root = Path(sys.argv[1])
    try:
        for package in fetch(stores.Store(stores.cache_root()).fetched / "compiler"):
            unpack(package, root)
        for path in root.rglob("*"):
            if not path.exists():
                path.unlink()  # a link into a package that is not here
    except SetupError as error:
        progress.say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
