# SPDX-License-Identifier: Apache-2.0
"""The folders on the way to a path: whoever can write one can put another folder in its place."""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from pathlib import Path

_MOST_LINKS = 40  # as the system


def unsafe(path: Path) -> str | None:
    """Which folder above a path, or link on the way, others can change; None if there is none.

    The path itself is not looked at, nor what is beyond a folder that does not exist.

    Raises:
        OSError: A folder cannot be looked at.
    """
    here, left, links = "/", os.path.abspath(path).split("/"), 0
    trusted = (0, os.geteuid(), _overflow())
    while left:
        problem = _changeable(here, trusted)
        if problem is not None:
            return problem
        name = left.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            here = os.path.dirname(here)
            continue
        following = os.path.join(here, name)
        try:
            status = os.lstat(following)
        except FileNotFoundError:
            return None
        if not stat.S_ISLNK(status.st_mode):
            here = following
            continue
        links += 1
        if status.st_uid not in trusted or links > _MOST_LINKS:
            return f"{following} is another user's link"
        target = os.readlink(following)
        here = "/" if target.startswith("/") else here
        left = target.split("/") + left
    return None


def _changeable(folder: str, trusted: tuple[int, ...]) -> str | None:
    status = os.stat(folder)
    if status.st_uid not in trusted:
        return f"the folder {folder} belongs to user {status.st_uid}"
    if status.st_mode & stat.S_ISVTX or not status.st_mode & 0o022:
        return None  # where the bit is set, only owners rename and remove
    if status.st_mode & stat.S_IWOTH or not _is_private(status.st_gid):
        return f"the folder {folder} is writable by others (mode {status.st_mode & 0o777:o})"
    return None


@functools.cache
def _overflow() -> int:
    """The number that stands for users whom this container does not know, such as root's."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _is_private(group: int) -> bool:
    """True if a group has this user alone, as the groups that many systems create with a user."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    alone = not set(found.gr_mem) - {user.pw_name}
    return group == user.pw_gid and found.gr_name == user.pw_name and alone
