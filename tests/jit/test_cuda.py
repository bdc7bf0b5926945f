# SPDX-License-Identifier: Apache-2.0
"""tiercel.jit.cuda without a GPU: what is compiled when, what arguments become, what errors say."""

import ctypes
import pathlib
import subprocess

import pytest

from tiercel import jit
from tiercel.jit import arguments, compiled, kernel, nvcc, sources, toolchain

GOOD = "__global__ void twice(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }"
# Says on the first line of `log` what it is called with; writes "cubin".
NVCC = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
if grep -q BAD "$3"; then echo "$3(1): error: BAD"; exit 1; fi
printf cubin > "$2"
cat <<END
ptxas info    : Compiling entry function '_Z5twicePfi' for 'sm_90a'
ptxas info    : Function properties for _Z5twicePfi
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
END
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The calls of a stand-in for the compiler."""
    log, path = tmp_path / "calls", tmp_path / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(NVCC.format(log=log))
    path.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(path))
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "cache"))
    return lambda: log.read_text().splitlines() if log.exists() else []


def test_compiles_once(fake):
    for _ in range(2):
        report = jit.cuda(GOOD, "twice", defines={"X": 1, "Y": None}).compile("sm_90a")
    assert report == compiled.KernelReport("_Z5twicePfi", 40, 12, 16, 1024)
    assert str(report) == (
        "_Z5twicePfi: 40 registers, 12 bytes spilled, 16 bytes of stack, "
        "1024 bytes of shared memory"
    )
    (call,) = fake()
    assert call.startswith("-cubin -arch=sm_90a -Xptxas=-v -std=c++17 -O3 -lineinfo -DX=1 -DY -o ")
    jit.cuda(GOOD, "twice").compile("sm_90a")
    jit.cuda(GOOD, "twice").compile("sm_100a")
    jit.cuda(GOOD, "twice", debug=True).compile("sm_100a")
    jit.cuda(GOOD, "plain", options=["-std=c++20"]).compile("sm_100a")
    assert [" -G " in call for call in fake()] == [False, False, False, True, False]
    assert "-std=c++17" not in fake()[-1]


def test_edits_are_seen(fake, tmp_path):
    main, beside, folder = tmp_path / "k.cu", tmp_path / "beside.cuh", tmp_path / "include"
    folder.mkdir()
    main.write_text('#include "beside.cuh"\n#include <far.cuh>\n' + GOOD)
    beside.write_text('  # include "../include/deep.cuh"')
    (folder / "far.cuh").write_text("")
    (folder / "deep.cuh").write_text("")

    def compiles():
        before = len(fake())
        jit.cuda(main, "twice", include=[folder]).compile("sm_90a")
        return len(fake()) - before

    assert (compiles(), compiles()) == (1, 0)
    for file in (main, beside, folder / "far.cuh", folder / "deep.cuh"):
        file.write_text(file.read_text() + "\n// edited")
        assert (compiles(), compiles()) == (1, 0), file
    assert fake()[-1].endswith(f" {main}")


def test_verbose_and_save(fake, tmp_path, capsys):
    path = tmp_path / "saved"
    jit.cuda(GOOD, "twice", verbose=True, save=path)
    jit.cuda(GOOD, "plain", verbose=True).compile("sm_90a")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("tiercel.jit: ") and lines[0].endswith("-o kernels.cubin source.cu")
    assert lines[1] == (
        "  _Z5twicePfi: 40 registers, 12 bytes spilled, 16 bytes of stack, "
        "1024 bytes of shared memory"
    )
    assert lines[3].endswith("# from the cache")
    assert jit.load(path, "twice").compile("sm_90a").registers == 40
    with pytest.raises(RuntimeError, match="saved is for sm_90a, this GPU is sm_100a"):
        jit.load(path, "twice").compile("sm_100a")
    with pytest.raises(ValueError, match="the source has no kernel other; its kernels: twice, pla"):
        jit.load(path, "other")
    path.write_bytes(b"something")
    with pytest.raises(ValueError, match="saved was not written by tiercel.jit"):
        jit.load(path, "twice")


def test_only_a_whole_file_is_loaded(fake, tmp_path):
    """The driver takes an image without its length."""
    path = tmp_path / "saved"
    jit.cuda(GOOD, "twice", save=path)
    assert [p.name for p in tmp_path.glob("saved*")] == ["saved"]
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="was not written by|cut short or damaged|of another"):
            jit.load(path, "twice")
    for at in range(0, len(whole), 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="was not written by|cut short or damaged|of another"):
            jit.load(path, "twice")
    path.write_bytes(whole + b"more")
    with pytest.raises(ValueError, match="saved is cut short or damaged"):
        jit.load(path, "twice")
    path.write_bytes(whole.replace(b"tiercel-kernels 2", b"tiercel-kernels 1", 1))
    with pytest.raises(ValueError, match="of another version of tiercel.jit: save it again"):
        jit.load(path, "twice")
    path.write_bytes(whole)
    assert jit.load(path, "twice").compile("sm_90a").registers == 40


def test_it_compiles_without_a_cache(fake, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "file" / "c"))
    with pytest.warns(RuntimeWarning, match="kept for this process alone"):
        assert jit.cuda(GOOD, "twice").compile("sm_90a").registers == 40


def test_errors_of_the_compiler(fake, tmp_path):
    with pytest.raises(jit.CompileError) as info:
        jit.cuda("BAD", "twice").compile("sm_90a")
    assert str(info.value) == "nvcc failed: source.cu(1): error: BAD"
    with pytest.raises(TypeError, match="`source` must be CUDA C.. text or a path, got int"):
        jit.cuda(123, "twice")
    with pytest.raises(FileNotFoundError, match="there is no source file .*/missing.cu"):
        jit.cuda("missing.cu", "twice")
    with pytest.raises(ValueError, match="no kernel twice_; its kernels: twice, plain"):
        jit.cuda(GOOD, "twice_").compile("sm_90a")


def test_finding_the_compiler(monkeypatch, tmp_path):
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no CUDA compiler: pip install 'tiercel\[jit\]', or"):
        toolchain.find_nvcc()
    (tmp_path / "nvcc").write_text("")
    (tmp_path / "nvcc").chmod(0o755)
    assert toolchain.find_nvcc() == str(tmp_path / "nvcc")
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    assert toolchain.find_nvcc() == "/cuda/bin/nvcc"
    with pytest.raises(RuntimeError, match="the CUDA compiler /cuda/bin/nvcc is not there"):
        jit.cuda(GOOD, "twice").compile("sm_90a")
    monkeypatch.setenv("CUDACXX", "/other/nvcc")
    assert toolchain.find_nvcc() == "/other/nvcc"


def test_the_packages_of_tiercel_jit(monkeypatch, tmp_path):
    """Some of NVIDIA's packages come without the bit that makes a program one."""
    programs = [tmp_path / "cu13" / p for p in ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc")]
    for program in programs:
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("")
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: spec)
    assert toolchain.find_nvcc() == str(programs[0])
    assert all(program.stat().st_mode & 0o100 for program in programs)
    assert len(toolchain.identity(str(programs[0]))) == 3


