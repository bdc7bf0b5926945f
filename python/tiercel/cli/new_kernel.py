# SPDX-License-Identifier: Apache-2.0
"""``tiercel new-kernel``: a file to begin a backend from."""

import argparse
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tiercel.plugins.contract import Contract

HELP = "Writes a backend of an operator that is right already, to begin your own from."
LANGUAGES = ("torch", "triton", "cuda", "cute")
_TEMPLATES = Path(__file__).parent.parent / "workbench" / "templates"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A triton kernel needs a GPU and Triton, which CUDA builds of PyTorch bring along; a cuda "
        "kernel a GPU and nvcc (tiercel[jit], CUDA_HOME, CUDACXX or PATH), a cute kernel a GPU and "
        "nvidia-cutlass-dsl (tiercel[jit])."
    )
    parser.add_argument("name", metavar="NAME", help="the backend's name, a Python identifier")
    parser.add_argument("--language", choices=LANGUAGES, required=True)
    parser.add_argument("--op", default="topk_softmax", help="the operator (topk_softmax)")
    text = "the file to write (NAME.py)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    try:
        path = write(args.name, args.language, args.op, args.out)
    except FileExistsError as error:
        text = f"{error.filename} is there already; --out FILE writes another"
        print(f"tiercel new-kernel: {text}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"tiercel new-kernel: cannot write {error.filename}: {error.strerror}", file=sys.stderr
        )
        return 2
    except ValueError as error:
        print(f"tiercel new-kernel: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path}; check it with: tiercel smoke --path {path}")
    return 0


def write(name: str, language: str, op: str, out: "Path | None" = None) -> Path:
    from keyword import iskeyword

    from tiercel.plugins.contracts import contract_of

    contract = contract_of(op)
    if not (name.isidentifier() and name.isascii()) or iskeyword(name):
        raise ValueError(f"{name!r} is no Python identifier")
    if name in ("sm90", "ref", "auto"):
        raise ValueError(f"the name {name!r} is Tiercel's own")
    path = out if out is not None else Path(f"{name}.py")
    text = _text(contract, name, language).replace(f"{name}.py", path.name)
    with path.open("x", encoding="utf-8") as file:  # never over another
        file.write(text)
    return path


def _text(contract: "Contract", name: str, language: str) -> str:
    if language == "torch":
        from tiercel.plugins.rendering import render

        return render(contract, name)
    template = _template(contract.op, language)
    if not template.exists():
        from tiercel._links import docs

        there = ", ".join(["torch", *(n for n in LANGUAGES if _template(contract.op, n).exists())])
        raise ValueError(
            f"there is no template for {contract.op} in {language} yet, only in {there}; "
            f"{docs('plugins.md')} says how to register a kernel without one"
        )
    # The licence line is of our file, not of theirs.
    return template.read_text(encoding="utf-8").split("\n", 1)[1].replace("new_kernel", name)


def _template(op: str, language: str) -> Path:
    return _TEMPLATES / f"{op}_{language}.py"
