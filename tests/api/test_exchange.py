# SPDX-License-Identifier: Apache-2.0
"""How tensors cross into tiercel._C, with producers of our own."""

import ctypes
import subprocess

import pytest
from support.dlpack_tensor import (
    ADDRESS,
    AttributeTensor,
    ExchangeTensor,
    asked_for_streams,
    make_api,
    make_capsule,
)

from tiercel import _C

_keep = []  # exchange tables must outlive the types that publish them


def plan(scores):
    rows = scores.sizes[0]
    weights, indices = ExchangeTensor(rows, 2), ExchangeTensor(rows, 2, dtype="int32")
    return _C.topk_softmax_plan(scores, weights, indices, True, False)


def tensor_type(**attributes):
    return type("Producer", (ExchangeTensor,), {"__dlpack_c_exchange_api__": None, **attributes})


NAMES = ["__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"]


@pytest.fixture(scope="module")
def static_api(tmp_path_factory):
    """A table in a library's own memory, as frameworks have it."""
    folder = tmp_path_factory.mktemp("table")
    size = ctypes.sizeof(make_api())
    (folder / "table.c").write_text(f"_Alignas(8) char table[{size}] = {{1}};\n")
    library = folder / "libtable.so"
    subprocess.run(["gcc", "-shared", folder / "table.c", "-o", library], check=True)
    table = type(make_api()).in_dll(ctypes.CDLL(library), "table")
    filled = make_api()
    ctypes.memmove(ctypes.addressof(table), ctypes.addressof(filled), size)
    _keep.extend([table, filled])
    return table


@pytest.mark.parametrize("attribute", NAMES)
@pytest.mark.parametrize("as_capsule", [True, False])
def test_both_names_and_both_forms(attribute, as_capsule, static_api):
    value = make_capsule(static_api) if as_capsule else ctypes.addressof(static_api)
    kind = tensor_type(**{attribute: value})
    assert plan(kind(4, 8))["vector_bytes"] == 16


@pytest.mark.parametrize("attribute", NAMES)
def test_an_int_that_is_no_table_is_not_followed(run_python, attribute):
    code = f"""
from tiercel import _C
for number in (0x41414141, 0, 7, -1, 1 << 80, id(_C), {ctypes.addressof(make_api())}):
    scores = type("Producer", (), {{"{attribute}": number}})()
    try:
        _C.topk_softmax_plan(scores, scores, scores, True, False)
    except TypeError as error:
        print(error)
"""
    lines = run_python(code).stdout.splitlines()
    assert lines == ["topk_softmax: `scores` must be a torch.Tensor, got Producer"] * 7


def test_an_older_table_behind_a_newer_one_is_found():
    old = make_api()
    new = make_api(major=2, older=ctypes.addressof(old))
    _keep.extend([old, new])
    assert (
        plan(tensor_type(__dlpack_c_exchange_api__=make_capsule(new))(4, 8))["vector_bytes"] == 16
    )


@pytest.mark.parametrize("reason", ["major", "capsule name", "no function"])
def test_a_table_that_does_not_fit_is_not_used(reason):
    api = make_api(major=2 if reason == "major" else 1)
    if reason == "no function":
        api.from_object = type(api.from_object)()
    _keep.append(api)
    name = b"other" if reason == "capsule name" else b"dlpack_exchange_api"
    _keep.append(name)
    kind = tensor_type(__dlpack_c_exchange_api__=make_capsule(api, name))
    with pytest.raises(TypeError, match="`scores` must be a torch.Tensor, got Producer"):
        plan(kind(4, 8))


def test_byte_offset_counts():
    scores = ExchangeTensor(4, 8, dtype="bfloat16", address=ADDRESS + 2)
    scores.byte_offset = 2
    assert plan(scores)["vector_bytes"] == 2


def test_missing_strides_mean_contiguous():
    scores = ExchangeTensor(4, 8)
    scores.omit_strides = True
    assert plan(scores)["vector_bytes"] == 16


def test_a_producers_exception_is_kept():
    class Broken(AttributeTensor):
        def data_ptr(self):
            raise RuntimeError("no storage here\nand a long trace")

    with pytest.raises(ValueError) as info:
        plan(Broken(4, 8))
    text = "topk_softmax: `scores` cannot be read as a tensor in memory: no storage here"
    assert str(info.value) == text


def test_many_types_do_not_overflow_the_cache():
    for _ in range(50):
        kind = tensor_type(__dlpack_c_exchange_api__=ExchangeTensor.__dlpack_c_exchange_api__)
        assert plan(kind(4, 8))["vector_bytes"] == 16


def test_the_stream_is_the_producers(run_python):
    asked_for_streams.clear()
    tensors = ExchangeTensor(0, 8), ExchangeTensor(0, 2), ExchangeTensor(0, 2, dtype="int32")
    assert _C.topk_softmax(*tensors, True, False) is None  # empty: no launch
    assert asked_for_streams == [(2, 0)]
