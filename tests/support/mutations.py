# SPDX-License-Identifier: Apache-2.0
"""Drops each check of the declarations in turn and shows that a test fails without it.

    python tests/support/mutations.py [--data] [--relations] [FAMILY ...]

--data drops what a declaration says of one argument and makes the bad calls of
test_bad_arguments.py. --relations drops each check inside the `check=` functions and runs the
family's tests. Needs tiercel and PyTorch, no GPU; all of it takes some minutes.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import gc
import importlib
import io
import sys
import types
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float4_e2m1fn_x2", "int64", "int32", "uint8", "bool"),
)


def _of_tensor(spec, tensor, with_results):
    """(what is dropped, the fields without it)"""
    words = tensor.dims.split()
    of_scalar = tensor.allowed[0] in {scalar.name for scalar in spec.scalars}
    if not of_scalar:  # else the choices of that one are checked
        wider = (*tensor.allowed, *(d for d in _DTYPES if d not in tensor.allowed))
        yield "dtypes", {"dtypes": wider, "dtype_with": None}
    if not tensor.strided and set(words) != {"1"}:
        yield "contiguous", {"strided": True}
    if tensor.on_cpu:
        yield "on the CPU", {"on_cpu": False}
    if tensor.shape is not None:
        yield "computed shape", {"shape": None}
    every = (*spec.tensors, *(spec.results if with_results else ()))
    used = [word.partition("/")[0] for each in every for word in each.own_dims]
    for place, word in enumerate(words):
        base = word.partition("/")[0]
        first = tensor is spec.arguments[0]
        if callable(spec.dims.get(base)) and (first or word == "slots" == tensor.dims):
            continue  # computed from this very dimension
        bound = not first and base in {*spec.dims, *spec.names}
        checked = used.count(base) > 1 or base.isdigit() or bound
        if checked and word not in ("...", "*"):
            free = [*words[:place], "any", *words[place + 1 :]]
            yield f"dimension {word}", {"dims": " ".join(free)}


def _of_scalar(scalar):
    if scalar.kind in ("bool", "int", "float", "dtype"):
        yield "type", {"kind": "any"}
    if scalar.at_least is not None:
        yield "at_least", {"at_least": None}
    if scalar.choices:
        yield "choices", {"choices": ()}


def _forget_what_is_computed(objects):
    for each in objects:
        for name, value in vars(type(each)).items():
            if isinstance(value, functools.cached_property):
                vars(each).pop(name, None)


@contextlib.contextmanager
def _changed(objects, fields):
    """Other values in frozen objects for a while."""
    before = [{name: getattr(each, name) for name in fields} for each in objects]
    for each in objects:
        for name, value in fields.items():
            object.__setattr__(each, name, value)
    _forget_what_is_computed(objects)
    try:
        yield
    finally:
        for each, old in zip(objects, before, strict=True):
            for name, value in old.items():
                object.__setattr__(each, name, value)
        _forget_what_is_computed(objects)


def of_data(name):
    """(what is dropped, whether a bad call then goes unrefused or has another error)"""
    from support import bad_arguments, declared
    from support import contract_calls as calls

    from tiercel.core.spec import Scalar

    public = name in calls.OPS
    spec = declared.SPECS[name] if public else declared.OPERATORS[name].spec
    with_results = public and declared.OPERATORS[name].out is not None
    forms = [op.spec.name for op in declared.OPERATORS.values() if op.spec.public == spec.public]
    cases = [
        case
        for form in dict.fromkeys((name, *forms))
        for case in (bad_arguments.public if form in calls.OPS else bad_arguments.of_operator)(form)
    ]

    def noticed(argument):
        def concerns(case):
            return argument not in case[0].changes

        for bad, function, values in sorted(cases, key=concerns):
            try:
                bad_arguments.run(function, values, bad.changes)
            except Exception as error:
                if bad.is_right(spec.public, error):
                    continue
            return True
        return False

    assert not noticed(""), name
    family = [op.spec for op in declared.OPERATORS.values() if op.spec.public == spec.public]
    family.append(spec)
    for argument in (*spec.arguments, *(spec.results if with_results else ())):
        scalar = isinstance(argument, Scalar)
        dropped = _of_scalar(argument) if scalar else _of_tensor(spec, argument, with_results)
        # A form of the op may require what another one takes as an option.
        required = argument if scalar else dataclasses.replace(argument, optional=False)
        every = [a for s in family for a in (*s.arguments, *s.results) if a in (argument, required)]
        every = list({id(each): each for each in every}.values())
        for what, fields in dropped:
            with _changed(every, fields):
                yield f"{name}: {argument.name}: {what}", noticed(argument.name)
    if spec.together:
        with _changed(family, {"together": ()}):
            yield f"{name}: all or none", noticed("")


class _Checks(ast.NodeVisitor):
    """The statements that raise, or call what raises, inside functions."""

    def __init__(self):
        self.found = []

    def visit_Raise(self, node):
        self.found.append(node)

    def visit_Expr(self, node):
        name = getattr(getattr(node.value, "func", None), "id", "").lstrip("_")
        if name.startswith("check_"):
            self.found.append(node)


def of_relations(family):
    """Drops each check of the `check=` functions; the family's tests have to notice."""
    path = importlib.import_module(f"tiercel.ops.{family}.spec").__file__
    source = Path(path).read_text()
    checks = _Checks()
    checks.visit(ast.parse(source))
    functions = [
        each
        for each in gc.get_objects()
        if isinstance(each, types.FunctionType) and each.__code__.co_filename == path
    ]
    before = [each.__code__ for each in functions]
    for node in checks.found:
        lines = source.splitlines(keepends=True)
        line, column = lines[node.lineno - 1], node.col_offset
        lines[node.lineno - 1] = f"{line[:column]}if 0: {line[column:]}"
        codes = {
            (c.co_name, c.co_firstlineno): c for c in _codes(compile("".join(lines), path, "exec"))
        }
        try:
            for each, code in zip(functions, before, strict=True):
                each.__code__ = codes[code.co_name, code.co_firstlineno]
            yield f"{family}/spec.py:{node.lineno}", _tests_fail(family)
        finally:
            for each, code in zip(functions, before, strict=True):
                each.__code__ = code


def _codes(code):
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def _tests_fail(family):
    options = ["-qx", "-c", TESTS / "pytest.ini", "--rootdir", TESTS, "-p", "no:cacheprovider"]
    files = sorted((TESTS / family).glob("test_*_cpu.py"))
    for only in (["-k", "bad or error"], []):
        with contextlib.redirect_stdout(io.StringIO()):
            result = pytest.main([*map(str, [*options, *only, *files])])
        if result == pytest.ExitCode.TESTS_FAILED:
            return True
        assert result in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), result
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", action="store_true", help="only what is said of one argument")
    parser.add_argument("--relations", action="store_true", help="only the check= functions")
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from support import declarations, declared

    dropped, unnoticed = 0, []
    for family, specs in declarations.by_family().items():
        if options.families and family not in options.families:
            continue
        checks = []
        if not options.relations:
            checks += [of_data(name) for name in specs if name not in declared.COMPOSITE]
        if not options.data:
            checks.append(of_relations(family))
        for what, noticed in (each for found in checks for each in found):
            dropped += 1
            if not noticed:
                unnoticed.append(what)
                print(f"no test fails without {what}", flush=True)
        print(f"{family}: {dropped} checks dropped so far", flush=True)
    print(f"{dropped - len(unnoticed)} of {dropped} dropped checks fail a test")
    sys.exit(bool(unnoticed))


if __name__ == "__main__":
    main()
