# SPDX-License-Identifier: Apache-2.0
"""The near end: starts the system's ssh, sends the agent and the job, takes what comes back."""

from __future__ import annotations

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tiercel.deploy import DeployError, agent

_START = (
    "import sys; n = int(sys.stdin.buffer.readline()); "
    "exec(compile(sys.stdin.buffer.read(n), 'agent', 'exec'), {'__name__': 'tiercel_agent'})"
)
_GRACE_S = 10.0


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
            said = seen.decode(errors="replace").strip()
            if status == 255:
                raise DeployError("ssh did not connect; its message is above")
            if status == 127:
                raise DeployError("there is no such Python at the other end: name one by --python")
            raise DeployError(f"the other end stopped with status {status}. {said}".strip())
        seen += byte
        if len(seen) > 1 << 20:
            raise DeployError("the other end's login scripts print without end")
    kind, data = _message(process.stdout)
    assert kind == agent.HELLO
    there: dict[str, str] = json.loads(data)
    return there


def _message(stream: IO[bytes]) -> tuple[bytes, bytes]:
    head = stream.read(9)
    if len(head) < 9:
        raise EOFError
    data = stream.read(struct.unpack(">Q", head[1:])[0])
    return head[:1], data


def _follow(process: subprocess.Popen[bytes], output: Callable[[bytes], Any]) -> Outcome:
    assert process.stdout is not None
    results = None
    while True:
        try:
            kind, data = _message(process.stdout)
        except EOFError:
            raise DeployError(
                "the connection was lost; the other end cleans up by itself"
            ) from None
        if kind == agent.OUTPUT:
            output(data)
        elif kind == agent.RESULT:
            results = data
        elif kind == agent.FAILED:
            raise DeployError(f"at the other end: {data.decode(errors='replace')}")
        elif kind == agent.END:
            return Outcome(int(data), results)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closing its input makes the agent stop and clean up; ssh ends when it is done."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.stdout.read()  # what is still on its way, so that it can end
        process.wait(_GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()
        process.wait()


def save(results: bytes, folder: Path) -> list[Path]:
    """Writes the results' files into a folder; nothing of theirs gets out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with tarfile.open(fileobj=io.BytesIO(results)) as archive:
        for member in archive:
            parts = Path(member.name).parts[1:]
            source = archive.extractfile(member) if member.isreg() else None
            if source is None or not parts or ".." in parts:
                continue
            path = folder.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read())
            written.append(path)
    return written


def show(data: bytes) -> None:
    sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()
