# SPDX-License-Identifier: Apache-2.0
"""Fetch the wheels of a lock file with pip, every one checked by its hash.

    fetch_wheels.py LOCK FOLDER PYTHON_VERSION

pip's own configuration says where packages come from. Fetches that break are tried again; what is
already in FOLDER is kept. Prints the progress, and one line on failure.
"""

import concurrent.futures
import pathlib
import subprocess
import sys
import tempfile

PARALLEL = 4
MOST = 8  # packages of one pip, whose start costs more than most downloads
NEWEST_GLIBC = 34  # manylinux_2_34; pip matches a platform exactly, so all older ones are named


def platform_options(version: str) -> list[str]:
    tag = "cp" + version.replace(".", "")
    options = ["--python-version", version, "--implementation", "cp"]
    for abi in (tag, "abi3", "none"):
        options += ["--abi", abi]
    for minor in range(NEWEST_GLIBC, 4, -1):
        options += ["--platform", f"manylinux_2_{minor}_x86_64"]
    for name in ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"):
        options += ["--platform", name]
    return options


def fetch(requirements: list[str], folder: pathlib.Path, version: str) -> str:
    """Fetches some requirements; returns "" or what went wrong."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
        lock.write("\n".join(requirements) + "\n")
        lock.flush()
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        command += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
        command += ["--progress-bar", "off", "--retries", "2", "--timeout", "20"]
        command += ["--quiet", "-d", str(folder), "-r", lock.name]
        result = subprocess.run(command + platform_options(version), capture_output=True, text=True)
    if result.returncode == 0:
        return ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
    return (errors or result.stderr.splitlines() or ["pip failed"])[-1]


def main() -> int:
    lock, folder, version = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    folder.mkdir(parents=True, exist_ok=True)
    size = min(MOST, -(-len(lines) // PARALLEL))
    batches = [lines[at : at + size] for at in range(0, len(lines), size)]
    there, failed = 0, []
    with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
        jobs = {pool.submit(fetch, batch, folder, version): batch for batch in batches}
        for job in concurrent.futures.as_completed(jobs):
            names = " ".join(line.split()[0] for line in jobs[job])
            there += len(jobs[job])
            print(f"{lock.stem}: {there} of {len(lines)}: {names}", file=sys.stderr, flush=True)
            if job.result():
                failed.append(f"pip could not fetch {names}: {job.result()}")
                pool.shutdown(cancel_futures=True)
                break
    if failed:
        print(failed[0], file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
