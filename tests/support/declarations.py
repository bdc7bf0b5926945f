# SPDX-License-Identifier: Apache-2.0
"""The declarations of the ops as text: tests/<family>/declarations.txt.

The tests of bad arguments are made from the declarations, so that a check dropped there would go
unseen; in these files it shows. After a change that is meant:

    python tests/support/declarations.py --write
"""

import argparse
import textwrap
from pathlib import Path

from tiercel import _families
from tiercel.core.arguments import REQUIRED
from tiercel.core.spec import Dim, Scalar, Spec

TESTS = Path(__file__).parents[1]


def of_module(module):
    """The declarations of a family, by the operator's name."""
    found = {}
    for value in vars(module).values():
        for spec in value.values() if isinstance(value, dict) else (value,):
            if isinstance(spec, Spec):
                found[spec.name] = spec
    return found


def by_family():
    return {m.__name__.split(".")[2]: of_module(m) for m in _families.modules("spec")}


def _tensor(tensor):
    words = [f"[{', '.join(tensor.dims.split())}]", " or ".join(tensor.allowed)]
    if tensor.dtype_with:
        words.append(f"({tensor.dtype_with[1]} with {tensor.dtype_with[0]})")
    if tensor.dtype_instead:
        words.append(f"({' -> '.join(tensor.dtype_instead)})")
    words += [flag for flag in ("strided", "written", "on_cpu") if getattr(tensor, flag)]
    if tensor.comes_with:
        words.append(f"comes with {tensor.comes_with}")
    if tensor.shape is not None:
        words.append("a shape that is computed")
    tolerances = {name: getattr(tensor, name) for name in ("rtol", "atol", "of_sums")}
    words += [f"{name}={value:g}" for name, value in tolerances.items() if value]
    if isinstance(tensor.shape_text, str) and tensor.shape_text:
        words.append(repr(tensor.shape_text))
    return f"{tensor.name}{'?' * tensor.optional}: {' '.join(words)}"


def _scalar(scalar):
    text = f"{scalar.name}{'?' * scalar.optional}: {'varying ' * scalar.varies}{scalar.kind}"
    if scalar.default is not REQUIRED:
        text += f" = {scalar.default!r}"
    if scalar.at_least is not None:
        text += f", at least {scalar.at_least}"
    if scalar.choices:
        text += f", one of {', '.join(map(str, scalar.choices))}"
    return text


def _dim(size):
    if not isinstance(size, Dim):
        return "computed"
    unless = f" unless {size.unless}" if size.unless else ""
    return f"{size.argument}[{size.dim}] / {size.divisor}{unless}"


def text_of(spec):
    lines = [_scalar(a) if isinstance(a, Scalar) else _tensor(a) for a in spec.arguments]
    lines += [f"-> {_tensor(result)}" for result in spec.results]
    lines += [f"{name} = {_dim(size)}" for name, size in spec.dims.items()]
    if spec.together:
        lines.append(f"all or none: {', '.join(spec.together)}")
    if spec.check is not None:
        lines.append("and a check of relations")
    return textwrap.fill("; ".join(lines), 100, initial_indent="  ", subsequent_indent="  ")


def render(specs):
    """Ops that are declared alike stand together."""
    alike = {}
    for name, spec in specs.items():
        of = f" (of {spec.public})" if spec.public != name else ""
        alike.setdefault(text_of(spec), []).append(name + of)
    return "".join(f"{', '.join(names)}\n{text}\n" for text, names in alike.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="write the files instead of the output"
    )
    write = parser.parse_args().write
    for family, specs in by_family().items():
        if write:
            (TESTS / family / "declarations.txt").write_text(render(specs))
        else:
            print(render(specs))


if __name__ == "__main__":
    main()
