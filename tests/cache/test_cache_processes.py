# SPDX-License-Identifier: Apache-2.0
"""The cache between processes, some of which are killed."""

import os
import random
import signal
import time

import pytest

from tiercel.cache import Cache

ROUNDS, PROCESSES = 40, 8  # on each Python
CONTENT = bytes(range(256)) * 40


def fork(work):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Round:
    """What happened to one key."""

    def __init__(self, folder, number):
        self.fields = {"round": number}
        self.folder = folder / f"round{number}"
        self.folder.mkdir()

    def note(self, what):
        descriptor = os.open(self.folder / what, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, b".")
        os.close(descriptor)

    def count(self, what):
        path = self.folder / what
        return path.stat().st_size if path.exists() else 0

    def is_first(self):
        try:
            os.close(os.open(self.folder / "first", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def test_one_compile_a_key_though_its_builder_is_killed_half_way(tmp_path):
    for number in range(ROUNDS):
        this = Round(tmp_path, number)

        def build(path, this=this):
            this.note("started")
            with path.open("wb") as file:
                file.write(CONTENT[:5000])
                file.flush()
                if this.is_first():
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.002)
                file.write(CONTENT[5000:])
            this.note("finished")

        def ask(this=this, build=build):
            store = Cache(tmp_path / "cache", 1 << 30)
            assert store.read_or_build(this.fields, build) == CONTENT

        codes = [wait(pid) for pid in [fork(ask) for _ in range(PROCESSES)]]
        assert sorted(codes) == [-signal.SIGKILL] + [0] * (PROCESSES - 1)
        assert (this.count("started"), this.count("finished")) == (2, 1)
    check_whole(tmp_path / "cache", ROUNDS)


def test_killed_anywhere(tmp_path):
    """At any moment, the rename and the clean-up included; entries come and go meanwhile."""
    choose = random.Random(1)
    deadline = time.monotonic() + 15
    killed = 0
    for number in range(ROUNDS):
        keys = [{"key": choose.randrange(6)} for _ in range(PROCESSES)]

        def ask(fields):
            store = Cache(tmp_path / "cache", 3 * len(CONTENT), spare=0)
            for _ in range(3):
                content = store.read_or_build(fields, lambda path: path.write_bytes(CONTENT))
                assert content == CONTENT

        pids = [fork(lambda fields=fields: ask(fields)) for fields in keys]
        time.sleep(choose.random() * 0.02)
        victims = choose.sample(pids, 3)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert {wait(pid) for pid in pids if pid not in victims} == {0}
        codes = [wait(pid) for pid in victims]
        assert set(codes) <= {0, -signal.SIGKILL}
        killed += codes.count(-signal.SIGKILL)
        if number % 10 == 0:
            check_whole(tmp_path / "cache")
        if time.monotonic() > deadline:
            break
    assert killed > 10
    check_whole(tmp_path / "cache")


def check_whole(folder, count=None):
    """No entry is damaged, and nothing is left behind that stays."""
    store = Cache(folder, 1 << 30)
    assert store.prune() == 0
    assert [*folder.glob("v*/making/*"), *folder.glob("v*/locks/*")] == []
    for entry in store.entries():
        assert (entry.path / "data").read_bytes() == CONTENT
    assert count is None or len(store.entries()) == count


def test_a_waiting_process_can_be_interrupted(tmp_path):
    store = Cache(tmp_path / "cache", 1 << 20)

    def hold():
        store.get_or_build({"a": 1}, lambda path: (tmp_path / "held").touch() or time.sleep(60))

    holder = fork(hold)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)

    def ask():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        (tmp_path / "asking").touch()
        with pytest.raises(KeyboardInterrupt):
            store.get_or_build({"a": 1}, lambda path: path.touch())

    waiting = fork(ask)
    while not (tmp_path / "asking").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(waiting, signal.SIGINT)
    assert wait(waiting) == 0
    # Other keys go on meanwhile.
    assert store.read_or_build({"a": 2}, lambda path: path.write_bytes(b"x")) == b"x"
    assert store.clear() == 1  # the one that is being built is left alone
    os.kill(holder, signal.SIGKILL)
    wait(holder)
    assert store.read_or_build({"a": 1}, lambda path: path.write_bytes(b"x")) == b"x"


def test_a_fork_while_building_does_not_release_the_lock(tmp_path):
    """A build may fork; the child that leaves first must not let others in."""
    store = Cache(tmp_path / "cache", 1 << 20)
    calls = tmp_path / "calls"
    calls.mkdir()

    def build(path):
        (calls / str(os.getpid())).touch()
        assert wait(fork(lambda: None)) == 0
        time.sleep(0.1)
        path.write_bytes(b"x")

    pids = [fork(lambda: store.read_or_build({"a": 1}, build)) for _ in range(3)]
    assert [wait(pid) for pid in pids] == [0, 0, 0]
    assert len(list(calls.iterdir())) == 1
