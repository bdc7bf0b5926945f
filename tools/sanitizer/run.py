# SPDX-License-Identifier: Apache-2.0
"""Runs tests under compute-sanitizer, and fails on what exceptions.json does not except.

    run.py --sanitizer PROGRAM --out FOLDER [--tools T ...] [--seconds N] [--jobs N] [--part K/N]
           [--kernels FILE] [--exceptions FILE] [--canary COMMAND]
           [--rootdir FOLDER] --paths PATH... -- PYTEST_COMMAND...

The tests are what PYTEST_COMMAND, which names no path, collects of these. Each process runs a few
of one file; its logs are FOLDER/TOOL/NAME.log (the tool's), .txt (pytest's) and .xml.
FOLDER/summary.json has the findings, FOLDER/result.txt a line a tool. A tool's first process is a
kernel with a mistake of that kind, which the tool has to report. Ends with 1 on an error, with 3
where the tools do not run at all.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parent))

import exceptions
import report
from verdict import Job, Outcome, judge

TESTS_A_PROCESS = 24
CANARY_SECONDS = 120
# PyTorch's cache of blocks hides overruns and what nothing has written since. A launch in which
# racecheck meets more pairs of accesses than its limit is not looked at to the end.
ENVIRONMENT = {
    "memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "initcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "racecheck": {"NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": "100000000"},
}
# Only our kernels are instrumented. Not so under initcheck, which has to see what others write, nor
# under memcheck: a kernel of PyTorch's that overruns a tensor of ours got it from us.
FILTERED = {"racecheck", "synccheck"}
# initcheck does not see what the copy engine writes (case store-by-engine in tests/sanitizer), and
# reports each thread that reads these tests' results. Their memory is filled with NaN instead: a
# value that nothing wrote makes the comparison fail.
FILLED = re.compile(r"attention/test_attention_|linear/test_mlp_gpu|moe/test_grouped_gemm_gpu")
CANARY = "tiercel_canary"
UNSUPPORTED = "compute-sanitizer does not support this machine"


class Ours:
    """Whose a kernel is, by the wheel's list of its kernels."""

    def __init__(self, path: pathlib.Path | None) -> None:
        listed = json.loads(path.read_text())["kernels"] if path else []
        self._dsl = {kernel["name"] for kernel in listed if kernel["language"] == "cute"}
        self._cuda = {kernel["name"].partition("<")[0] for kernel in listed}

    def __contains__(self, kernel: str) -> bool:
        if "tiercel" in kernel:
            return True
        name = report.readable(kernel)
        return re.sub(r"_\d+$", "", name) in self._dsl or name.partition("<")[0] in self._cuda

    def name(self, kernel: str) -> str:
        """The name that `tiercel kernels` prints: without the number that the DSL adds."""
        name = report.readable(kernel)
        without = re.sub(r"_\d+$", "", name)
        return without if without in self._dsl else name

    def dsl_words(self) -> list[str]:
        """The first words of the names that the DSL's kernels have."""
        return sorted({name.partition("_")[0] for name in self._dsl})

    def filters(self) -> list[str]:
        filters = ["--kernel-name", "kns=tiercel"]
        if words := self.dsl_words():
            filters += ["--kernel-name", f"regex=^({'|'.join(words)})_"]
        return filters


