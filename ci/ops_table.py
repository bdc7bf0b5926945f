#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares README's table of ops with what the ops' folders declare, or writes it.

    ci/ops_table.py [--write]

A row is an op: its page is the one whose title names it, its summary the first paragraph of its
docstring, its dtypes and limits those of its `Spec`. It needs Python 3 alone, and nothing built.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys
import types
from collections.abc import Iterator

import figures

ROOT = pathlib.Path(__file__).absolute().parents[1]
SCRIPT = "ci/ops_table.py"

# The package's modules without the package itself, which needs what is built.
_package = sys.modules["tiercel"] = types.ModuleType("tiercel")
_package.__path__ = [str(ROOT / "python" / "tiercel")]

from tiercel import _families  # noqa: E402 - after the stand-in package
from tiercel.core.spec import Spec, Tensor  # noqa: E402


def links() -> dict[str, str]:
    """The page of each op: a title names ops, and so may a heading below it."""
    found = {}
    for page in sorted((ROOT / "docs" / "kernels").glob("*.md")):
        title, *headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
        for op in title.replace("`", "").split(", "):
            found[op] = f"docs/kernels/{page.name}" + (f"#{op}" if op in headings else "")
    return found


def summaries() -> dict[str, str]:
    """The first paragraph of each function's docstring, as Markdown."""
    found = {}
    for module in _families.files("op"):
        source = ROOT / "python" / f"{module.replace('.', '/')}.py"
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                text = " ".join(text.partition("\n\n")[0].split()).removesuffix(".")
                text = re.sub(r":\w+:`(?:tiercel\.)?(\w+)`", r"`\1`", text).replace("``", "`")
                found[node.name] = text.replace("|", r"\|")
    return found


def declared() -> Iterator[tuple[str, Spec]]:
    """The public ops by family, in the order of their declarations."""
    public = _families.public_names()
    for module in _families.modules("spec"):
        specs: dict[str, Spec] = {}
        for value in vars(module).values():
            for each in value.values() if isinstance(value, dict) else (value,):
                if isinstance(each, Spec) and each.name in public:
                    specs.setdefault(each.name, each)
        yield from specs.items()


def dtypes(spec: Spec) -> str:
    """Those of the first floating tensor, then narrower ones and which tensor may have them."""
    tensors = [each for each in spec.arguments if isinstance(each, Tensor)]
    own = {each.name: [d for d in each.allowed if d not in spec.names] for each in tensors}
    floating = [name for name, found in own.items() if any("float" in d for d in found)]
    first = (floating or list(own))[0]
    words, seen = [", ".join(own[first])], set(own[first])
    for each in (*tensors, *spec.results):
        allowed = (*each.allowed, *(each.dtype_with or ())[1:])
        narrow = [d for d in allowed if re.match(r"float[48]", d) and d not in seen]
        if narrow:
            words.append(f"`{each.name}` {', '.join(narrow)}")
            seen.update(narrow)
    return "; ".join(words)


def table() -> str:
    pages, texts = links(), summaries()
    lines = ["| op | what | dtypes | limits of `sm90` |", "|---|---|---|---|"]
    rows = dict(declared())
    missing = {
        "a declaration in its family's spec.py": _families.public_names() - rows.keys(),
        "a page in docs/kernels whose title names it": rows.keys() - pages.keys(),
        "a docstring": rows.keys() - texts.keys(),
    }
    for what, ops in missing.items():
        if ops:
            raise SystemExit(f"{SCRIPT}: {', '.join(sorted(ops))} lacks {what}")
    for op, spec in rows.items():
        lines.append(f"| [`{op}`]({pages[op]}) | {texts[op]} | {dtypes(spec)} | {spec.limits} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table")
    readme = ROOT / "README.md"
    write = parser.parse_args().write
    text = figures.page(readme.read_text(), SCRIPT, table())
    if write:
        readme.write_text(text)
    elif text != readme.read_text():
        print(
            f"{SCRIPT}: README.md's table of ops is out of date: {SCRIPT} --write", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
