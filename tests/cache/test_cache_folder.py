# SPDX-License-Identifier: Apache-2.0
"""Where the cache's folder is not to be trusted, or its disk does not take it: what is said, and
how what is compiled does without."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from tiercel import cache
from tiercel.cache import Cache, CacheError, ancestors, folder, keys
from tiercel.cache import private as private_

FIELDS = {"kind": "test", "source": "x"}


def code(path):
    path.write_bytes(b"code")


def never(path):
    raise AssertionError("built again")


@pytest.fixture(autouse=True)
def _nothing_was_told(monkeypatch):
    monkeypatch.setattr(private_, "_told", set())
    monkeypatch.setattr(private_, "_caches", {})


@pytest.fixture
def no_private_group(monkeypatch):
    """Whoever runs the tests may have a group of their own."""
    monkeypatch.setattr(ancestors, "_is_private", lambda group: False)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o773, 0o722])
@pytest.mark.parametrize("above", [1, 2, 3])
def test_a_folder_above_that_others_can_write_is_refused(tmp_path, no_private_group, mode, above):
    place = tmp_path / "a" / "b" / "c" / "cache"
    store = Cache(place, 1 << 20)
    store.get_or_build(FIELDS, code)
    place.parents[above - 1].chmod(mode)
    text = f"the folder .* is writable by others .mode {mode:o}., so what is in the cache folder"
    with pytest.raises(CacheError, match=text):
        store.get_or_build(FIELDS, never)
    with pytest.raises(CacheError, match="set TIERCEL_CACHE_DIR to a folder of your own"):
        store.prune()
    place.parents[above - 1].chmod(mode | 0o1000)  # as /tmp: others cannot rename what is in it
    store.get_or_build(FIELDS, never)


def test_parents_are_made_for_the_user_alone(tmp_path):
    before = os.umask(0)
    try:
        Cache(tmp_path / "a" / "b" / "cache", 1 << 20).get_or_build(FIELDS, code)
    finally:
        os.umask(before)
    for name in ("a", "a/b", "a/b/cache", f"a/b/cache/v{keys.SCHEMA}/entries"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700


def test_the_users_own_group_may_write(tmp_path, monkeypatch):
    """Many systems make a group for each user and folders with the mode 775."""
    monkeypatch.setattr(ancestors, "_is_private", lambda group: True)
    store = Cache(tmp_path / "home" / "cache", 1 << 20)
    store.get_or_build(FIELDS, code)
    (tmp_path / "home").chmod(0o775)
    store.get_or_build(FIELDS, never)
    (tmp_path / "home").chmod(0o777)
    with pytest.raises(CacheError, match="is writable by others"):
        store.get_or_build(FIELDS, never)


class Entry:
    def __init__(self, **values):
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("name", "members", "group", "private"),
    [("me", [], 7, True), ("me", ["me"], 7, True), ("me", ["you"], 7, False),
     ("all", [], 7, False), ("me", [], 8, False)],
)  # fmt: skip
def test_which_group_is_the_users_alone(monkeypatch, name, members, group, private):
    monkeypatch.setattr(ancestors.pwd, "getpwuid", lambda uid: Entry(pw_name="me", pw_gid=7))
    found = Entry(gr_name=name, gr_mem=members)
    monkeypatch.setattr(ancestors.grp, "getgrgid", lambda gid: found)
    assert ancestors._is_private(group) is private


def test_folders_of_another_user_are_refused(tmp_path, monkeypatch):
    place = tmp_path / "a" / "cache"
    place.mkdir(parents=True)
    own = os.geteuid()
    real = os.stat

    def stat(path, *args, **kwargs):
        found = real(path, *args, **kwargs)
        if str(path) == str(tmp_path / "a"):
            return os.stat_result([*found[:4], own + 1, *found[5:]])
        return found

    monkeypatch.setattr(ancestors.os, "stat", stat)
    assert f"{tmp_path}/a belongs to user {own + 1}" in ancestors.unsafe(place)
    monkeypatch.undo()
    assert ancestors.unsafe(place) is None


def test_links_on_the_way(tmp_path, monkeypatch):
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "near").symlink_to("real/../real/sub")
    (tmp_path / "loop").symlink_to("loop")
    assert ancestors.unsafe(tmp_path / "link" / "cache") is None
    assert ancestors.unsafe(tmp_path / "near" / "cache") is None
    assert ancestors.unsafe(tmp_path / "loop" / "cache") is not None
    (tmp_path / "real").chmod(0o777)
    for name in ("link/sub/cache", "near/cache"):
        assert "real is writable by others" in ancestors.unsafe(tmp_path / name)
    (tmp_path / "real").chmod(0o700)
    real = os.lstat

    def lstat(path):
        found = real(path)
        if str(path).endswith("link"):
            return os.stat_result([*found[:4], os.geteuid() + 1, *found[5:]])
        return found

    monkeypatch.setattr(ancestors.os, "lstat", lstat)
    assert "link is another user's link" in ancestors.unsafe(tmp_path / "link" / "cache")


FAILURES = {
    errno.ENOSPC: "No space left on device; tiercel cache prune, df -h and df -i",
    errno.EDQUOT: "uota exceeded; tiercel cache prune",
    errno.EROFS: "Read-only file system; set TIERCEL_CACHE_DIR to a folder that can be written",
    errno.ENOLCK: "No locks available; this file system has no locks: set TIERCEL_CACHE_DIR",
    errno.EACCES: "Permission denied; set TIERCEL_CACHE_DIR to a folder of your own",
}


def fail(number):
    def function(*args, **kwargs):
        raise OSError(number, os.strerror(number), "somewhere")

    return function


@pytest.fixture(params=FAILURES)
def failing(request, monkeypatch):
    """What the system refuses: locks, or files where entries are made."""
    if request.param == errno.ENOLCK:
        monkeypatch.setattr(fcntl, "flock", fail(errno.ENOLCK))
    else:
        monkeypatch.setattr("tiercel.cache.store.tempfile.mkdtemp", fail(request.param))
    return FAILURES[request.param]


def test_what_the_disk_refuses_has_a_hint(tmp_path, failing):
    with pytest.raises(CacheError, match=f"cannot use the cache folder .*{failing}"):
        Cache(tmp_path / "c", 1 << 20).get_or_build(FIELDS, code)


def test_a_disk_that_fills_while_it_is_built(tmp_path):
    store = Cache(tmp_path / "c", 1 << 20)
    with pytest.raises(CacheError, match="No space left"):
        store.get_or_build(FIELDS, fail(errno.ENOSPC))
    with pytest.raises(PermissionError):  # of the build itself, as it is
        store.get_or_build(FIELDS, fail(errno.EACCES))
    assert store.entries() == []


def test_a_result_is_there_though_nothing_can_be_evicted(tmp_path, monkeypatch):
    store = Cache(tmp_path / "c", 1 << 20)
    monkeypatch.setattr(Cache, "_evict", fail(errno.EROFS))
    assert store.read_or_build(FIELDS, code) == b"code"


def test_what_is_compiled_does_without_it(tmp_path, monkeypatch):
    """A file where the cache's folder should be: as a read-only or full disk."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "file" / "c"))
    with pytest.warns(RuntimeWarning, match="Not a directory.*kept for this process alone") as told:
        path = cache.get_or_build(FIELDS, code)
    assert len(told) == 1 and Path(told[0].filename).name == Path(__file__).name
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert cache.get_or_build(FIELDS, never) == path and path.read_bytes() == b"code"
        assert cache.read_or_build(FIELDS, never) == b"code"
    assert path.stat().st_uid == os.geteuid()
    monkeypatch.setattr(private_, "_caches", {})
    monkeypatch.setattr(tempfile, "mkdtemp", fail(errno.ENOSPC))
    with pytest.raises(CacheError, match="Not a directory"):
        cache.read_or_build(FIELDS, code)


