#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs transformers' own tests of models with Tiercel's attention; a developer's command.

    python tests/integrations/run_transformers_tests.py --transformers CHECKOUT [--device cuda]

CHECKOUT is a checkout of Hugging Face transformers, with its tests; its sources are used, not the
installed ones. Models without a wish get ``attn_implementation="tiercel"``, and a wish for sdpa is
also served by Tiercel. The tests compare float32 results, which no kernel takes: attention computes
those with the reference in float32, so that masks, caches and packing are what is tested. bfloat16
and float16 run on the kernels, or on a CPU on their stand-in.

A test that fails is run once more without Tiercel, and counts only if it passes then. Tests that
`transformers_tests.json` names are left out. ``--write`` puts the result beside it,
in the lines of the models that were run.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).absolute().parent
LEFT_OUT = HERE / "transformers_tests.json"
PAGE = HERE / "transformers_tests.md"
MODELS = ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3", "mistral", "gpt_oss")
_MODE = "TIERCEL_TRANSFORMERS_TESTS"  # "tiercel" or "own", for the plug-in below
_RECORD = "TIERCEL_TRANSFORMERS_RECORD"


# In pytest, as a plug-in.


def pytest_configure() -> None:
    # Pipelines need checkpoints from a network, and many packages to be imported.
    pipelines = types.ModuleType("tests.test_pipeline_mixin")
    pipelines.PipelineTesterMixin = type("PipelineTesterMixin", (), {})  # type: ignore[attr-defined]
    sys.modules[pipelines.__name__] = pipelines
    if os.environ.get(_MODE) == "tiercel":
        _use_tiercel()


def _use_tiercel() -> None:
    """Makes Tiercel's attention the default, and what "sdpa" means."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    import tiercel
    import tiercel.integrations.transformers
    from tiercel.integrations.transformers import attention, masks

    AttentionInterface.register("sdpa", attention.attention_forward)
    AttentionMaskInterface.register("sdpa", masks.make_mask)
    original = PreTrainedModel.get_correct_attn_implementation

    def chosen(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
        found: str = original(self, requested, *args, **kwargs)
        return "tiercel" if requested is None and found == "sdpa" else found

    PreTrainedModel.get_correct_attn_implementation = chosen

    class Either:
        """Attention of the kernels' dtypes, and of float32 by the reference."""

        def __getattr__(self, name: str) -> Any:
            def call(q: Any, *args: Any, **kwargs: Any) -> Any:
                wide = q.dtype in (torch.float32, torch.float64)
                return getattr(tiercel.ref if wide else tiercel, name)(q, *args, **kwargs)

            return call

    attention.tiercel = Either()  # type: ignore[attr-defined]
    attention.DTYPES += (torch.float32, torch.float64)


def left_out() -> dict[str, list[str]]:
    """Patterns of tests' names by the reason."""
    return json.loads(LEFT_OUT.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    patterns = list(itertools.chain(*left_out().values()))
    kept: list[Any] = []
    out: list[Any] = []
    for item in items:
        matches = any(fnmatch.fnmatch(item.name, pattern) for pattern in patterns)
        (out if matches else kept).append(item)
    config.hook.pytest_deselected(items=out)
    items[:] = kept
    for item in out:
        _record(item.nodeid, "left out", "")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        text = report.longreprtext.strip().rpartition("\n")[2] if report.failed else ""
        _record(report.nodeid, report.outcome, text)


def _record(test: str, outcome: str, text: str) -> None:
    with Path(os.environ[_RECORD]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([test, outcome, text]) + "\n")


# The command.


def run(args: argparse.Namespace, mode: str, tests: list[str]) -> dict[str, tuple[str, str]]:
    """(outcome, last line of the error) by test."""
    root = args.transformers.resolve()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        record.touch()
        paths = [str(HERE), str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TRANSFORMERS_TEST_DEVICE": args.device,
            "HF_HUB_OFFLINE": "1",
            _MODE: mode,
            _RECORD: str(record),
        }
        options = ["-q", "--tb=short", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
        options += ["-W", "ignore", "-o", "log_cli=false", *args.pytest]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        subprocess.run(command, cwd=root, env=env, check=False)
        found: dict[str, tuple[str, str]] = {}
        for line in record.read_text(encoding="utf-8").splitlines():
            test, outcome, text = json.loads(line)
            if found.get(test, ("",))[0] != "failed":
                found[test] = (outcome, text)
    return found


COLUMNS = ("passed", "failed", "failed without Tiercel too", "skipped", "left out")


def rows(args: argparse.Namespace, counts: dict[str, collections.Counter[str]]) -> dict[str, str]:
    """A line of the page for each model."""
    import torch

    import tiercel

    sources = (args.transformers / "src/transformers/__init__.py").read_text(encoding="utf-8")
    version = next(s.split('"')[1] for s in sources.splitlines() if s.startswith("__version__"))
    facts = (
        version,
        torch.__version__,
        platform.python_version(),
        tiercel.__version__,
        args.device,
    )
    return {
        model: f"| {' | '.join([model, *facts, *(str(found[c]) for c in COLUMNS)])} |"
        for model, found in counts.items()
    }


def page(new: dict[str, str]) -> str:
    """The committed result: new lines, and those of models that were not run."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    known = {line.split()[1]: line for line in lines if line.startswith("| ")}
    known = {model: line for model, line in (known | new).items() if model in MODELS}
    head = ("model", "transformers", "torch", "Python", "Tiercel", "device", *COLUMNS)
    lines = [
        "# transformers' own tests with Tiercel's attention",
        "",
        "Written by `tests/integrations/run_transformers_tests.py --write`; do not edit.",
        "transformers itself skips slow tests, and those that need a network, another attention",
        "library or several devices.",
        "",
        f"| {' | '.join(head)} |",
        "| --- |" + " --- |" * 5 + " ---: |" * len(COLUMNS),
        *(known[model] for model in MODELS if model in known),
        "",
        "## Left out",
        "",
    ]
    for reason, patterns in left_out().items():
        lines.append(f"- {reason}: {', '.join(f'`{pattern}`' for pattern in patterns)}")
    return "\n".join(lines) + "\n"


def tests_of(args: argparse.Namespace) -> Iterator[str]:
    for model in args.models.split(","):
        path = f"tests/models/{model}/test_modeling_{model}.py"
        if not (args.transformers / path).is_file():
            sys.exit(f"{args.transformers} has no {path}")
        yield path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transformers", type=Path, required=True, help="a checkout")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("pytest", nargs="*", help="options of pytest, after --")
    args = parser.parse_args()
    found = run(args, "tiercel", list(tests_of(args)))
    failed = [test for test, (outcome, _) in found.items() if outcome == "failed"]
    own = run(args, "own", failed) if failed else {}
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    ours = 0
    for test, (outcome, text) in found.items():
        if outcome == "failed" and own.get(test, ("",))[0] != "passed":
            outcome = "failed without Tiercel too"
        elif outcome == "failed":
            ours += 1
            print(f"FAILED {test}\n    {text}")
        counts[test.split("/")[2]][outcome] += 1
    new = rows(args, counts)
    print(*new.values(), sep="\n")
    if args.write:
        PAGE.write_text(page(new), encoding="utf-8")
    return int(ours > 0 or not found)


if __name__ == "__main__":
    sys.exit(main())
