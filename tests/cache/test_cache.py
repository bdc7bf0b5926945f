# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled kernels, in one process."""

import json
import os
import threading
import time

import pytest

from tiercel import cache
from tiercel.cache import Cache, CacheError, folder, keys

FIELDS = {"kind": "test", "source": "x", "flags": ["-O3"]}


@pytest.fixture
def store(tmp_path):
    return Cache(tmp_path / "cache", limit=1 << 20)


def writes(content, calls=None):
    def build(path):
        if calls is not None:
            calls.append(path)
        path.write_bytes(content)

    return build


def never(path):
    raise AssertionError("built again")


def data_of(store):
    return next(store.folder.glob("v*/entries/*/*/data"))


def left_behind(store):
    return [*store.folder.glob("v*/making/*"), *store.folder.glob("v*/locks/*")]


def test_builds_once(store):
    calls = []
    path = store.get_or_build(FIELDS, writes(b"code", calls))
    assert path.read_bytes() == b"code"
    assert store.get_or_build(dict(reversed(FIELDS.items())), never) == path
    assert Cache(store.folder, 1 << 20).read_or_build(FIELDS, never) == b"code"
    assert store.get_or_build(FIELDS | {"flags": ["-O0"]}, writes(b"other")) != path
    assert len(calls) == 1 and left_behind(store) == []


def test_an_empty_file_is_a_result(store):
    assert store.read_or_build(FIELDS, writes(b"")) == b""
    assert store.read_or_build(FIELDS, never) == b""


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.write_bytes(data.read_bytes()[:-1]),
        lambda data: data.write_bytes(b""),
        lambda data: data.write_bytes(b"CODE"),
        lambda data: data.unlink(),
        lambda data: (data.parent / "about.json").write_text("{"),
        lambda data: (data.parent / "about.json").write_text("[]"),
        lambda data: (data.parent / "about.json").write_text("{}"),
        lambda data: (data.parent / "about.json").unlink(),
    ],
)
def test_a_damaged_entry_is_built_again(store, damage):
    store.get_or_build(FIELDS, writes(b"code"))
    damage(data_of(store))
    calls = []
    assert store.read_or_build(FIELDS, writes(b"code", calls)) == b"code"
    assert len(calls) == 1
    assert store.read_or_build(FIELDS, never) == b"code" and left_behind(store) == []


def test_an_entry_that_pretends_to_be_another_is_not_taken(store):
    store.get_or_build(FIELDS, writes(b"code"))
    other = cache.key_of({"other": 1})
    target = store.folder / f"v{keys.SCHEMA}" / "entries" / other[:2] / other
    target.parent.mkdir(exist_ok=True)
    data_of(store).parent.rename(target)
    assert store.read_or_build({"other": 1}, writes(b"right")) == b"right"


def test_a_failed_build_leaves_nothing(store):
    def fail(path):
        path.write_bytes(b"half")
        raise OSError("the compiler failed")

    with pytest.raises(OSError, match="the compiler failed"):
        store.get_or_build(FIELDS, fail)
    with pytest.raises(CacheError, match="the build of .*'kind': 'test'.* wrote no file to"):
        store.get_or_build(FIELDS, lambda path: path.mkdir())
    with pytest.raises(CacheError, match="wrote no file"):
        store.get_or_build(FIELDS, lambda path: None)
    assert store.entries() == [] and left_behind(store) == []
    assert store.read_or_build(FIELDS, writes(b"code")) == b"code"


def test_a_compilers_other_files_are_not_kept(store):
    def build(path):
        (path.parent / "deep").mkdir()
        (path.parent / "deep" / "a.ptx").write_text("x")
        (path.parent / "log").write_text("x")
        path.write_bytes(b"code")

    path = store.get_or_build(FIELDS, build)
    assert sorted(p.name for p in path.parent.iterdir()) == ["about.json", "data"]


def test_threads_build_once(store):
    calls, results = [], []

    def slow(path):
        calls.append(path)
        time.sleep(0.05)
        path.write_bytes(b"code")

    def work():
        results.append(store.read_or_build(FIELDS, slow))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and results == [b"code"] * 8


