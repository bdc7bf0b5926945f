# SPDX-License-Identifier: Apache-2.0
"""`tiercel deploy` where one end means the other ill, or a folder is not its own; without sshd."""

import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tiercel.workbench.deploy import DeployError, agent, session

THERE = {
    "tag": "cp312",
    "python": "3.12.3",
    "machine": "linux x86_64",
    "libc": "glibc 2.36",
    "host": "h",
}
LIMIT_S = 60


def message(kind, data=b"", size=None):
    return kind + struct.pack(">Q", len(data) if size is None else size) + data


HELLO = message(b"h", json.dumps(THERE).encode())


@pytest.fixture
def other_end(tmp_path):
    """(what it says) -> the command that says it."""

    def make(said):
        (tmp_path / "said").write_bytes(said)
        fake = tmp_path / "ssh"
        fake.write_text(f"#!/bin/sh\ncat '{tmp_path}/said'\n")
        fake.chmod(0o755)
        return [str(fake)]

    return make


HOSTILE = {
    "nothing after its name": b"",
    "another first message": message(b"o", b"hello"),
    "an unknown kind": message(b"x", b"1"),
    "no JSON": message(b"h", b"{"),
    "JSON of another kind": message(b"h", b"[1]"),
    "JSON without end": message(b"h", b"[" * 60000),
    "facts that lack": message(b"h", b'{"tag": "cp312"}'),
    "facts that are no text": message(b"h", json.dumps(THERE | {"host": 1}).encode()),
    "facts that are long": message(b"h", json.dumps(THERE | {"host": "x" * 999}).encode()),
    "bytes that are no text": message(b"h", b"\xff\xfe"),
    "a name of 2**63 bytes": message(b"h", size=1 << 63),
    "an output of 2**40 bytes": HELLO + message(b"o", size=1 << 40),
    "results of 2**60 bytes": HELLO + message(b"r", size=1 << 60),
    "an end that is no number": HELLO + message(b"e", b"fine"),
    "an end of many digits": HELLO + message(b"e", b"9" * 60),
    "an unknown kind later": HELLO + message(b"z"),
    "a second hello": HELLO + HELLO,
    "half a message": HELLO + message(b"o", b"abc", size=100),
    "half a head": HELLO + b"o\0\0",
    "no end": HELLO + message(b"o", b"abc"),
}


@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_end_is_one_line(other_end, said):
    with pytest.raises(DeployError) as raised:
        session.run(other_end(agent.MAGIC + said), lambda there: b"", lambda data: None)
    text = str(raised.value)
    assert "the other end" in text and "\n" not in text and len(text) < 300


def test_what_it_prints_does_not_command_the_terminal(other_end, capsys):
    title = b"\x1b]0;owned\x07\x1b[2J\xc2\x9b31mred\r\nnext\x08\x7f \xe2\x80\xae"
    said = HELLO + message(b"o", title) + message(b"o", b"\xc3") + message(b"o", b"\xa9\n")
    there = []
    done = session.run(
        other_end(agent.MAGIC + said + message(b"e", b"0")),
        lambda facts: there.append(facts) or b"",
        session.Screen(),
    )
    shown = capsys.readouterr().out
    assert done.status == 0 and "red\nnext" in shown and shown.endswith("é\n")
    assert not [c for c in shown if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0]
    assert "\\x1b]0;owned\\x07" in shown and "\u202e" not in shown


def test_neither_do_its_name_and_its_errors(other_end):
    facts = THERE | {"host": "box\x1b[2J\nroot@box:~#", "python": "3.12\x07"}
    there = []
    said = message(b"h", json.dumps(facts).encode()) + message(b"f", b"bad \x1b[31m\nnews")
    with pytest.raises(DeployError, match=r"at the other end: bad \\x1b\[31m news"):
        session.run(
            other_end(agent.MAGIC + said), lambda f: there.append(f) or b"", lambda data: None
        )
    assert there[0]["host"] == "box\\x1b[2J root@box:~#" and there[0]["python"] == "3.12\\x07"


def test_a_login_script_s_escapes(other_end):
    with pytest.raises(DeployError, match=r"stopped with status 0. \\x1b\[2Jno"):
        session.run(other_end(b"\x1b[2Jno\n"), lambda there: b"", lambda data: None)


