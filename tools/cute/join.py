# SPDX-License-Identifier: Apache-2.0
"""Joins what the runs of compile.py left for a family: the C++ source that embeds the cubins, their
manifest, and folders with all cubins and all PTX.
"""

import argparse
import json
import pathlib
import shutil


def source(pieces: list[dict], header: str, variant: str, table: str) -> str:
    """The C++ source: images, parameter layouts and the table of kernels."""

    def all_of(key: str) -> list[str]:
        return [text for piece in pieces for text in piece[key]]

    images = [piece["image"] for piece in pieces]
    return (
        "// SPDX-License-Identifier: Apache-2.0\n"
        "// Generated from the family's CuTe DSL kernels; do not edit.\n"
        f'#include "{header}"\n\n#include <cstddef>\n\n'
        "namespace tiercel {\nnamespace {\n\n"
        + "".join(dict.fromkeys(all_of("checks")))
        + "\n".join(images + all_of("layouts"))
        + f"\nconst CubinKernel<{variant}> kKernels[] = {{\n{''.join(all_of('rows'))}}};\n\n"
        "}  // namespace\n\n"
        f"const CubinKernel<{variant}>* {table}(int* count) {{\n"
        "  *count = sizeof(kKernels) / sizeof(kKernels[0]);\n"
        "  return kKernels;\n}\n\n}  // namespace tiercel\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", required=True, type=pathlib.Path)
    parser.add_argument("--header", required=True, help="what the C++ source includes")
    parser.add_argument("--variant", required=True, help="the struct of a kernel's attributes")
    parser.add_argument("--table", required=True, help="the function that returns the kernels")
    parser.add_argument("--source", required=True, type=pathlib.Path)
    parser.add_argument("--manifest", required=True, type=pathlib.Path)
    parser.add_argument("--cubins", required=True, type=pathlib.Path, help="a folder")
    parser.add_argument("--ptx", required=True, type=pathlib.Path, help="a folder")
    options = parser.parse_args()
    pieces = []
    for part in options.part:
        found = json.loads((part / "pieces.json").read_text())
        head = found["head"]  # the same in each part
        pieces += found["pieces"]
        for name in ("cubins", "ptx"):
            shutil.copytree(part / name, getattr(options, name), dirs_exist_ok=True)
    pieces.sort(key=lambda piece: piece["index"])
    options.source.write_text(source(pieces, options.header, options.variant, options.table))
    records = [record for piece in pieces for record in piece["records"]]
    options.manifest.write_text(json.dumps(head | {"kernels": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
