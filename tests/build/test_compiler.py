# SPDX-License-Identifier: Apache-2.0
"""The pinned C++ compiler's packages: fetched, checked, kept and unpacked."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent))
import fakes
from fakes import exported, forget

sys.path.insert(0, str(fakes.SOURCE / "tools" / "airgap"))
import compiler


def compiler_script(machine, root: Path, **environment) -> subprocess.CompletedProcess:
    """Runs the script of the repository rule."""
    command = [fakes.PYTHON, "-B", machine.workspace / "tools" / "airgap" / "compiler.py", root]
    environment = {**machine.environment, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_an_imported_compiler_needs_no_mirror(machine):
    source = exported(machine)
    forget(machine)
    machine.run("--import-toolchain", str(source))
    result = compiler_script(machine, machine.folder / "root", FAKE_APT="offline")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_compiler_that_cannot_be_had(machine):
    result = compiler_script(machine, machine.folder / "root", FAKE_APT="offline")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()[1:]
    assert line.startswith("bazelw: error: pool/")
    assert all(word in line for word in ("mirror.invalid", "resolving"))
    assert not list((machine.store / "fetched" / "compiler").iterdir())


def test_a_mirror_can_be_named(machine):
    result = compiler_script(
        machine, machine.folder / "root", FAKE_APT="offline", DEBIAN_MIRROR="https://named.invalid/"
    )
    assert result.returncode == 1 and "from https://named.invalid (" in result.stderr


def test_a_compiler_package_is_held_to_the_pinned_hash(machine):
    assert compiler_script(machine, machine.folder / "root").returncode == 0
    (package,) = (machine.store / "fetched" / "compiler").iterdir()
    whole = package.read_bytes()
    package.write_bytes(whole[:-1])
    assert compiler_script(machine, machine.folder / "again").returncode == 0
    assert package.read_bytes() == whole  # fetched again
    for deb in Path(machine.environment["FAKE_DEBS"]).iterdir():
        deb.write_bytes(whole[:-1])
    package.unlink()
    result = compiler_script(machine, machine.folder / "third")
    assert result.returncode == 1 and "another hash than the pinned one" in result.stderr


def test_linker_scripts_name_no_folder_of_the_machine():
    script = (
        b"/* GNU ld script\n   Use it. */\nOUTPUT_FORMAT(elf64-x86-64)\n"
        b"GROUP ( /lib/x86_64-linux-gnu/libc.so.6 /usr/lib/x86_64-linux-gnu/libc_nonshared.a "
        b" AS_NEEDED ( /lib64/ld-linux-x86-64.so.2 ) )\n"
    )
    line = compiler._searched_for(script).splitlines()[-1]
    assert line == b"GROUP ( libc.so.6 libc_nonshared.a  AS_NEEDED ( ld-linux-x86-64.so.2 ) )"
    assert compiler._searched_for(b"\x7fELF /lib/x") == b"\x7fELF /lib/x"


def test_a_compiler_package_is_unpacked_inside_of_its_root(tmp_path):
    gcc = "usr/lib/gcc/x86_64-linux-gnu/12"
    contents = io.BytesIO()
    with tarfile.open(fileobj=contents, mode="w:xz") as tar:
        for name, mode in {
            f"{gcc}/cc1plus": 0o755,
            "usr/share/doc/x": 0o644,
            "etc/x": 0o644,
        }.items():
            member = tarfile.TarInfo(f"./{name}")
            member.mode, member.size = mode, 2
            tar.addfile(member, io.BytesIO(b"hi"))
        for name, target in {
            "usr/lib/x86_64-linux-gnu/libm.so": "/lib/x86_64-linux-gnu/libm.so.6",
            f"{gcc}/libstdc++.so": "../../../x86_64-linux-gnu/libstdc++.so.6",
        }.items():
            member = tarfile.TarInfo(f"./{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    parts = {"debian-binary": b"2.0", "control.tar.xz": b"", "data.tar.xz": contents.getvalue()}
    package = tmp_path / "x.deb"
    package.write_bytes(
        b"!<arch>\n"
        + b"".join(
            f"{name:16}{0:<12}{0:<6}{0:<6}{0:<8}{len(part):<10}`\n".encode()
            + part
            + b"\n" * (len(part) % 2)
            for name, part in parts.items()
        )
    )
    root = tmp_path / "root"
    compiler.unpack(package, root)
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if not p.is_dir()}
    assert sorted(files) == sorted(
        [f"{gcc}/cc1plus", f"{gcc}/libstdc++.so", "usr/lib/x86_64-linux-gnu/libm.so"]
    )
    assert os.access(files[f"{gcc}/cc1plus"], os.X_OK)
    assert os.path.normpath(
        root / "usr/lib/x86_64-linux-gnu" / files["usr/lib/x86_64-linux-gnu/libm.so"].readlink()
    ) == str(root / "lib/x86_64-linux-gnu/libm.so.6")
