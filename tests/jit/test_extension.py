# SPDX-License-Identifier: Apache-2.0
"""tiercel.jit.extension: a pybind11 module from text and files, compiled once."""

import sys

import pytest

from tiercel import jit

PYBIND11 = """
#include <pybind11/pybind11.h>
#include "number.h"
PYBIND11_MODULE(mine, module) { module.def("number", [] { return kNumber; }); }
"""
# pybind11 takes seconds to compile: one module is enough.
PLAIN = """
#include <Python.h>
#include "number.h"
static int fill(PyObject* module) { return PyModule_AddIntConstant(module, "number", kNumber); }
static PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {0, nullptr}};
static PyModuleDef mine = {PyModuleDef_HEAD_INIT, "mine", nullptr, 0, nullptr, slots};
PyMODINIT_FUNC PyInit_mine() { return PyModuleDef_Init(&mine); }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "number.h").write_text("constexpr int kNumber = 41;")
    (tmp_path / "mine.cpp").write_text(PLAIN)


def test_from_a_file(tmp_path, capsys):
    module = jit.extension("mine", [tmp_path / "mine.cpp"], verbose=True)
    assert module.number == 41 and "mine" not in sys.modules
    assert capsys.readouterr().err.count("tiercel.jit: ") == 2
    jit.extension("mine", [tmp_path / "mine.cpp"], verbose=True)
    assert capsys.readouterr().err == ""
    (tmp_path / "number.h").write_text("constexpr int kNumber = 42;")
    module = jit.extension("mine", [tmp_path / "mine.cpp"], verbose=True)
    assert module.number == 42
    assert capsys.readouterr().err.count("tiercel.jit: ") == 2


def test_from_text(tmp_path):
    code = PYBIND11.replace("PYBIND11_MODULE(mine", "PYBIND11_MODULE(other")
    module = jit.extension("other", code, include=[tmp_path])
    assert module.number() == 41 and "other" not in sys.modules


def test_what_goes_wrong(tmp_path):
    with pytest.raises(jit.CompileError, match=r"source0.cpp:3:\d+: (fatal )?error: .*number.h"):
        jit.extension("other", PLAIN)
    with pytest.raises(ImportError, match="PyInit_another"):
        jit.extension("another", [tmp_path / "mine.cpp"])
    with pytest.raises(ValueError, match="there are no sources"):
        jit.extension("mine", [])