def test_a_wrong_setting_is_no_reason_to_do_without(monkeypatch):
    monkeypatch.setenv("TIERCEL_CACHE_SIZE", "lots")
    with pytest.raises(CacheError, match="is no size"):
        cache.read_or_build(FIELDS, code)


def test_what_was_kept_for_a_process_goes_with_it(tmp_path):
    (tmp_path / "file").write_text("")
    program = (
        "import os\nfrom tiercel import cache\n"
        "build = lambda path: path.write_bytes(b'x')\n"
        "path = cache.get_or_build({'a': 1}, build)\n"
        "if os.fork() == 0:\n    raise SystemExit\n"
        "os.wait()\nassert path.exists()\nprint(path)\n"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {"TIERCEL_CACHE_DIR": str(tmp_path / "file" / "c"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | env | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "T", "9999999999T", "1" * 19 + "K"])
def test_a_size_beyond_any_disk(monkeypatch, text):
    monkeypatch.setenv("TIERCEL_CACHE_SIZE", text)
    with pytest.raises(CacheError, match="TIERCEL_CACHE_SIZE: '.*' is no size such as") as raised:
        cache.default()
    assert len(str(raised.value)) < 120


def test_a_user_that_there_is_not(monkeypatch):
    monkeypatch.setenv("TIERCEL_CACHE_DIR", "~nosuchuser/cache")
    with pytest.raises(CacheError, match="TIERCEL_CACHE_DIR: there is no home of ~nosuchuser"):
        cache.default()


@pytest.mark.parametrize("holds", ["thesis.tex", "entries/thesis.tex", "entries/ab/../x.py", ""])
def test_prune_removes_no_folder_of_the_users(tmp_path, holds):
    store = Cache(tmp_path, 1 << 20)
    store.get_or_build(FIELDS, code)
    path = tmp_path / "v0" / holds
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious") if holds else path.mkdir(exist_ok=True)
    store.prune()
    store.clear()
    assert path.exists()


def test_prune_removes_an_earlier_version_s_and_follows_no_link(tmp_path):
    store = Cache(tmp_path / "c", 1 << 20)
    store.get_or_build(FIELDS, code)
    old = tmp_path / "c" / "v0"
    (old / "entries" / "ab" / ("ab" * 32)).mkdir(parents=True)
    (old / "locks").mkdir()
    (old / "locks" / ("ab" * 32 + ".lock")).write_text("")
    store.prune()
    assert not old.exists()
    (tmp_path / "other" / "entries").mkdir(parents=True)
    old.symlink_to(tmp_path / "other")
    store.prune()
    assert (tmp_path / "other" / "entries").exists()


def test_the_mode_of_a_shared_folder_is_not_ours_to_advise_on(tmp_path):
    for name, mode in (("tmp", 0o1777), ("shared", 0o777)):
        place = tmp_path / name
        place.mkdir()
        place.chmod(mode)
        if name == "shared":
            (place / "of another").write_text("")
        with pytest.raises(CacheError, match="set TIERCEL_CACHE_DIR to a folder of") as raised:
            folder.check(place)
        assert "chmod" not in str(raised.value)


def test_a_negative_age(tmp_path):
    store = Cache(tmp_path / "c", 1 << 20)
    store.get_or_build(FIELDS, code)
    for days in (-1, float("nan")):
        with pytest.raises(ValueError, match="unused_days must be at least 0"):
            store.prune(unused_days=days)
    assert len(store.entries()) == 1
