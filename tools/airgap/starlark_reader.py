# SPDX-License-Identifier: Apache-2.0
"""Reads what Starlark files declare (rules, attributes, tags, providers) without running them.

Starlark is syntactically Python, so Python's own parser reads it. What is not plainly written down
(a loop's result, a file's content) is UNKNOWN.
"""

import ast
import dataclasses
import pathlib
import re


class Unknown:
    """A value that only running the file would tell."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()


@dataclasses.dataclass
class Module:
    label: str
    tree: ast.Module
    loads: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    values: dict[str, ast.expr] = dataclasses.field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = dataclasses.field(default_factory=dict)

    def symbols(self) -> list[str]:
        """What another file may load from this one."""
        return sorted(n for n in {**self.values, **self.functions} if not n.startswith("_"))


@dataclasses.dataclass
class Function:
    module: Module
    node: ast.FunctionDef


@dataclasses.dataclass
class Declared:
    """A rule, tag class, provider, extension or attribute: its kind and what it declares."""

    kind: str
    facts: dict


def parse(text: str, label: str) -> Module:
    module = Module(label, ast.parse(text))
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef):
            module.functions[node.name] = node
        elif isinstance(node, ast.Assign):
            # Of `a, b = f(...)` the first name has the value.
            target = node.targets[0]
            target = target.elts[0] if isinstance(target, ast.Tuple) else target
            if isinstance(target, ast.Name):
                module.values[target.id] = node.value
        elif isinstance(node, ast.Expr) and call_name(node.value) == "load":
            source = node.value.args[0].value
            for arg in node.value.args[1:]:
                module.loads[arg.value] = (source, arg.value)
            for keyword in node.value.keywords:
                module.loads[keyword.arg] = (source, keyword.value.value)
    return module


def call_name(node: ast.AST) -> str:
    """`f` for f(...), `a.f` for a.f(...), else ""."""
    return dotted(node.func) if isinstance(node, ast.Call) else ""


def method_name(node: ast.AST) -> str:
    """`f` for anything.f(...), else ""."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if called else ""


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def keywords(node: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class Reader:
    """Reads one Bazel module's folder; `external` answers for symbols of other modules."""

    def __init__(self, folder: pathlib.Path, repository: str, external=None) -> None:
        self.folder = folder
        self.repository = repository
        self.external = external or (lambda label, symbol: UNKNOWN)
        self.modules: dict[str, Module | None] = {}

    def path_of(self, label: str, package: str) -> str | None:
        """The file that a label of this module names, relative to its folder."""
        label = label.removeprefix("@" + self.repository)
        if label.startswith("@"):
            return None
        if label.startswith(":"):
            return str(pathlib.PurePosixPath(package) / label[1:])
        return label.removeprefix("//").replace(":", "/").lstrip("/")

    def module(self, path: str) -> Module | None:
        if path not in self.modules:
            file = self.folder / path
            self.modules[path] = parse(file.read_text(), path) if file.is_file() else None
        return self.modules[path]

    def symbol(self, path: str, name: str):
        """What a file's top level calls `name`: declared there, or loaded from elsewhere."""
        module = self.module(path)
        return UNKNOWN if module is None else self.name(module, name)

    def name(self, module: Module, name: str, scope: dict | None = None):
        if scope and name in scope:
            return self.value(module, scope[name])
        if name in module.values:
            return self.value(module, module.values[name])
        if name in module.functions:
            return Function(module, module.functions[name])
        if name in module.loads:
            label, symbol = module.loads[name]
            path = self.path_of(label, str(pathlib.PurePosixPath(module.label).parent))
            return self.external(label, symbol) if path is None else self.symbol(path, symbol)
        return UNKNOWN

    def value(self, module: Module, node: ast.expr):
        """The value of an expression as far as the text tells it."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.name(module, node.id)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(module, item) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {
                self.value(module, key): self.value(module, item)
                for key, item in zip(node.keys, node.values, strict=True)
                if key is not None
            }
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self.value(module, node.operand)
            return -operand if isinstance(operand, int) else UNKNOWN
        if isinstance(node, ast.Lambda):
            return self.value(module, node.body)
        if isinstance(node, ast.BinOp):
            return self._operation(module, node)
        if isinstance(node, ast.Attribute):
            owner = self.value(module, node.value)
            if isinstance(owner, Declared) and owner.kind == "struct":
                return owner.facts.get(node.attr, UNKNOWN)
            return UNKNOWN
        if isinstance(node, ast.Call):
            return self._call(module, node)
        return UNKNOWN

    def _operation(self, module: Module, node: ast.BinOp):
        left, right = self.value(module, node.left), self.value(module, node.right)
        if isinstance(left, dict) and isinstance(right, dict):
            return left | right
        if isinstance(node.op, ast.Add) and type(left) is type(right) and type(left) in (str, list):
            return left + right
        return UNKNOWN

    def _call(self, module: Module, node: ast.Call):
        name = call_name(node)
        given = keywords(node)
        owner, _, method = name.rpartition(".")
        if owner in ("attr", "attrb"):
            return self._attribute(module, snake(method), given)
        if method_name(node) == "build":
            return self.value(module, node.func.value)
        if name == "Label":
            return self.value(module, node.args[0])
        if name == "struct":
            return Declared("struct", {k: self.value(module, v) for k, v in given.items()})
        if method in ("rule", "Rule", "repository_rule"):
            return self._rule(module, given)
        if name == "tag_class":
            return Declared("tag_class", self._attributes(module, given))
        if name == "provider":
            fields = self.value(module, given["fields"]) if "fields" in given else []
            return Declared("provider", {"fields": sorted(fields)})
        if name == "module_extension":
            tags = self.value(module, given["tag_classes"]) if "tag_classes" in given else {}
            facts = {k: v.facts for k, v in tags.items() if isinstance(v, Declared)}
            return Declared("extension", {"tags": dict(sorted(facts.items()))})
        # A helper that merges dictionaries, whatever it is called.
        parts = [self.value(module, arg) for arg in node.args]
        if parts and not given and all(isinstance(part, dict) for part in parts):
            return {key: value for part in parts for key, value in part.items()}
        return UNKNOWN

    def _attribute(self, module: Module, kind: str, given: dict) -> Declared:
        empty = {"string": "", "bool": False, "int": 0, "label": None, "output": None}
        default = self.value(module, given["default"]) if "default" in given else None
        if default is None:
            default = empty.get(kind, {} if "dict" in kind else [])
        facts = {"type": kind, "default": "?" if default is UNKNOWN else default}
        facts["mandatory"] = "mandatory" in given and self.value(module, given["mandatory"]) is True
        if "label" in kind:
            files = False
            for option in ("allow_files", "allow_single_file"):
                if option in given:
                    files = self.value(module, given[option])
            facts["files"] = files if files in (True, False, None) else "some"
        return Declared("attribute", facts)

    def _attributes(self, module: Module, given: dict) -> dict:
        """The public attributes of a rule(...) or tag_class(...) call."""
        attrs = self.value(module, given["attrs"]) if "attrs" in given else {}
        if not isinstance(attrs, dict):
            return {}
        return {
            name: attrs[name].facts
            for name in sorted(n for n in attrs if isinstance(n, str) and not n.startswith("_"))
            if isinstance(attrs[name], Declared)
        }

    def _rule(self, module: Module, given: dict) -> Declared:
        facts: dict = {"attrs": self._attributes(module, given)}
        if "provides" in given and isinstance(given["provides"], ast.List):
            facts["provides"] = sorted(dotted(item) for item in given["provides"].elts)
        implementation = dotted(given["implementation"]) if "implementation" in given else ""
        if implementation in module.functions:
            groups: set[str] = set()
            for call in ast.walk(module.functions[implementation]):
                if call_name(call) == "OutputGroupInfo":
                    groups |= set(keywords(call))
            if groups:
                facts["output_groups"] = sorted(groups)
        return Declared("rule", facts)

    def macro(self, function: Function) -> Declared:
        """A macro's own parameters, with the attributes of the rule that takes its **kwargs."""
        arguments = function.node.args
        names = [argument.arg for argument in arguments.args + arguments.kwonlyargs]
        facts: dict = {"parameters": sorted(names), "attrs": {}, "open": False}
        if arguments.kwarg is None:
            return Declared("macro", facts)
        rest = arguments.kwarg.arg
        facts["open"] = True
        for call in ast.walk(function.node):
            if call_name(call) in (rest + ".pop", rest + ".get") and call.args:
                facts["parameters"] = sorted({*facts["parameters"], call.args[0].value})
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            if any(k.arg is None and dotted(k.value) == rest for k in call.keywords):
                target = self.name(function.module, call.func.id)
                if isinstance(target, Function):
                    target = self.macro(target)
                if isinstance(target, Declared) and "attrs" in target.facts:
                    facts["attrs"] |= target.facts["attrs"]
                    facts["parameters"] = sorted(
                        {*facts["parameters"], *target.facts.get("parameters", [])}
                    )
                    facts["open"] = target.facts.get("open", False)
                    facts["module"] = target.facts.get("module", "")
        return Declared("macro", facts)


def targets(reader: Reader, path: str) -> dict[str, dict]:
    """The public targets of a BUILD file, also those a macro in it makes; * for what varies."""
    module = reader.module(path)
    if module is None:
        return {}
    return _targets_in(reader, module, module.tree, {})


def _targets_in(reader: Reader, module: Module, tree: ast.AST, inherited: dict) -> dict[str, dict]:
    visible = inherited.get("visible", False)
    found: dict[str, dict] = {}
    for call in ast.walk(tree):
        if call_name(call) == "package" and "default_visibility" in keywords(call):
            value = reader.value(module, keywords(call)["default_visibility"])
            visible = value == ["//visibility:public"]
    for call in ast.walk(tree):
        kind = call_name(call).removeprefix("native.")
        if not isinstance(call, ast.Call) or kind in ("package", ""):
            continue
        if kind == "exports_files" and call.args:
            for name in reader.value(module, call.args[0]) or []:
                found[name] = {"kind": "file"}
            continue
        given = keywords(call)
        if "name" not in given:
            continue
        made = reader.name(module, kind) if "." not in kind else UNKNOWN
        if isinstance(made, Function):
            found |= _targets_in(reader, made.module, made.node, {"visible": visible})
        name = _pattern(reader, module, given["name"])
        public = visible
        if "visibility" in given:
            # Written out: a constant for it stands for "public only because other rules need it".
            public = isinstance(given["visibility"], ast.List)
            public &= reader.value(module, given["visibility"]) == ["//visibility:public"]
        if name and public:
            found[name] = {"kind": kind.lstrip("_")}
            if "build_setting_default" in given:
                default = reader.value(module, given["build_setting_default"])
                found[name]["default"] = "?" if default is UNKNOWN else default
    return found


def _pattern(reader: Reader, module: Module, node: ast.expr) -> str:
    """A target's name: as written, with * where a format or a sum puts something in."""
    if isinstance(node, ast.Constant):
        return node.value
    if method_name(node) == "format":
        base = reader.value(module, node.func.value)
        return re.sub(r"{[^}]*}", "*", base) if isinstance(base, str) else ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = (_pattern(reader, module, side) or "*" for side in (node.left, node.right))
        return (left + right).replace("**", "*") if left + right != "**" else ""
    # Label("//package:target").name
    if isinstance(node, ast.Attribute) and node.attr == "name":
        label = reader.value(module, node.value)
        return label.rpartition(":")[2] if isinstance(label, str) else ""
    return ""
