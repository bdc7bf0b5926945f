# SPDX-License-Identifier: Apache-2.0
"""Waits until the GPU tests have passed at a commit: ci/gpu_run.sh."""

import argparse
import pathlib
import sys

from checkout import Checkout
from github import GitHub
from shell import Failed, Shell


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ci/gpu_run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", help="default: the one that is checked out")
    parser.add_argument("--minutes", type=float, default=150, help="how long to wait at most")
    args = parser.parse_args(arguments)
    root = pathlib.Path.cwd()
    shell = Shell(root / "out" / "gpu_run.log", "gpu_run")
    try:
        commit = args.commit or Checkout(root, shell).commit()
        GitHub(root, shell).wait_for_gpu_run(commit, args.minutes)
    except Failed as error:
        shell.say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
