"""The state folder of a daemon: all that it needs to find its replicas and jobs again after its own end.

token            proves who may talk to the daemon; made if absent. A copy, if several nodes share one that is elsewhere
lock             held by the one daemon that may use the folder
node.json        the node, and where the daemon listens
node.sock        the daemon's local socket
keeper.sock      the keeper's
boot_id          of the machine, when the daemon last started
exits/           how processes ended, as long as the daemon does not know it (`node.exits`)
node.log
jobs/JOB/run.json        the job, if it has its home here
jobs/JOB/replicas.json   its replicas on this node
jobs/JOB/experience.json what other jobs of its kind have measured, if its first replica is here, or was
jobs/JOB/logs/REPLICA.log
jobs/JOB/logs/REPLICA.start1 …  which process has it, made by that process (`node.claims`)

All of it is for its owner alone. Where jobs run as another user, that one may pass through the folders on its way to
the socket and to experience.json, which it may use, and read nothing else: see `admit`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pollux.core import JobId, NodeId
from pollux.errors import InvalidSpec, Permanent
from pollux.node import exits
from pollux.node.accounts import Account
from pollux.node.locks import hold, holder
from pollux.node.processes import began_at
from pollux.wire.credentials import PREFIX
from pollux.wire.frames import parse_address

PRIVATE, PASSABLE = 0o700, 0o711
"""Folders: for the owner alone; or others may pass through to what they know the name of, and may use."""


@dataclass(frozen=True, slots=True)
class NodeFile:
    """What node.json says of the daemon that runs, or ran, on a folder."""

    node: NodeId
    pid: int
    host: str
    port: int


class NodeFiles:
    """Where everything is. Making one touches nothing: it is also for those who only look."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.socket = self.path / "node.sock"
        self.log = self.path / "node.log"
        self.lock_file = self.path / "lock"
        self.token_copy = self.path / "token"

    @property
    def address(self) -> str:
        """Of the local socket."""
        return f"unix:{self.socket}"

    @property
    def daemon(self) -> int:
        """The process that uses the folder, by its lock, or as far as node.json knows; 0: none does."""
        if not is_locked(self.lock_file):
            return 0
        file = self.node_file()
        return holder(self.lock_file) or (file.pid if file else 0)

    def node_file(self) -> NodeFile | None:
        """None: no daemon has run here, or the file is damaged."""
        with suppress(OSError, ValueError, TypeError):
            return NodeFile(**json.loads((self.path / "node.json").read_text("utf-8")))
        return None

    def job(self, job: JobId) -> Path:
        return self.path / "jobs" / _plain("job", job)

    def run_file(self, job: JobId) -> Path:
        return self.job(job) / "run.json"

    def replicas_file(self, job: JobId) -> Path:
        return self.job(job) / "replicas.json"

    def experience_file(self, job: JobId) -> Path:
        return self.job(job) / "experience.json"

    def replica_log(self, job: JobId, replica: str) -> Path:
        return self.job(job) / "logs" / f"{_plain('replica', replica)}.log"

    def replica_logs(self, job: JobId) -> dict[str, Path]:
        """All logs of the job here, by replica, the oldest first."""
        found = {path.stem: path for path in (self.job(job) / "logs").glob("*.log")}
        return {name: found[name] for name in sorted(found, key=_in_order)}

    def set_aside(self, job: JobId) -> Path:
        """Make room for another job of that id: the logs that this one left get a name that no job has."""
        left = self.job(job)
        for path in (self.run_file(job), self.replicas_file(job), self.experience_file(job)):
            path.unlink(missing_ok=True)  # the next daemon is not to find it
        aside = left.with_name(f"{left.name}~{secrets.token_hex(4)}")
        left.rename(aside)
        return aside

    def jobs(self) -> Iterator[JobId]:
        """The jobs that have left anything here."""
        for path in sorted((self.path / "jobs").glob("*/")):
            yield JobId(path.name)


