# SPDX-License-Identifier: Apache-2.0
"""Every import in the package finds its module and name, also one that only a GPU reaches."""

import ast
import importlib
from pathlib import Path

import pytest

import tiercel

pytestmark = pytest.mark.torch
ROOT = Path(tiercel.__file__).parent


def imports():
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tiercel"):
                for alias in node.names:
                    yield path.relative_to(ROOT), node.module, alias.name


def test_every_import_finds_its_module_and_name():
    missing = []
    for path, module, name in imports():
        try:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("tiercel"):  # otherwise an optional package
                missing.append(f"{path}: {module}.{name}")
    assert not missing