def test_architectures(monkeypatch):
    kernel._arch_of_device.cache_clear()
    found = iter([(8, 0), (9, 0), (10, 0)])
    monkeypatch.setattr(kernel._C, "device_capability", lambda index: next(found))
    assert [kernel._arch_of_device(i) for i in range(3)] == ["sm_80", "sm_90a", "sm_100a"]
    kernel._arch_of_device.cache_clear()


@pytest.mark.parametrize(
    ("symbol", "name", "types"),
    [
        ("_Z5twicePfi", "twice", ("float*", "int")),
        ("_Z4nonev", "none", ()),
        ("plain", "plain", None),
        ("f", "f", None),  # also the mangled name of float
        (
            "_Z5scaleI13__nv_bfloat16Li4EEvPT_PKS1_fl",
            "scale<__nv_bfloat16, 4>",
            ("__nv_bfloat16*", "__nv_bfloat16 const*", "float", "long"),
        ),
        ("_ZN2ns1kIXadL_ZNS_1fEiEEEEvPKvb", "ns::k<&ns::f>", ("void const*", "bool")),
    ],
)
def test_signatures(symbol, name, types):
    assert arguments.signature_of(symbol) == arguments.Signature(name, types)


class Tensor:
    def __init__(self, dtype):
        self.dtype = f"torch.{dtype}"
        self.data_ptr = None


def convert(types, *values):
    signature = arguments.Signature("k", types)
    sizes = [8 if "*" in text else 4 for text in types]
    one = arguments.converters("k", signature, sizes)
    return [f(value) for f, value in zip(one, values, strict=True)]