def archive(*members):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def test_only_the_files_that_were_asked_for_are_written(tmp_path):
    link = tarfile.TarInfo("out/bench.jsonl")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    results = archive(
        ("out/.bashrc", b"x"),
        ("out/.ssh/authorized_keys", b"x"),
        ("out/.git/hooks/pre-commit", b"x"),
        ("out/a.json", b"x"),
        ("out/deep/doctor.json", b"x"),
        ("out/../doctor.json", b"x"),
        ("/doctor.json", b"x"),
        ("out/results.json", b"{}"),
        ("out/smoke.jsonl", b"s"),
        (link, b""),
    )
    written = session.save(results, tmp_path / "here")
    assert sorted(path.name for path in written) == ["results.json", "smoke.jsonl"]
    assert sorted(path.name for path in (tmp_path / "here").rglob("*")) == [
        "results.json",
        "smoke.jsonl",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_results_that_claim_to_be_large(tmp_path):
    """A sparse member of 8 GiB takes 1.5 KB in the archive."""
    info = tarfile.TarInfo("out/bench.jsonl")
    info.size = 8 << 30
    with pytest.raises(DeployError, match="bench.jsonl of 8589934592 bytes"):
        session.save(info.tobuf(), tmp_path)
    sparse = tarfile.TarInfo("out/bench.jsonl")
    sparse.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "out/bench.jsonl",
        "GNU.sparse.realsize": str(8 << 30),
    }
    content = b"1\n0\n0\n".ljust(512, b"\0")
    sparse.size = len(content)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(sparse, io.BytesIO(content))
    assert session.save(made.getvalue(), tmp_path) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"x" * 2000, archive(("out/doctor.json", b"x" * 999))[:700]])
def test_results_that_are_no_archive(tmp_path, data):
    with pytest.raises(DeployError, match="its results are no archive"):
        session.save(data, tmp_path)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeployError, match="cannot write to .*file: (File exists|Not a directory)"):
        session.save(archive(("out/doctor.json", b"{}")), tmp_path / "file")


STEP = "open('out/doctor.json', 'w').write('{}'); open('out/more', 'w').write('secret')"


@pytest.fixture
def deploy(tmp_path):
    """(folder to keep) -> (outcome, output) of the real agent, here, as another user's home."""
    home = tmp_path / "home"
    home.mkdir()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("mine/__init__.py", "")
    job = {"wheel": "w.whl", "steps": [{"title": "one", "words": ["-c", STEP]}]}
    tar = archive(("w.whl", wheel.getvalue()), ("job.json", json.dumps(job).encode()))

    def run(folder):
        shown = []
        words = ["env", f"HOME={home}", sys.executable, "-uc", session._START]
        payload = json.dumps({"folder": folder}).encode() + b"\n" + tar
        done = session.run(words, lambda there: payload, shown.append)
        return done, b"".join(shown).decode()

    run.home = home
    return run


@pytest.mark.parametrize("folder", ["~", "{home}", "{home}/mine", "{home}/mine/"])
def test_a_folder_of_the_user_s_is_refused(deploy, folder):
    for place in (deploy.home, deploy.home / "mine"):
        for name in ("tmp/thesis.tex", "out/private_key", "site/x"):
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("precious")
    before = sorted(path for path in deploy.home.rglob("*"))
    with pytest.raises(DeployError, match="is not empty and was not made by tiercel deploy"):
        deploy(folder.format(home=deploy.home))
    assert sorted(path for path in deploy.home.rglob("*")) == before


def test_what_is_kept_is_its_own(deploy):
    folder = deploy.home / "new" / "kept"
    for _ in range(2):  # made, then used again
        done, _ = deploy(str(folder))
        assert done.status == 0 and (folder / "site/mine/__init__.py").exists()
        assert folder.stat().st_mode & 0o777 == 0o700 and not (folder / "run/tmp").exists()
        (folder / "tmp").mkdir(exist_ok=True)
        (folder / "tmp/thesis.tex").write_text("precious")
    assert (folder / "tmp/thesis.tex").exists()
    with tarfile.open(fileobj=io.BytesIO(done.results)) as tar:
        assert tar.getnames() == ["out/doctor.json"]  # nothing that no step was told to write


def test_an_empty_folder_will_do_and_one_that_others_can_write_not(deploy):
    (deploy.home / "empty").mkdir(mode=0o755)
    assert deploy(str(deploy.home / "empty"))[0].status == 0
    (deploy.home / "shared").mkdir()
    (deploy.home / "shared").chmod(0o777)
    with pytest.raises(DeployError, match="belongs to another user, or others can write to it"):
        deploy(str(deploy.home / "shared"))


def test_a_marker_that_is_a_link_is_none(deploy):
    folder = deploy.home / "f"
    folder.mkdir()
    (folder / "file").write_text("")
    (folder / agent.MARKER).symlink_to(folder / "file")
    with pytest.raises(DeployError, match="was not made by tiercel deploy"):
        deploy(str(folder))


def test_without_keep_nothing_is_left(deploy, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert deploy(None)[0].status == 0
    assert not list(tmp_path.glob("tiercel-deploy-*"))


def test_an_endless_end_is_left(tmp_path):
    """Output without end after an error does not keep this end waiting."""
    fake = tmp_path / "ssh"
    fake.write_bytes(b"#!/bin/sh\nprintf '\\ntiercel-deploy-1\\nx'\nexec yes\n")
    fake.chmod(0o755)
    code = (
        "from tiercel.workbench.deploy import session, DeployError\nsession._GRACE_S = 1.0\n"
        f"try: session.run([{str(fake)!r}], lambda there: b'', print)\n"
        "except DeployError as error: print(error)\n"
    )
    paths = os.pathsep.join(str(Path(path)) for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "does not speak" in done.stdout, done.stderr
