# SPDX-License-Identifier: Apache-2.0
"""`tiercel deploy` against a real sshd: the wheel over, doctor and smoke there, results back."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import sshd

from tiercel.workbench.deploy import DeployError, job, session

WHEEL = Path(os.environ.get("WHEEL", "dist")).absolute()
BACKEND = """
import tiercel
import torch


def mine(scores, k, softmax_first, renormalize, indices_dtype):
    return tiercel.ref.topk_softmax(
        scores, k, softmax_first=softmax_first, renormalize=renormalize, indices_dtype=indices_dtype
    )


tiercel.backends.register(
    op="topk_softmax", name="mine", fn=mine, description="a test's", language="torch"
)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = sshd.Server(tmp_path_factory.mktemp("sshd"))
    yield made
    made.stop()


@pytest.fixture
def command(server, tmp_path):
    """command(*words): the arguments of a `tiercel deploy` to the server."""
    python = tmp_path / "python"  # this interpreter, with its packages, whatever the shell's PATH
    paths = os.pathsep.join(path for path in sys.path if path)
    python.write_text(f"#!/bin/sh\nPYTHONPATH='{paths}' exec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)

    def make(*words, ssh=server.address):
        return [sys.executable, "-m", "tiercel", "deploy", "--ssh", ssh, "--wheel", str(WHEEL),
                "--python", str(python), *words]  # fmt: skip

    return make


@pytest.fixture
def environment(server, tmp_path):
    """With an `ssh` on PATH that is the system's own, with the configuration for the server."""
    folder = tmp_path / "bin"
    folder.mkdir()
    ssh = folder / "ssh"
    real = server.environment["PATH"]
    ssh.write_text(f"#!/bin/sh\nPATH='{real}' exec {' '.join(server.ssh)} \"$@\"\n")
    ssh.chmod(0o755)
    return dict(server.environment, PATH=f"{folder}:{real}")


def run(words, environment, cwd, **options):
    return subprocess.run(
        words, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, **options
    )


def test_doctor_and_smoke_there_and_results_back(command, environment, server, tmp_path):
    (tmp_path / "mine.py").write_text(BACKEND)
    words = command("--backends", "mine.py", "--save", "results")
    done = run(words, environment, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== tiercel doctor" in done.stdout and "To run the precompiled kernels" in done.stdout
    assert "topk_softmax  mine     torch     100.0 %" in done.stdout
    report = json.loads((tmp_path / "results/doctor.json").read_text())
    assert report["tiercel"] and report["checks"]
    lines = (tmp_path / "results/smoke.jsonl").read_text().splitlines()
    assert any(json.loads(line)["backend"] == "mine" for line in lines)
    assert server.left() == []


def test_by_the_name_of_ssh_s_configuration(command, environment, server, tmp_path):
    words = command("--bench", "--suite none-such", ssh="box")
    done = run(words, environment, tmp_path)
    assert done.returncode == 1  # what failed there fails here
    assert "== tiercel bench --suite none-such" in done.stdout
    assert not list(tmp_path.glob("tiercel-deploy-*")) and server.left() == []


def test_what_is_kept_is_kept(command, environment, server, tmp_path):
    kept = tmp_path / "kept there"
    (tmp_path / "mine.py").write_text(BACKEND)
    done = run(command("--backends", "mine.py", "--keep", str(kept)), environment, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (kept / "site/tiercel/__init__.py").exists() and f"PYTHONPATH={kept}/site" in done.stdout


SLEEPER = "import time, tiercel\nprint('asleep', flush=True)\ntime.sleep(600)\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_it_cleans_up(command, environment, server, tmp_path, number):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    process = subprocess.Popen(
        command("--backends", "sleeper.py"),
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if "== tiercel smoke" in line:
            break
    assert server.left() != []
    time.sleep(1)
    assert _processes() != []
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert number != signal.SIGINT or "interrupted" in error
    for _ in range(100):
        if server.left() == [] and _processes() == []:
            break
        time.sleep(0.2)
    assert server.left() == [] and _processes() == []


def _processes():
    """Those in a folder that deploy made."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if "/tiercel-deploy-" in (where := os.readlink(path)):
                found.append(where)
    return found


def test_an_unknown_host_key_is_refused(command, environment, server, tmp_path):
    known = server.folder / "known_hosts"
    kept = known.read_text()
    known.write_text("")
    try:
        done = run(command(), environment, tmp_path)
    finally:
        known.write_text(kept)
    assert done.returncode == 2
    assert "Host key verification failed" in done.stderr and "did not connect" in done.stderr


def test_no_such_python(command, environment, tmp_path):
    words = command("--python", "/nonexistent/python3")
    done = run(words, environment, tmp_path)
    assert done.returncode == 2 and "no such Python at the other end" in done.stderr


def test_a_wheel_for_another_python(command, environment, tmp_path):
    (tmp_path / "tiercel-0.1.0-cp39-cp39-manylinux_2_34_x86_64.whl").touch()
    done = run([*command(), "--wheel", str(tmp_path)], environment, tmp_path)
    assert done.returncode == 2 and "no wheel for cp3" in done.stderr and "cp39" in done.stderr


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("box", "box", None),
        ("me@box:2222", "me@box", 2222),
        ("me@[::1]:22", "me@::1", 22),
        ("10.0.0.1", "10.0.0.1", None),
    ],
)
def test_addresses(text, host, port):
    assert session.Target.parse(text) == session.Target(host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "-oProxyCommand=x",
        "me@",
        "box:x",
        "me@-x",
        "box:0",
        "box:65536",
        "box:" + "9" * 5000,
    ],
)
def test_what_is_no_address(text):
    with pytest.raises(DeployError, match="is not"):
        session.Target.parse(text)


THERE = {
    "tag": "cp312",
    "python": "3.12.3",
    "machine": "linux x86_64",
    "libc": "glibc 2.36",
    "host": "h",
}


def test_the_newest_fitting_wheel(tmp_path):
    for number, name in enumerate(("0.1.0-cp312", "0.2.0-cp312", "0.3.0-cp311")):
        path = tmp_path / f"tiercel-{name}-x.whl"
        path.touch()
        os.utime(path, (number, number))
    assert job.choose_wheel([tmp_path], THERE).name == "tiercel-0.2.0-cp312-x.whl"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"machine": "linux aarch64"}, "has linux aarch64"),
        ({"libc": "glibc 2.31"}, "has 2.31"),
        ({"tag": "cp314"}, "no wheel for cp314"),
    ],
)
def test_a_machine_that_no_wheel_fits(tmp_path, change, text):
    with pytest.raises(DeployError, match=text):
        job.choose_wheel([tmp_path], THERE | change)


def test_the_steps():
    assert [s["words"][:3] for s in job.steps(job.Work(), {})][-1] == ["-m", "tiercel", "smoke"]
    work = job.Work(bench="--suite full --op 'a b'", tune="linear --quick")
    titles = [step["title"] for step in job.steps(work, {})]
    assert titles[-2:] == ["tiercel bench --suite full --op 'a b'", "tiercel tune linear --quick"]
    assert "tiercel smoke" not in titles
    bench, tune = (step["words"] for step in job.steps(work, {})[-2:])
    assert "a b" in bench and bench[-2:] == ["--out", "out/bench.jsonl"]
    assert tune[2:] == ["tune", "linear", "--quick", "--output", "out/results.json"]


def test_a_talkative_login_script_and_a_lost_connection(tmp_path):
    fake = tmp_path / "ssh"
    hello = json.dumps(THERE).encode()
    message = b"Welcome!\n\ntiercel-deploy-1\nh" + struct.pack(">Q", len(hello)) + hello
    (tmp_path / "said").write_bytes(message)
    fake.write_text(f"#!/bin/sh\ncat {tmp_path}/said\n")
    fake.chmod(0o755)
    seen = []
    with pytest.raises(DeployError, match="connection was lost"):
        session.run([str(fake)], lambda there: seen.append(there) or b"", lambda data: None)
    assert seen == [THERE]


def test_ssh_is_not_there():
    with pytest.raises(DeployError, match="does not start"):
        session.run(["/nonexistent/ssh"], lambda there: b"", lambda data: None)
