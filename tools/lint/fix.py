# SPDX-License-Identifier: Apache-2.0
"""Format everything and mend what the linters can mend: fix.py LINT_SITE BUILDIFIER."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parent))

from programs import Programs


def main() -> int:
    programs = Programs(*sys.argv[1:])
    left = 0
    # Mending moves lines: formatted before, for what is left to say, and after.
    names = ("ruff_format", "ruff_check", "ruff_format", "clang_format_all", "buildifier_all")
    for name in names:
        result = getattr(programs, name)(fix=True)
        print(f"{name.removesuffix('_all')}: {'ok' if result.returncode == 0 else 'to do:'}")
        print(result.stdout + result.stderr, end="")
        left |= result.returncode
    return int(left != 0)


if __name__ == "__main__":
    sys.exit(main())
