# SPDX-License-Identifier: Apache-2.0
"""What the wheels are measured against; all of it is data in the repository."""

import dataclasses
import json
import pathlib

from sbom import locked_versions


@dataclasses.dataclass
class Policy:
    pythons: list[str]
    budget: dict[str, int]
    sizes: dict[str, int]
    components: list[dict]
    locked: dict[tuple[str, str], str]
    cuobjdump: pathlib.Path | None = None
    version: str = ""

    @classmethod
    def read(cls, env: dict[str, str]) -> "Policy":
        """From the files that //tools/audit names in environment variables."""

        def data(name: str):
            return json.loads(pathlib.Path(env[name]).read_text())

        return cls(
            pythons=env["SUPPORTED_PYTHONS"].split(),
            budget=data("BUDGET"),
            sizes=data("SIZES"),
            components=data("COMPONENTS"),
            locked=locked_versions([pathlib.Path(path) for path in env["LOCKS"].split()]),
            cuobjdump=pathlib.Path(env["BINUTILS"].split()[0]),
        )