def test_the_folder_is_the_users_alone(store):
    os.umask(os.umask(0))  # whatever it is
    store.get_or_build(FIELDS, writes(b"code"))
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert data_of(store).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777, 0o720])
@pytest.mark.parametrize("part", [".", f"v{keys.SCHEMA}", f"v{keys.SCHEMA}/entries"])
def test_a_folder_that_others_can_write_is_refused(store, mode, part):
    store.get_or_build(FIELDS, writes(b"code"))
    (store.folder / part).chmod(mode)
    with pytest.raises(CacheError, match=f"is writable by others .mode {mode & 0o777:o}."):
        store.get_or_build(FIELDS, never)
    with pytest.raises(CacheError, match="chmod 700"):
        store.prune()


def test_a_folder_of_another_user_is_refused(store, monkeypatch):
    store.get_or_build(FIELDS, writes(b"code"))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CacheError, match="belongs to user .*, not to you .12345.*TIERCEL_CACHE"):
        store.get_or_build(FIELDS, never)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    store = Cache(tmp_path / "file" / "cache", 1)
    with pytest.raises(
        CacheError, match="cannot use the cache folder .*: Not a directory; set TIER"
    ):
        store.get_or_build(FIELDS, never)
    with pytest.raises(CacheError, match="File exists"):
        Cache(tmp_path / "file", 1).get_or_build(FIELDS, never)


def used_at(store, number, when):
    path = store.get_or_build({"n": number}, never)
    os.utime(path.parent / "about.json", (when, when))


def numbers(store):
    return sorted(int(entry.about()["fields"]["n"]) for entry in store.entries())


def test_the_least_recently_used_go_first(tmp_path):
    store = Cache(tmp_path / "cache", limit=6000, spare=0)
    for number in range(4):
        store.get_or_build({"n": number}, writes(bytes(1000)))
    now = time.time()
    for number, age in enumerate((300, 400, 100, 200)):
        used_at(store, number, now - age)
    store.get_or_build({"n": 1}, never)  # used: no longer the oldest
    store.get_or_build({"n": 4}, writes(bytes(1000)))
    store.get_or_build({"n": 5}, writes(bytes(1000)))
    assert numbers(store) == [1, 2, 4, 5]


def test_what_was_just_used_is_spared(tmp_path):
    store = Cache(tmp_path / "cache", limit=10)
    for number in range(5):
        store.get_or_build({"n": number}, writes(bytes(1000)))
    assert numbers(store) == [0, 1, 2, 3, 4]
    store.prune()
    assert numbers(store) == []


def test_one_larger_than_the_limit_is_kept_for_its_caller(tmp_path):
    store = Cache(tmp_path / "cache", limit=10, spare=0)
    assert len(store.read_or_build({"n": 1}, writes(bytes(1000)))) == 1000
    assert numbers(store) == [1]
    store.get_or_build({"n": 2}, writes(bytes(1000)))
    assert numbers(store) == [2]


def test_prune_and_clear(store):
    for number in range(4):
        store.get_or_build({"n": number}, writes(bytes(1000)))
    used_at(store, 2, time.time() - 10 * 86400)
    killed = store.folder / f"v{keys.SCHEMA}" / "making" / "0123abcd.x"
    killed.mkdir()
    (store.folder / f"v{keys.SCHEMA}" / "locks" / "0123abcd.lock").write_text("")
    (store.folder / "v0" / "entries").mkdir(parents=True)
    (store.folder / "of the user").write_text("")
    assert store.prune(unused_days=5) == 1 and numbers(store) == [0, 1, 3]
    assert left_behind(store) == [] and not (store.folder / "v0").exists()
    data_of(store).write_bytes(b"")
    assert store.prune() == 1
    used_at(store, numbers(store)[0], time.time() - 100)
    assert store.prune(limit=1500) == 1
    assert store.clear() == 1 and store.entries() == []
    assert (store.folder / "of the user").exists()
    assert Cache(store.folder / "none", 1).clear() == 0 and not (store.folder / "none").exists()


def test_keys_are_the_same_everywhere():
    fields = {"b": [1, 2.5, None, True], "a": {"é": "\udcff"}}
    known = "80aebf3e82479cb9"
    assert cache.key_of(fields) == cache.key_of(dict(reversed(fields.items())))
    assert cache.key_of(fields).startswith(known)


