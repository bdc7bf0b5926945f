# SPDX-License-Identifier: Apache-2.0
"""The near end: starts the system's ssh, sends the agent and the job, takes what comes back."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import re
import shlex
import signal
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tiercel._terminal import line, plain
from tiercel.workbench.deploy import DeployError, agent

_START = (
    "import sys; n = int(sys.stdin.buffer.readline()); "
    "exec(compile(sys.stdin.buffer.read(n), 'agent', 'exec'), {'__name__': 'tiercel_agent'})"
)
_GRACE_S = 30.0  # the other end may have a large folder to remove
_LOGIN_BYTES = 1 << 20  # that its login scripts may print
# The most bytes of a message, by its kind.
_MOST = {
    agent.HELLO: 1 << 16,
    agent.OUTPUT: 1 << 20,
    agent.FAILED: 1 << 16,
    agent.END: 64,
    agent.RESULT: len(agent.RESULTS) * (agent.MOST_BYTES + 1024) + (1 << 16),
}
_FACTS = ("tag", "python", "machine", "libc", "host")


@dataclass(frozen=True)
class Target:
    """``[user@]host[:port]``; everything else is in ssh's own configuration."""

    host: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        match = re.fullmatch(r"((?:[^@\s]+@)?(?:\[[^\]\s]+\]|[^:@\s\-][^:@\s]*))(?::(\d+))?", text)
        if match is None:
            raise DeployError(f"{text!r} is not [USER@]HOST[:PORT]")
        if match[2] and not (len(match[2]) <= 5 and 1 <= int(match[2]) <= 65535):
            raise DeployError(f"{text!r} is not [USER@]HOST[:PORT]: ports are 1 to 65535")
        return cls(match[1].replace("[", "").replace("]", ""), int(match[2]) if match[2] else None)


def command(target: Target, python: str) -> list[str]:
    port = ["-p", str(target.port)] if target.port is not None else []
    # Without a terminal, and told when the other end is gone.
    options = ["-T", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
    remote = f"{shlex.quote(python)} -uc {shlex.quote(_START)}"
    return ["ssh", *options, *port, "--", target.host, remote]


@dataclass
class Outcome:
    status: int
    results: bytes | None


def run(
    words: Sequence[str],
    make_payload: Callable[[dict[str, str]], bytes],
    output: Callable[[bytes], Any],
) -> Outcome:
    """Runs the job; `make_payload` gets what the other end says of itself.

    Raises:
        DeployError: No connection, no fitting Python, or the agent failed.
    """
    try:
        # Ctrl-C is ours to pass on, by closing its input.
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=_ignore_interrupts,
        )
    except OSError as error:
        raise DeployError(f"{words[0]} does not start: {error.strerror}") from None
    assert process.stdin is not None and process.stdout is not None
    try:
        source = Path(agent.__file__).read_bytes()
        _write(process, str(len(source)).encode() + b"\n" + source)
        there = _hello(process)
        made = make_payload(there)
        _write(process, struct.pack(">Q", len(made)) + made)
        return _follow(process, output)
    finally:
        _end(process)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # reading tells why


def _hello(process: subprocess.Popen[bytes]) -> dict[str, str]:
    assert process.stdout is not None
    seen = b""
    while not seen.endswith(agent.MAGIC):  # a login script may say something first
        byte = process.stdout.read(1)
        if not byte:
            status = process.wait()
            said = line(seen.decode(errors="replace"), 2000)
            if status == 255:
                raise DeployError("ssh did not connect; its message is above")
            if status == 127:
                raise DeployError("there is no such Python at the other end: name one by --python")
            raise DeployError(f"the other end stopped with status {status}. {said}".strip())
        seen += byte
        if len(seen) > _LOGIN_BYTES:
            raise DeployError("the other end's login scripts print without end")
    kind, data = _message(process.stdout)
    if kind != agent.HELLO:
        raise _unintelligible(f"a message of kind {kind!r} where it was to say what it is")
    try:
        there = json.loads(data)
        found = {name: there[name] for name in _FACTS}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _unintelligible("what it says of itself is incomplete") from None
    if not all(isinstance(text, str) and len(text) <= 200 for text in found.values()):
        raise _unintelligible("what it says of itself is no short text")
    return {name: line(text) for name, text in found.items()}


def _unintelligible(what: str) -> DeployError:
    return DeployError(f"the other end does not speak as tiercel deploy's agent does: {what}")


def _message(stream: IO[bytes]) -> tuple[bytes, bytes]:
    """(kind, data).

    Raises:
        DeployError: It is none, or the connection ended.
    """
    head = stream.read(9)
    if len(head) == 9:
        kind, size = head[:1], struct.unpack(">Q", head[1:])[0]
        if kind not in _MOST:
            raise _unintelligible(f"a message of kind {kind!r}")
        if size > _MOST[kind]:
            raise _unintelligible(f"a message of {size} bytes, at most {_MOST[kind]} are taken")
        data = stream.read(size)
        if len(data) == size:
            return kind, data
    raise DeployError("the connection was lost; the other end cleans up by itself")


def _follow(process: subprocess.Popen[bytes], output: Callable[[bytes], Any]) -> Outcome:
    assert process.stdout is not None
    results = None
    while True:
        kind, data = _message(process.stdout)
        if kind == agent.OUTPUT:
            output(data)
        elif kind == agent.RESULT:
            results = data
        elif kind == agent.FAILED:
            raise DeployError(f"at the other end: {line(data.decode(errors='replace'), 2000)}")
        elif kind == agent.END:
            if re.fullmatch(rb"-?\d{1,9}", data) is None:
                raise _unintelligible("it ended with no status")
            return Outcome(int(data), results)
        else:
            raise _unintelligible(f"a message of kind {kind!r} in the middle of its work")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closing its input makes the agent stop and clean up; ssh ends when it is done."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    # The rest is read, so that the other end can stop; it may go on without end.
    threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
    try:
        process.wait(_GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()
        process.wait()


def _drain(stream: IO[bytes]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while stream.read1(1 << 16):  # type: ignore[attr-defined]
            pass


def save(results: bytes, folder: Path) -> list[Path]:
    """Writes the results into a folder: the files that were asked for, and no others.

    Raises:
        DeployError: They are no results, or cannot be written.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(results), mode="r:") as archive:
            for member in archive:
                name = member.name.removeprefix("out/")
                # A sparse member may claim any size.
                if name not in agent.RESULTS or not member.isreg() or member.issparse():
                    continue
                if member.size > agent.MOST_BYTES:
                    raise _unintelligible(f"{name} of {member.size} bytes")
                source = archive.extractfile(member)
                assert source is not None
                found[name] = source.read()
    except (tarfile.TarError, EOFError, ValueError, OSError, OverflowError):
        raise _unintelligible("its results are no archive") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in found.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise DeployError(f"cannot write to {folder}: {error.strerror}") from None
    return [folder / name for name in found]


class Screen:
    """Shows what programs at the other end print, without letting it command the terminal."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, data: bytes) -> None:
        sys.stdout.write(plain(self._decoder.decode(data)))
        sys.stdout.flush()
