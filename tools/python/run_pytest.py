# SPDX-License-Identifier: Apache-2.0
"""Make a virtual environment with a wheel in it, then run pytest there.

    run_pytest.py [--wheel WHEEL] [--packages FOLDER ...] --pip PIP_WHEEL -- PYTEST_ARGUMENTS

Nothing comes from the network or from the user's own settings.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheel", type=pathlib.Path)
    parser.add_argument("--packages", action="append", type=pathlib.Path, default=[])
    parser.add_argument("--pip", type=pathlib.Path, required=True)
    parser.add_argument("pytest", nargs="+")
    args = parser.parse_args()

    scratch = pathlib.Path(os.environ.get("TEST_TMPDIR") or tempfile.mkdtemp())
    unset = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") and k not in unset}
    env.update(HOME=str(scratch / "home"), PYTHONDONTWRITEBYTECODE="1")
    env.setdefault("OMP_NUM_THREADS", "1")  # Bazel runs a test on each CPU
    (scratch / "home").mkdir(exist_ok=True)
    venv = scratch / "venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", venv], check=True, env=env)
    python = venv / "bin" / "python"
    site = next(venv.glob("lib/python*/site-packages"))
    if args.wheel:
        command = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--disable-pip-version-check", "--no-cache-dir", "--no-compile", args.wheel]
        subprocess.run(command, check=True, env=env | {"PYTHONPATH": str(args.pip.absolute())})
    # Absolute paths without resolving links: a package's files are links side by side.
    (site / "packages.pth").write_text("".join(f"{p.absolute()}\n" for p in args.packages))
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    if xml := os.environ.get("XML_OUTPUT_FILE"):
        command.append(f"--junitxml={xml}")
    return subprocess.run([*command, *args.pytest], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