def test_keys_tell_values_apart():
    values = [1, True, "1", 1.0, None, "None", [1], {"a": 1}, [], {}, "", "a,b", ["a", "b"]]
    assert len({cache.key_of({"x": value}) for value in values}) == len(values)
    assert cache.key_of({"x": (1, 2)}) == cache.key_of({"x": [1, 2]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": b"1"}, r"fields\['x'\] is a bytes; use str, .*tiercel.cache.digest"),
        ({"x": [1, {"y": object()}]}, r"fields\['x'\]\[1\]\['y'\] is a object"),
        ({"x": {1: 2}}, r"fields\['x'\] has the key 1, which is no str"),
        ({"x": float("nan")}, r"fields\['x'\] is nan"),
        ({}, "there are no fields"),
        ("abc", "fields must be a dict, got str"),
    ],
)
def test_what_is_no_key(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        cache.key_of(fields)


def test_digest(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    assert cache.digest(tmp_path / "f") == cache.digest(b"abc") != cache.digest(b"abd")


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TIERCEL_CACHE_DIR", raising=False)
    assert folder.default_folder() == tmp_path / ".cache" / "tiercel" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert folder.default_folder() == tmp_path / ".cache" / "tiercel" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(folder.default_folder()) == "/x/tiercel/compiled"
    monkeypatch.setenv("TIERCEL_CACHE_DIR", "~/mine")
    assert folder.default_folder() == tmp_path / "mine"
    cache.get_or_build(FIELDS, writes(b"code"))
    assert (tmp_path / "mine" / "v1").is_dir()


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("2GiB", 2 << 30), ("1.5m", 3 << 19), ("500 MB", 500 << 20)]
)
def test_sizes(monkeypatch, text, size):
    monkeypatch.setenv("TIERCEL_CACHE_SIZE", text)
    assert folder.size_limit() == size


@pytest.mark.parametrize("text", ["lots", "-1", "1PB", "GB"])
def test_no_sizes(monkeypatch, text):
    monkeypatch.setenv("TIERCEL_CACHE_SIZE", text)
    with pytest.raises(CacheError, match=f"TIERCEL_CACHE_SIZE: '{text}' is no size such as 500MB"):
        cache.default()


def test_command(run_python, tmp_path):
    env = {"TIERCEL_CACHE_DIR": tmp_path / "c"}

    def tiercel(*args, check=True):
        code = f"import sys; from tiercel.cli import main; sys.exit(main({list(args)!r}))"
        return run_python(code, check=check, **env)

    assert "entries:  0" in tiercel("cache", "info").stdout
    assert not (tmp_path / "c").exists()
    store = Cache(tmp_path / "c", 1 << 20)
    for number in range(3):
        store.get_or_build({"kind": "test", "n": number}, writes(bytes(100)))
    out = tiercel("cache", "info", "--entries").stdout
    assert "entries:  3" in out and "of 2.0 GiB" in out and "kind=test, n=1" in out
    facts = json.loads(tiercel("cache", "info", "--entries", "--json").stdout)
    assert facts["entries"] == len(facts["list"]) == 3 and facts["limit"] == 2 << 30
    used_at_key = store.get_or_build({"kind": "test", "n": 0}, never)
    os.utime(used_at_key.parent / "about.json", (0, 0))
    assert "removed 1 of 3 entries" in tiercel("cache", "prune", "--days", "1").stdout
    assert "removed 2 of 2 entries, 0 B left" in tiercel("cache", "prune", "--size", "100").stdout
    store.get_or_build({"kind": "test", "n": 0}, writes(b""))
    assert "removed 1 of 1 entries" in tiercel("cache", "clear").stdout
    result = tiercel("cache", "prune", "--size", "big", check=False)
    assert result.returncode == 2 and "'big' is no size such as 500MB or 2GiB" in result.stderr
    (tmp_path / "c").chmod(0o777)
    for action in ("info", "clear", "prune"):
        result = tiercel("cache", action, check=False)
        assert result.returncode == 1 and result.stderr.startswith(
            "tiercel cache: the cache folder"
        )
        assert "Traceback" not in result.stderr
