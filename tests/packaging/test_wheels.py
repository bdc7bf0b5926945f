# SPDX-License-Identifier: Apache-2.0
"""The four wheels as files: names, metadata, size, and what the module asks of a machine."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path("tests/packaging").absolute()))

from wheel_file import Wheel

VERSION = os.environ["VERSION"]
PYTHONS = os.environ["SUPPORTED_PYTHONS"].split()
WHEELS = [Wheel(pathlib.Path(path)) for path in sorted(os.environ["WHEELS"].split())]
GRAPH = json.loads(pathlib.Path(os.environ["GRAPH"]).read_text())
CUOBJDUMP = pathlib.Path(os.environ["BINUTILS"].split()[0])
PLATFORM = "manylinux_2_34_x86_64"
# The newest symbol versions that an older machine has, by family.
NEWEST = {"GLIBC": (2, 34), "GCC": (4, 3)}

# glibc's own, and the unwinder, of which a process must have one (gcc 12's static one asks for
# GLIBC_2.35). Everything else is inside, or opened when it is first needed.
ALLOWED_LIBRARIES = {
    *("ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6"),
    *("libpthread.so.0", "librt.so.1"),
}
# Paths of a build machine, which would also make the bytes depend on the folder.
PATHS_OF_A_BUILD = re.compile(
    rb"[\x21-\x7e]*(?:/home/|/root/|/Users/|/tmp/|/usr/local/cuda|execroot|bazel-out|_bazel_|"
    rb"linux-sandbox)[\x21-\x7e]*"
)


@pytest.fixture(params=WHEELS, ids=lambda wheel: wheel.tags["python"])
def wheel(request: pytest.FixtureRequest) -> Wheel:
    return request.param


def test_there_is_one_wheel_a_python() -> None:
    tags = ["cp" + python.replace(".", "") for python in PYTHONS]
    expected = [f"tiercel-{VERSION}-{tag}-{tag}-{PLATFORM}.whl" for tag in tags]
    assert sorted(wheel.path.name for wheel in WHEELS) == sorted(expected)


def test_wheel_says_what_its_name_says(wheel: Wheel) -> None:
    tag = "{python}-{abi}-{platform}".format(**wheel.tags)
    assert wheel.wheel.get_all("Tag") == [tag]
    assert wheel.wheel["Root-Is-Purelib"] == "false"
    assert wheel.wheel["Wheel-Version"] == "1.0"
    number = wheel.tags["python"].removeprefix("cp")
    assert wheel.module == f"tiercel/_C.cpython-{number}-x86_64-linux-gnu.so"


def test_metadata_is_complete(wheel: Wheel) -> None:
    metadata = wheel.metadata
    assert (metadata["Name"], metadata["Version"]) == ("tiercel", VERSION)
    assert metadata["License"] == "Apache-2.0"
    assert metadata["Requires-Python"] == f">={PYTHONS[0]}"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().lstrip().startswith("# Tiercel")
    for field in ("Author", "Summary"):
        assert metadata[field], field
    classifiers = set(metadata.get_all("Classifier"))
    expected = {f"Programming Language :: Python :: {python}" for python in PYTHONS}
    expected |= {"Operating System :: POSIX :: Linux", "Typing :: Typed"}
    assert expected <= classifiers


def test_torch_is_an_extra_and_nothing_is_required(wheel: Wheel) -> None:
    assert "torch" in wheel.metadata.get_all("Provides-Extra")
    required = wheel.metadata.get_all("Requires-Dist")
    assert [r for r in required if re.fullmatch(r"torch>=2\.9; extra == 'torch'", r)]
    assert [r for r in required if "extra ==" not in r] == []


def test_licences_and_types_ship(wheel: Wheel) -> None:
    licenses = f"{wheel.info}/licenses/"
    assert b"Apache License" in wheel.members[licenses + "LICENSE"]
    notices = wheel.members[licenses + "THIRD_PARTY_NOTICES.txt"].decode()
    for name in ("pybind11", "NVIDIA CUDA runtime"):
        _, _, text = notices.partition(f"==== {name} ====")
        assert len(text.split("====")[0]) > 1000, f"the notices lack the licence of {name}"
    assert wheel.members["tiercel/py.typed"] == b""
    assert "tiercel/_C.pyi" in wheel.members


def test_record_is_right(wheel: Wheel) -> None:
    assert wheel.record() == wheel.actual_record()


def test_archive_tells_no_time(wheel: Wheel) -> None:
    assert {entry.date_time for entry in wheel.entries} == {(1980, 1, 1, 0, 0, 0)}


def test_size_is_within_budget(wheel: Wheel) -> None:
    budget = json.loads(pathlib.Path(os.environ["BUDGET"]).read_text())
    size = wheel.path.stat().st_size
    assert budget["wheel_bytes"] <= budget["limit_bytes"] == 25_000_000
    assert size <= budget["wheel_bytes"], (
        f"{size:,} bytes, budget.json allows {budget['wheel_bytes']:,}; biggest: {wheel.biggest()}"
    )


def test_python_files_are_the_same_in_all_wheels() -> None:
    def contents(wheel: Wheel) -> dict[str, bytes]:
        members = wheel.members.items()
        return {k: v for k, v in members if not k.endswith(".so") and not k.startswith(wheel.info)}

    first = contents(WHEELS[0])
    assert "tiercel/__init__.py" in first
    for other in WHEELS[1:]:
        assert contents(other) == first, f"{other.path.name} differs from {WHEELS[0].path.name}"


def test_only_source_files_and_one_module_ship(wheel: Wheel) -> None:
    endings = (".py", ".pyi", ".json", ".yaml", "/py.typed", wheel.module)
    members = [path for path in wheel.members if not path.startswith(wheel.info)]
    strange = [p for p in members if not p.startswith("tiercel/") or not p.endswith(endings)]
    assert not strange


def test_module_needs_only_what_every_linux_has(wheel: Wheel) -> None:
    assert set(wheel.dynamic("DT_NEEDED")) <= ALLOWED_LIBRARIES


def test_module_has_no_search_path(wheel: Wheel) -> None:
    assert wheel.dynamic("DT_RPATH") + wheel.dynamic("DT_RUNPATH") == []


def test_module_exports_its_entry_only(wheel: Wheel) -> None:
    assert wheel.exported() == {"PyInit__C"}


def test_module_asks_for_no_newer_symbols(wheel: Wheel) -> None:
    versions = wheel.needed_versions()
    assert "libc.so.6" in dict(versions)
    for library, version in versions:
        family, _, number = version.partition("_")
        parts = tuple(int(part) for part in number.split("."))[:2]
        assert parts <= NEWEST.get(family, ()), f"{library}: {version}"


def test_module_holds_every_kernel_for_hopper_only(wheel: Wheel, tmp_path: pathlib.Path) -> None:
    kernels = {o for a in GRAPH if a["mnemonic"] == "CudaCompile" for o in a["outputs"]}
    kernels = {pathlib.Path(o).name.partition(".")[0] for o in kernels}
    module = tmp_path / "module.so"
    module.write_bytes(wheel.members[wheel.module])
    command = [CUOBJDUMP, "--list-elf", module]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    architectures = re.findall(r"\.(sm_\w+)\.cubin", listed)
    assert set(architectures) == {"sm_90a"}, listed
    assert len(architectures) == len(kernels), f"{listed}\nexpected {sorted(kernels)}"


def test_nothing_tells_of_the_build_machine(wheel: Wheel) -> None:
    told = {path: PATHS_OF_A_BUILD.findall(data) for path, data in wheel.members.items()}
    binaries = {path: found for path, found in told.items() if found and path == wheel.module}
    assert not binaries
    # Source text may speak of /tmp/; of a person's folder or a build's it may not.
    private = re.compile(rb"/home/\w|/root/|/Users/\w|execroot|_bazel_")
    assert not {p: f for p, f in told.items() if [x for x in f if private.search(x)]}


def tool(*arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, env=env, text=True)


def test_twine_accepts_them() -> None:
    result = tool("twine", "check", "--strict", *(str(wheel.path) for wheel in WHEELS))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("PASSED") == len(WHEELS), result.stdout


def test_auditwheel_finds_the_platform(wheel: Wheel) -> None:
    result = tool("auditwheel", "show", str(wheel.path))
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    found = re.findall(r'the following platform tag: "(\w+)"', text)
    assert found == [PLATFORM], text