class StateFolder(NodeFiles):
    """All of it for a daemon, and for those who talk to it. One daemon at a time writes, the one that called `lock`."""

    def __init__(self, path: Path, token_file: Path | None = None) -> None:
        """Makes the folder and the token if need be. `token_file`: use that one, such as for several nodes."""
        super().__init__(path)
        self.token_file = (token_file or self.token_copy).absolute()
        self.job_uid: int | None = None
        """Of the user that jobs run as; None: ours."""
        self._lock: int | None = None
        parse_address(self.address)
        parse_address(f"unix:{self.path / 'keeper.sock'}")  # it is longer
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            keep_private(self.path)
            self.token = _token(self.token_file, may_make=token_file is None)
        except OSError as error:
            fix = "Give one that you own and may write to, or set POLLUX_HOME"
            problem = f"cannot be used as a folder ({error.strerror})"
            raise InvalidSpec("--dir", str(self.path), problem, fix) from None

    def admit(self, account: Account | None) -> None:
        """Let the jobs of this user in, as far as they have to; None: nobody. For the daemon, before it starts any."""
        self.job_uid = None if account is None else account.uid
        mode = PRIVATE if account is None else PASSABLE
        (self.path / "jobs").mkdir(mode=mode, exist_ok=True)
        for folder in (self.path, self.path / "jobs", *map(self.job, self.jobs())):
            folder.chmod(mode)
        for logs in self.path.glob("jobs/*/logs"):
            logs.chmod(PRIVATE)

    def make_job(self, job: JobId) -> None:
        """Its folder, and the one of its logs, which are opened for it. `OSError` if that cannot be done."""
        folder = self.job(job)
        (folder / "logs").mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        (folder / "logs").chmod(PRIVATE)
        folder.chmod(PRIVATE if self.job_uid is None else PASSABLE)

    def guard_socket(self) -> None:
        """The local socket is for its owner and for jobs: who gets there still has to show who it is."""
        self.socket.chmod(0o600)
        if self.job_uid is not None:
            os.chown(self.socket, self.job_uid, -1)

    def lock(self) -> None:
        """Be the only daemon here. Children do not inherit it: they may outlive us."""
        self._lock = hold(self.lock_file)
        if self._lock is None:
            file = self.node_file()
            who = f"the daemon of node {file.node}, pid {file.pid}" if file else "a daemon"
            raise Permanent(f"{self.path} is in use by {who}. End it, or give another folder with --dir.")

    def close(self) -> None:
        """Let another daemon in. May be called again."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def has_new_token(self) -> bool:
        """Whether the daemon before knew another one, and so do its replicas."""
        with suppress(OSError, ValueError):
            return self.token_copy.read_text("ascii").strip() != self.token
        return False

    def copy_token(self) -> None:
        """So that it is not lost with its file while replicas live here which know no other one."""
        if self.token_copy != self.token_file:
            write(self.token_copy, self.token)

    def write_node_file(self, file: NodeFile) -> None:
        fields = {"node": file.node, "pid": file.pid, "host": file.host, "port": file.port}
        write(self.path / "node.json", json.dumps(fields))

    @property
    def is_after_reboot(self) -> bool:
        """Whether the machine was restarted since `note_boot`. No if nobody knows."""
        with suppress(OSError):
            before = (self.path / "boot_id").read_text("ascii").strip()
            return boot_id() not in ("", before)
        return False

    def note_boot(self) -> None:
        write(self.path / "boot_id", boot_id())

    def leave(self, *, is_for_good: bool) -> None:
        """Remove the socket; also what tells of this node, if nothing of it is left that another daemon could find."""
        self.socket.unlink(missing_ok=True)
        if is_for_good:
            (self.path / "node.json").unlink(missing_ok=True)
            shutil.rmtree(self.path / exits.FOLDER, ignore_errors=True)
            self.forget_token()

    def forget_token(self) -> None:
        """Nothing is left here that knows it: the next one may be another."""
        if self.token_copy != self.token_file:
            self.token_copy.unlink(missing_ok=True)


def boot_id() -> str:
    """Another one each time the machine, or the container, is started; empty where the system does not tell."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()} {began_at(1)}"
    return ""


def is_locked(path: Path) -> bool:
    """Whether a process holds this lock file."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def keep_private(path: Path) -> None:
    """Nobody but its owner lists or changes this folder; one that jobs may pass through stays so."""
    if path.stat().st_mode & 0o777 != PASSABLE:
        path.chmod(PRIVATE)


def write(path: Path, text: str, *, is_durable: bool = False, owner: int | None = None) -> None:
    """Replace the file: a reader, or a daemon after a crash, sees the old text or the new one.

    `is_durable`: that holds even if the machine goes down. Costs about a millisecond. `owner`: who alone may read it,
    if somebody else than we.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # environments of jobs may be in it
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            if owner is not None:
                os.fchown(handle, owner, -1)
            file.write(text)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def is_full(folder: Path) -> bool:
    """Whether its disk has no room at all."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    return room.f_bavail == 0 or (room.f_files > 0 and room.f_favail == 0)


def last_lines(path: Path, count: int, max_letters: int = 500) -> str:
    """The end of a log, on one line and fit for a message; empty if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line for line in (" ".join(line.split()) for line in text.splitlines()) if line]
    plain = "".join(letter if letter.isprintable() else " " for letter in " | ".join(lines[-count:]))
    return plain if len(plain) <= max_letters else f"…{plain[-max_letters:]}"


def _in_order(replica: str) -> tuple[list[int], str]:
    """`2-3` comes before `10-4`: the generation that it was started for, then a running number."""
    return [int(part) for part in replica.split("-") if part.isdecimal()], replica


def _plain(field: str, name: str) -> str:
    """The name, which came over the wire, if it leads nowhere else."""
    if not name or len(os.fsencode(name)) > 200 or name in (".", "..") or any(letter in name for letter in "/\0\n"):
        raise InvalidSpec(field, name, "cannot be the name of a file", "Use letters, digits, '-' and '_'")
    return name


def _token(path: Path, *, may_make: bool) -> str:
    fix = "Give the token file of another daemon, or none"
    if may_make:
        with suppress(FileExistsError):
            make_token(path)
    try:
        token = path.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        raise InvalidSpec("token file", str(path), f"cannot be read ({error})", fix) from None
    if len(token) < 16:
        raise InvalidSpec("token file", str(path), "holds no token of 16 characters or more", fix)
    if token.startswith(PREFIX):
        raise InvalidSpec("token file", str(path), "holds the credential of a job, which is no token", fix)
    return token


def make_token(path: Path) -> None:
    """Linked into place when it is complete: a reader never sees half of it, and the first of two writers wins."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    try:
        os.link(new, path)
    finally:
        new.unlink()
