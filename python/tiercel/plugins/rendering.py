# SPDX-License-Identifier: Apache-2.0
"""A backend in plain PyTorch as text: the reference's source under the contract's signature."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiercel.plugins.contract import Contract, ScalarSpec, TensorSpec

_FAMILIES = Path(__file__).parent.parent / "ops"

_FILE = '''\
"""{name}: {op} in plain PyTorch, from the source of tiercel.ref.{op}.

tiercel smoke --path {name}.py      check it and time it against the reference
"""

from __future__ import annotations

{imports}{helpers}


@tiercel.backends.register(
    op="{op}",
    name="{name}",
    language="torch",
    description="the reference's own steps",
)
def {name}(
{parameters}
) -> {result}
{body}
'''

# Types of arguments that the reference does not name.
_SCALARS = {"dtype": "torch.dtype"}


def render(contract: Contract, name: str) -> str:
    """The source of a file that registers the reference as the backend `name`.

    Raises:
        ValueError: The reference itself uses that name.
    """
    module = _Module(contract.reference or contract.op, contract.family)
    function = module.function
    used = module.reached(function)
    taken = {name for name, _ in used} | {"tiercel"} | _locals(function)
    if name in taken - {contract.op}:
        raise ValueError(f"the reference of {contract.op} uses the name {name!r} itself")
    imports = {n: node for n, node in used if isinstance(node, (ast.Import, ast.ImportFrom))}
    _need_imports(contract, function, imports)
    helpers = [node for _, node in used if node not in imports.values() and node is not function]
    texts = [module.text(node) for node in sorted(set(helpers), key=lambda node: node.lineno)]
    text = _FILE.format(
        name=name,
        op=contract.op,
        imports=_imports(imports),
        helpers=_spaced(texts),
        parameters="\n".join(_parameters(contract, function)),
        result=_result(contract, function),
        body=module.body(function),
    )
    # A reference that calls itself.
    return re.sub(rf"(?<![\w.]){contract.op}(?=\()", name, text)


class _Module:
    """The file that defines an operator's reference."""

    def __init__(self, op: str, family: str) -> None:
        source = (_FAMILIES / family / "reference.py").read_text(encoding="utf-8")
        self._lines = source.splitlines()
        self._top: dict[str, ast.stmt] = {}
        for node in ast.parse(source).body:
            self._top |= dict.fromkeys(_defined(node), node)
        found = self._top.get(op)
        if isinstance(found, ast.ImportFrom):
            assert found.module is not None
            self.__init__(op, found.module.split(".")[-2])  # type: ignore[misc]
            return
        if not isinstance(found, ast.FunctionDef):
            raise ValueError(f"tiercel/ops/{family}/reference.py does not define {op}")
        found.decorator_list.clear()  # what it adds, a backend is never asked for
        self.function = found

    def reached(self, start: ast.stmt) -> list[tuple[str, ast.stmt]]:
        """The names at the top of the file that a statement needs, with what defines them."""
        found: dict[str, ast.stmt] = {}
        todo = [start]
        while todo:
            for name in sorted(_names(todo.pop()) & self._top.keys() - found.keys()):
                found[name] = self._top[name]
                todo.append(self._top[name])
        return list(found.items())

    def text(self, node: ast.stmt) -> str:
        """A statement as written, with its decorators and the comment above it."""
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorators)]) - 1
        while first > 0 and self._lines[first - 1].startswith("#"):
            first -= 1
        return "\n".join(self._lines[first : node.end_lineno])

    def body(self, function: ast.FunctionDef) -> str:
        """The body of a function, without its docstring."""
        has_text = ast.get_docstring(function) is not None and len(function.body) > 1
        before = function.body[0] if has_text else function.returns or function.args
        first = (before.end_lineno or 0) if has_text else function.body[0].lineno - 1
        while not has_text and self._lines[first - 1].lstrip().startswith("#"):
            first -= 1
        return "\n".join(self._lines[first : function.end_lineno]).strip("\n")


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            if getattr(node, "module", None) != "__future__":
                yield (alias.asname or alias.name).partition(".")[0]
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in getattr(node, "targets", None) or [node.target]:  # type: ignore[union-attr]
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _names(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _locals(function: ast.FunctionDef) -> set[str]:
    stored = (n for n in ast.walk(function) if isinstance(n, ast.Name))
    names = {name.id for name in stored if isinstance(name.ctx, ast.Store)}
    return names | {
        argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)
    }


