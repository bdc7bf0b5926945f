# SPDX-License-Identifier: Apache-2.0
"""`tiercel doctor --log` on lines that somebody wrote to keep it busy, or to command a terminal."""

import itertools
import re
import signal
import subprocess
import sys
import time

import pytest

try:
    from re import _parser as parser
except ImportError:  # Python 3.10
    import sre_parse as parser

from tiercel.workbench.doctor import logs

LINE = 8192
SECONDS = 1.0  # of processor time for a line of LINE letters; a linear pattern takes milliseconds
ANYTHING = "\0"


def expand(items, most=4000):
    """The texts that a parsed pattern stands for, with ANYTHING for what is not one letter."""
    texts = [""]
    for code, value in items:
        name = str(code)
        if name == "LITERAL":
            more = [chr(value)]
        elif name == "BRANCH":
            more = [text for branch in value[1] for text in expand(branch)]
        elif name == "SUBPATTERN":
            more = expand(value[3])
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, _, inner = value
            more = expand(inner) if least else ["", *expand(inner)]
        elif name in ("AT", "ASSERT", "ASSERT_NOT"):
            more = [""]
        else:
            more = [ANYTHING]
        texts = [text + piece for text in texts for piece in more]
        assert len(texts) <= most
    return texts


TEXTS = {kind.name: expand(parser.parse(kind.pattern)) for kind in logs._KINDS}


@pytest.fixture
def in_time():
    """(function) -> its result, if it does not take more than SECONDS of the processor."""

    def stop(*_):
        raise AssertionError("it took too long")

    before = signal.signal(signal.SIGVTALRM, stop)

    def run(function):
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            return function()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    yield run
    signal.signal(signal.SIGVTALRM, before)


def hostile(texts):
    """Each beginning of a text repeated, and followed by much of what may follow."""
    lines = set()
    for text in texts:
        pieces = [piece for piece in text.split(ANYTHING) if piece]
        for end in range(1, len(pieces) + 1):
            begun = "".join(pieces[:end])
            lines.add((begun * LINE)[:LINE])
            lines.update((piece * LINE)[:LINE] for piece in pieces[:end])
            lines.add(" ".join([begun] * (LINE // (len(begun) + 1))))
            lines.update(begun + filler * (LINE - len(begun)) for filler in "a1 .-'/(")
        for one, two in itertools.permutations(pieces, 2):
            lines.add((one * LINE)[: LINE // 2] + (two[:-1] * LINE)[: LINE // 2])
    return sorted(lines)


@pytest.mark.parametrize("name", TEXTS)
def test_no_line_keeps_a_pattern_busy(monkeypatch, in_time, name):
    monkeypatch.setattr(logs, "_PATTERNS", [p for p in logs._PATTERNS if p[0].name == name])
    for line in hostile(TEXTS[name]):
        in_time(lambda line=line: logs.diagnose([line]))


def test_no_repetition_is_without_a_bound():
    def bounded(items):
        for code, value in items:
            if str(code) in ("MAX_REPEAT", "MIN_REPEAT"):
                assert value[1] <= 400, value
                bounded(value[2])
            elif str(code) == "BRANCH":
                for branch in value[1]:
                    bounded(branch)
            elif str(code) == "SUBPATTERN":
                bounded(value[3])

    for kind in logs._KINDS:
        bounded(parser.parse(kind.pattern))


@pytest.mark.parametrize("name", TEXTS)
def test_a_kind_s_words_are_in_whatever_its_pattern_fits(name):
    ((_, words, _),) = [p for p in logs._PATTERNS if p[0].name == name]
    for text in TEXTS[name]:
        assert any(word in text for word in words), text


@pytest.mark.parametrize("text", ["wgmma", "cicc", "error", "CUDA_ARCHITECTURES", "-gencode "])
def test_lines_that_took_minutes(in_time, text):
    in_time(lambda: logs.diagnose([(text * 100_000)[:100_000]]))


def test_a_line_without_end_is_read_in_pieces(tmp_path):
    path = tmp_path / "w.log"
    with path.open("w") as file:
        file.write("x" * (3 << 20) + "undefined symbol: _Z1f\n")
        file.write(
            "y" * 5000 + " undefined symbol: _Z1g " + "y" * 5000 + "\nNo space left on device"
        )
    with path.open() as file:
        found = logs.diagnose(logs.lines_of(file))
    assert [(f.name, f.line) for f in found] == [("undefined symbol", 2), ("disk full", 3)]


@pytest.mark.parametrize("at", range(3500, 4200, 20))
def test_what_lies_across_two_pieces_is_seen_once(at):
    (found,) = logs.diagnose(["x" * at + " No space left on device " + "y" * 9000])
    assert found.name == "disk full" and found.count == 1 and "No space" in found.seen


ESCAPES = (
    "x.cu:1: \x1b]0;owned\x07\x1b[2J\x1b[31merror: undefined symbol: "
    "\x1bP1\x1b\\f \x9b2J \u202e\r\n"
)


def test_escape_sequences_do_not_reach_the_terminal(tmp_path, capsys):
    path = tmp_path / "w.log"
    path.write_text(ESCAPES)
    command = [sys.executable, "-m", "tiercel", "doctor", "--log", str(path)]
    for more in ([], ["--json"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60)
        assert "undefined symbol" in done.stdout
        assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", done.stdout) == []


def test_colours_do_not_hide_a_line():
    """As gcc and ninja print on a terminal, and CI systems keep it."""
    line = (
        "\x1b[01m\x1b[Kmine.cu:3:10:\x1b[m\x1b[K \x1b[01;31m\x1b[Kfatal error: \x1b[m\x1b[K"
        "cutlass/cutlass.h: No such file or directory"
    )
    (found,) = logs.diagnose([line])
    assert found.name == "no CUTLASS headers" and "fatal error: cutlass/cutlass.h" in found.seen


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "w.log"
    path.write_bytes(b"\xff\xfe\x00 undefined symbol: f\n")
    command = [sys.executable, "-m", "tiercel", "doctor", "--log"]
    from_file = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=60)
    with path.open("rb") as file:
        piped = subprocess.run(
            [*command, "-"], stdin=file, capture_output=True, text=True, timeout=60
        )
    for done in (from_file, piped):
        assert done.returncode == 0 and "undefined symbol" in done.stdout


def test_an_ordinary_log_is_read_at_megabytes_a_second():
    line = "copying torch/utils/a.py -> build/lib.linux-x86_64-cpython-311/torch/utils/_a.py\n"
    start = time.process_time()
    assert logs.diagnose([line] * 50_000) == []
    assert time.process_time() - start < 10