def test_values():
    x = Tensor("float32")
    assert convert(("float const*", "void*", "float*"), x, x, None) == [x, x, bytes(8)]
    assert convert(("int", "bool", "float"), -2, True, 1.0) == [
        b"\xfe\xff\xff\xff",
        b"\1",
        b"\0\0\x80?",
    ]
    assert convert(("float", "unsigned long", "char"), 1, 2**64 - 1, -1) == [
        b"\0\0\x80?",
        b"\xff" * 8,
        b"\xff",
    ]
    assert convert(("", "dim3"), ctypes.c_int(1), ctypes.c_int(2)) == [b"\1\0\0\0", b"\2\0\0\0"]


@pytest.mark.parametrize(
    ("error", "text", "type_", "value"),
    [
        (TypeError, "must be a float32 tensor for float const*, got bfloat16", "float const*", "b"),
        (TypeError, "must be a tensor for float*, got int", "float*", 3),
        (TypeError, "must be an int for int, got float", "int", 1.5),
        (TypeError, "must be a bool for bool, got int", "bool", 1),
        (TypeError, "must be a number for float, got str", "float", "1"),
        (ValueError, "does not fit int: 2147483648", "int", 2**31),
        (ValueError, "does not fit unsigned int: -1", "unsigned int", -1),
        (ValueError, "must have 4 bytes, got 8", "", ctypes.c_int64(1)),
        (TypeError, "must be a tensor or 4 bytes as a ctypes value, got int", "", 1),
        (TypeError, "or 4 bytes as a ctypes value for Pair, got tuple", "Pair", (1, 2)),
    ],
)
def test_values_that_do_not_fit(error, text, type_, value):
    value = Tensor("bfloat16") if value == "b" else value
    with pytest.raises(error, match="^kernel k: argument 1 ") as info:
        convert((type_,), value)
    assert text in str(info.value)


def test_where_a_launch_goes():
    twice = jit.cuda(GOOD, "twice")
    with pytest.raises(ValueError, match="kernel twice: one argument must be a tensor"):
        twice(1, 1, 3)

    class OnCpu(Tensor):
        device = "cpu"

        def get_device(self):
            return -1

    with pytest.raises(ValueError, match="tensors must be on a CUDA device, got cpu"):
        twice(1, 1, OnCpu("float32"), 3)


def test_instances_are_asked_for(tmp_path):
    text = nvcc._written(sources.read("CODE\n"), ["scale<float, 4>"], tmp_path).read_text()
    assert text.splitlines()[-1] == (
        "[[maybe_unused]] static auto* const tiercel_instance_0 = &scale<float, 4>;"
    )
    path = pathlib.Path(tmp_path, "k.cu")
    path.write_text("CODE")
    assert nvcc._written(sources.read(path), [], tmp_path) == path
    wrapped = nvcc._written(sources.read(path), ["a<1>"], tmp_path).read_text()
    assert wrapped.startswith(f'#include "{path}"\n')


@pytest.fixture
def real(monkeypatch, tmp_path):
    try:
        nvcc_ = toolchain.find_nvcc()
        toolchain.identity(nvcc_)
    except RuntimeError as error:
        pytest.skip(str(error))
    if subprocess.run([str(nvcc_), "--version"], capture_output=True).returncode != 0:
        pytest.skip(f"{nvcc_} does not run here")  # the sandbox hides the machine's CUDA
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "cache"))


def test_with_the_real_compiler(real, tmp_path):
    code = "template <int N> __global__ void add(float* x) { x[threadIdx.x] += N; }\n"
    first, second = jit.cuda(code, ["add<1>", "add<2>"], save=tmp_path / "saved", arch="sm_90a")
    assert first.compile().symbol != second.compile().symbol
    report = first.compile()
    assert report.registers > 0 and report.spilled == report.stack == report.shared == 0
    _, convert_, labels = second._prepare("sm_90a")
    assert len(convert_) == 1 and labels == ("argument 1",)
    assert jit.load(tmp_path / "saved", "add<2>").compile("sm_90a") == second.compile()
    with pytest.raises(jit.CompileError, match=r'source.cu\(1\): error: identifier "y" is undefin'):
        jit.cuda("__global__ void a() { y; }", "a").compile()