@dataclasses.dataclass
class Runner:
    options: argparse.Namespace
    ours: Ours
    rules: list[exceptions.Rule]
    environment: dict[str, str]

    def filters(self, tool: str) -> list[str]:
        left_out = [
            f"(?:{rule.kernel})" for rule in self.rules if rule.leave_out and rule.tool == tool
        ]
        words = self.ours.filters()
        if left_out:
            words += ["--kernel-name-exclude", f"regex=^({'|'.join(left_out)})(_[0-9]+)?$"]
        return words

    def tool_command(self, tool: str, log: pathlib.Path) -> list[str]:
        command = [self.options.sanitizer, "--tool", tool, "--log-file", str(log)]
        # The default limit, 100, would hide our findings behind others'.
        command += ["--print-limit", "200000", "--show-backtrace", "device"]
        command += ["--launch-timeout", "120"]  # several start at a time
        if tool in ("memcheck", "synccheck"):
            command += ["--destroy-on-device-error", "kernel"]  # the next test still can run
        return command + (self.filters(tool) if tool in FILTERED else [])

    def process(
        self, job: Job, command: list[str], seconds: float
    ) -> tuple[str, float, pathlib.Path]:
        """Runs it: why it did not end, its seconds, and its files' path without their ending."""
        stem = self.options.out / job.tool / job.name
        stem.parent.mkdir(parents=True, exist_ok=True)
        environment = self.environment | ENVIRONMENT.get(job.tool, {})
        if job.tool == "initcheck" and any(map(FILLED.search, job.tests)):
            environment["TIERCEL_TEST_FILL"] = "1"
        log = stem.with_suffix(".log")
        log.unlink(missing_ok=True)
        began = time.monotonic()
        with stem.with_suffix(".txt").open("w") as output:
            process = subprocess.Popen(
                [*self.tool_command(job.tool, log), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                process.wait(max(seconds, 1))
                problem = ""
            except subprocess.TimeoutExpired:
                problem = f"not done after {seconds:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # whatever it left behind
                process.wait()
        return problem, time.monotonic() - began, stem

    def read(self, outcome: Outcome, stem: pathlib.Path) -> None:
        """Adds what the tool's log says."""
        log = stem.with_suffix(".log")
        text = log.read_text(errors="replace") if log.exists() else ""
        said = stem.with_suffix(".txt").read_text(errors="replace")
        found = report.parse(text)
        if "Device not supported" in text + said:
            outcome.problem = UNSUPPORTED
        elif found.unseen is None and not outcome.problem:
            outcome.problem = "the log has no summary: " + (last_line(text) or last_line(said))
        elif found.unseen:
            outcome.problem = f"{found.unseen} findings more than the log has"
        for record in found.records:
            if record.kernel and outcome.job.tool != "memcheck" and record.kernel not in self.ours:
                outcome.foreign += 1
                continue
            kernel = self.ours.name(record.kernel) if record.kernel else ""
            outcome.findings[kernel, record.message] += 1

    def canary(self, tool: str) -> str:
        """Why the tool cannot be trusted here, or nothing."""
        names = [CANARY]
        if tool in FILTERED and (word := self.ours.dsl_words()):
            names.append(f"{word[0]}_canary")
        for name in names:
            job = Job(tool, f"canary-{name}", [])
            command = [*self.options.canary, tool, name]
            problem, seconds, stem = self.process(job, command, CANARY_SECONDS)
            outcome = Outcome(job, seconds, problem)
            log = stem.with_suffix(".log")
            text = log.read_text(errors="replace") if log.exists() else ""
            if not problem and any(r.kernel == name for r in report.parse(text).records):
                continue
            self.read(outcome, stem)
            why = outcome.problem or last_line(stem.with_suffix(".txt").read_text())
            return f"{tool} did not report the mistake of {name}: {why or 'no word of it'}"
        return ""

    def tests(self, job: Job, end: float) -> Outcome:
        seconds = end - time.monotonic()
        if seconds <= 0:
            return Outcome(job, 0.0, "not begun when the tool's time was up")
        xml_file = self.options.out / job.tool / f"{job.name}.xml"
        xml_file.unlink(missing_ok=True)
        command = [*self.options.pytest, f"--junitxml={xml_file}", *job.tests]
        problem, took, stem = self.process(job, command, seconds)
        outcome = Outcome(job, took, problem)
        self.read(outcome, stem)
        if xml_file.exists():
            tree = xml.etree.ElementTree.parse(xml_file)
            cases = list(tree.iter("testcase"))
            for case in cases:
                if case.find("failure") is not None or case.find("error") is not None:
                    file = case.get("classname").replace(".", "/")
                    outcome.failed.append(f"{file}.py::{case.get('name')}")
            if len(cases) < len(job.tests) and not outcome.problem:
                outcome.problem = f"{len(cases)} of {len(job.tests)} tests ran"
        elif not outcome.problem:
            said = stem.with_suffix(".txt").read_text(errors="replace")
            outcome.problem = "pytest did not end: " + last_line(said)
        return outcome


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def jobs_of(tool: str, tests: list[str], part: tuple[int, int]) -> list[Job]:
    """The k-th of n parts of the tests, cut into processes."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    jobs = []
    for file, inside in files.items():
        for i in range(0, len(inside), TESTS_A_PROCESS):
            path = pathlib.Path(file)
            name = f"{path.parent.name}-{path.stem}-{i // TESTS_A_PROCESS + 1}"
            jobs.append(Job(tool, name, inside[i : i + TESTS_A_PROCESS]))
    k, n = part
    return jobs[k - 1 :: n]


def collect(options: argparse.Namespace, environment: dict[str, str]) -> list[str]:
    command = [*options.pytest, "--collect-only", "--verbosity=-1", *options.paths]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    tests = [line for line in done.stdout.splitlines() if re.match(r"\S+\.py::", line)]
    if done.returncode or not tests:
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}sanitizers: no tests were collected")
    return [str(options.rootdir / test) for test in tests]


def parse_part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"a part is K/N with 1 <= K <= N, got {text!r}")
    return int(found[1]), int(found[2])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sanitizers", description=__doc__.splitlines()[0])
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a folder for logs")
    parser.add_argument("--tools", nargs="+", choices=exceptions.TOOLS, default=exceptions.TOOLS)
    parser.add_argument("--seconds", type=float, default=3600, help="the most for one tool")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--part", type=parse_part, default=(1, 1), help="K/N: the K-th of N parts")
    parser.add_argument("--kernels", type=pathlib.Path, help="the wheel's list of its kernels")
    parser.add_argument("--exceptions", type=pathlib.Path, default=exceptions.PATH)
    canary = [sys.executable, str(pathlib.Path(__file__).with_name("canary.py"))]
    parser.add_argument("--canary", type=shlex.split, default=canary, help="for tests of this file")
    parser.add_argument("--rootdir", type=pathlib.Path, default="tests", help="of the tests' ids")
    parser.add_argument("--paths", nargs="+", required=True, help="files and folders of tests")
    parser.add_argument("pytest", nargs="+", help="the command which runs tests")
    return parser.parse_args()


def run_tool(runner: Runner, tool: str, tests: list[str]) -> list[Outcome]:
    jobs = jobs_of(tool, tests, runner.options.part)
    count = sum(len(job.tests) for job in jobs)
    print(f"{tool}: {count} tests in {len(jobs)} processes", flush=True)
    outcomes = []
    if problem := runner.canary(tool):
        print(f"{tool}: {problem}", flush=True)
        outcomes.append(Outcome(Job(tool, "canary", []), 0.0, problem))
        if UNSUPPORTED in problem:
            return outcomes
    done = 0
    end = time.monotonic() + runner.options.seconds
    with concurrent.futures.ThreadPoolExecutor(runner.options.jobs) as pool:
        futures = [pool.submit(runner.tests, job, end) for job in jobs]
        for future in concurrent.futures.as_completed(futures):
            outcome = future.result()
            outcomes.append(outcome)
            done += 1
            said = [f"{len(outcome.job.tests)} tests", f"{outcome.seconds:.0f} s"]
            if outcome.findings:
                said.append(f"{sum(outcome.findings.values())} findings")
            if outcome.failed:
                said.append(f"{len(outcome.failed)} failed")
            if outcome.problem:
                said.append(outcome.problem)
            progress = f"{tool} {done}/{len(jobs)}"
            print(f"{progress} {outcome.job.name}: {', '.join(said)}", flush=True)
    return outcomes


def main() -> int:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.absolute()
    (options.out / "result.txt").unlink(missing_ok=True)
    try:
        rules = exceptions.load(options.exceptions)
    except ValueError as error:
        sys.exit(f"sanitizers: {error}")
    runner = Runner(options, Ours(options.kernels), rules, dict(os.environ))
    tests = collect(options, runner.environment)
    unsupported = failed = False
    summary: dict[str, dict] = {}
    for tool in options.tools:
        outcomes = run_tool(runner, tool, tests)
        verdict = judge(outcomes, rules)
        failed |= bool(verdict.errors)
        unsupported |= any(UNSUPPORTED in outcome.problem for outcome in outcomes)
        ran = sum(len(outcome.job.tests) for outcome in outcomes if not outcome.problem)
        foreign = sum(outcome.foreign for outcome in outcomes)
        words = [f"{ran} tests", f"{len(verdict.errors)} errors"]
        if verdict.excepted:
            words.append(f"{len(verdict.excepted)} excepted")
        if verdict.stale:
            words.append(f"{len(verdict.stale)} exceptions no longer occur")
        if foreign:
            words.append(f"{foreign} findings in others' kernels")
        summary[tool] = {"line": ", ".join(words), **dataclasses.asdict(verdict)}
        for title in ("errors", "excepted", "stale"):
            for line in summary[tool][title]:
                print(f"{tool}: {title}: {line}", flush=True)
        (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    lines = [
        f"{tool}: {'FAILED: ' if told['errors'] else ''}{told['line']}"
        for tool, told in summary.items()
    ]
    (options.out / "result.txt").write_text("".join(f"{line}\n" for line in lines))
    print("\n".join(lines))
    return 3 if unsupported else int(failed)


if __name__ == "__main__":
    sys.exit(main())