def _arguments(function: ast.FunctionDef) -> dict[str, tuple[str, str | None]]:
    """Annotation and default by name."""
    args = function.args
    by_place = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(by_place) - len(args.defaults))
    pairs = [
        *zip(by_place, [*defaults, *args.defaults], strict=True),
        *zip(args.kwonlyargs, args.kw_defaults, strict=True),
    ]
    return {
        arg.arg: (
            "" if arg.annotation is None else ast.unparse(arg.annotation),
            None if default is None else ast.unparse(default),
        )
        for arg, default in pairs
    }


def _parameters(contract: Contract, function: ast.FunctionDef) -> Iterator[str]:
    own = _arguments(function)
    for spec in contract.arguments:
        annotation = own.get(spec.name, ("", None))[0] or _annotation(spec)
        comment = f"  # {_described(contract, spec)}" if isinstance(spec, TensorSpec) else ""
        yield f"    {spec.name}: {annotation},{comment}"
    for name, (annotation, default) in own.items():
        if name not in contract.names:  # what the operator never passes
            yield f"    {name}: {annotation or 'object'} = {default},"


def _annotation(spec: TensorSpec | ScalarSpec) -> str:
    if isinstance(spec, ScalarSpec):
        return _SCALARS.get(spec.type, spec.type)
    return "Tensor | None" if spec.optional else "Tensor"


def _described(contract: Contract, spec: TensorSpec) -> str:
    dtypes = [f"the dtype of {d}" if _is_tensor(contract, d) else d for d in spec.dtypes]
    text = " or ".join(filter(None, (", ".join(dtypes[:-1]), dtypes[-1])))
    strides = ", any strides" if spec.strided else ""
    return f"[{', '.join(spec.dims)}] {text}{strides}{', or None' if spec.optional else ''}"


def _is_tensor(contract: Contract, name: str) -> bool:
    return any(spec.name == name and isinstance(spec, TensorSpec) for spec in contract.arguments)


def _result(contract: Contract, function: ast.FunctionDef) -> str:
    specs = contract.outputs
    tensors = "Tensor" if len(specs) == 1 else f"tuple[{', '.join(['Tensor'] * len(specs))}]"
    annotation = ast.unparse(function.returns) if function.returns is not None else tensors
    described = [_described(contract, spec) for spec in specs]
    if len(specs) > 1:
        named = zip(specs, described, strict=True)
        described = [f"{spec.name} {text}" for spec, text in named]
    return f"{annotation}:  # {'; '.join(described)}"


def _need_imports(
    contract: Contract, function: ast.FunctionDef, imports: dict[str, ast.stmt]
) -> None:
    """Imports that the annotations need and the reference lacks."""
    own = _arguments(function)
    lines = [_annotation(spec) for spec in contract.arguments if spec.name not in own]
    if any("Tensor" in line for line in lines):
        imports.setdefault("Tensor", ast.parse("from torch import Tensor").body[0])
    if any("torch." in line for line in lines):
        imports.setdefault("torch", ast.parse("import torch").body[0])


def _imports(imports: dict[str, ast.stmt]) -> str:
    """Only the names that are used; Python's own first, then torch, then tiercel."""
    plain: set[str] = set()
    members: dict[str, set[str]] = {}
    for name, node in imports.items():
        assert isinstance(node, (ast.Import, ast.ImportFrom))
        alias = next(
            a
            for a in node.names
            if (a.asname or a.name).partition(".")[0] == name or a.name == name
        )
        text = alias.name + (f" as {alias.asname}" if alias.asname else "")
        if isinstance(node, ast.Import):
            plain.add(text)
        else:
            members.setdefault(node.module or "", set()).add(text)
    plain.add("tiercel")
    groups: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for text in sorted(plain):
        groups[_group(text)].append(f"import {text}")
    for module in sorted(members):
        names = ", ".join(sorted(members[module], key=lambda text: (not text.isupper(), text)))
        groups[_group(module)].append(f"from {module} import {names}")
    return "\n\n".join("\n".join(lines) for lines in groups.values() if lines)


def _group(module: str) -> int:
    return {"torch": 1, "numpy": 1, "tiercel": 2}.get(module.split()[0].partition(".")[0], 0)


def _spaced(texts: Sequence[str]) -> str:
    """Statements below imports, two blank lines around functions and classes."""
    spaced, before_is_block = "", False
    for text in texts:
        is_block = re.search(r"^(def|class) ", text, re.MULTILINE) is not None
        spaced += ("\n\n\n" if is_block or before_is_block else "\n\n") + text
        before_is_block = is_block
    return spaced
