"""The user that jobs run as, where it is not the one who started the cluster. Linux, and for root alone.

The keeper stays root and forks; what it forked becomes that user before any line of the job's code runs.
"""

from __future__ import annotations

import ctypes
import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from stat import S_ISDIR

from pollux.errors import InvalidSpec

PR_SET_DUMPABLE = 4


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this machine, with all groups."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


def account_of(name: str, option: str = "--job-user") -> Account:
    """`InvalidSpec`: there is no such user, it is root, or we are not root and cannot become anybody."""
    if os.geteuid() != 0:
        fix = "Run this as root, or leave the option out: jobs then run as you"
        raise InvalidSpec(option, name, "only root can run jobs as another user", fix)
    try:
        found = pwd.getpwnam(name)
    except (KeyError, ValueError):
        fix = "Give one that `getent passwd` lists, or make it: useradd --system NAME"
        raise InvalidSpec(option, name, "is no user of this machine", fix) from None
    if found.pw_uid == 0:
        raise InvalidSpec(option, name, "is root, who may read everything", "Give a user without rights of its own")
    groups = tuple(os.getgrouplist(name, found.pw_gid))
    return Account(found.pw_name, found.pw_uid, found.pw_gid, groups, found.pw_dir, found.pw_shell)


def become(account: Account) -> None:
    """For good: no way leads back to root. Other processes of that user cannot look into this one.

    The kernel forbids that after a change of user, unless it is set up otherwise, until the process becomes another
    program: so neither memory nor environment of a forked replica is read by other jobs. Core dumps and debuggers of
    that user do not work on it, either; those of root do.
    """
    os.setgroups(account.groups)
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def give(folder: Path, account: Account) -> None:
    """Make the folder, and what is in it, this user's alone. `OSError` if that cannot be done.

    If it has it already, nothing in it is touched: what its owner puts there may lead us anywhere. So may links that
    an owner before has put there: they are given, not followed, and of files with several names nobody else's are.
    """
    before = folder.lstat().st_uid
    if before == account.uid:
        return
    for _, folders, files, at in os.fwalk(folder):
        for name in (*folders, *files):
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
            if found.st_uid == before and (found.st_nlink == 1 or S_ISDIR(found.st_mode)):
                os.chown(name, account.uid, account.gid, dir_fd=at, follow_symlinks=False)
    folder.chmod(0o700)
    os.chown(folder, account.uid, account.gid, follow_symlinks=False)


def unreachable(path: Path, account: Account) -> Path | None:
    """The first folder on the way to `path`, itself included, that this user may not pass; None: it gets there."""
    real = path.resolve()
    for folder in (*reversed(real.parents), real):
        if folder.exists() and not _can(account, partial(os.access, folder, os.X_OK)):
            return folder
    return None


def _can(account: Account, is_so: Callable[[], bool]) -> bool:
    """Asked in a process of that user: nobody but the kernel knows all rules."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            become(account)
            code = 0 if is_so() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0
