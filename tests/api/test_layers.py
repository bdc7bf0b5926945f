# SPDX-License-Identifier: Apache-2.0
"""Who may import whom in the package: docs/architecture.md has the ladder."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import tiercel

ROOT = Path(tiercel.__file__).parent
# A module imports only from its own layer and from those before it.
LADDER = ("core", "cache", "jit", "plugins", "ops", "integrations", "workbench", "cli")


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(("tiercel", *path.relative_to(ROOT).with_suffix("").parts))
        yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def imported(tree, known):
    """The package's modules that are imported when a module is, not those inside functions."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known or node.module in known:
                    yield whole if whole in known else node.module


def layer(name):
    part, kind = (name.split(".") + [""])[1], name.rpartition(".")[2].partition("_")[0]
    if part == "ops" and kind in ("cases", "peers", "tune"):  # a family's files for the workbench
        part = "workbench"
    return LADDER.index(part) if part in LADDER else None


def test_no_import_circle_and_none_upwards():
    trees = dict(modules())
    graph = {name: set(imported(tree, trees)) - {name, "tiercel"} for name, tree in trees.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError
    assert len(graph) > 150
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in sorted(others)
        if None not in (layer(name), layer(other)) and layer(other) > layer(name)
    ]
    assert not wrong
